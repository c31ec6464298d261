"""The output of in_proj, most of what a layer keeps for backward, computed again there in some layers of a model.

With adapters on frozen projections it is nearly all that is kept: no copies of weights, no inputs of a weight's
gradient go beside it, while what one layer needs in its backward pass stays as large. To keep less, the product of a
share of the layers is made twice: a layer's worth of memory for the time of one forward product, the cheapest that is
left (benchmarks/NOTES.md). Where projections are trained it is worth that in narrow models, whose products are quick
for their size.

What is computed again is that of the forward pass but for roundings: its input comes from the residual stream, which
backward gets by subtraction (`ssm_tune.kernels.recompute_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from ssm_tune.kernels.recompute import random_state_for, recomputable, recomputing, reference_to
from ssm_tune.mixers.cast_together import with_these_copies

# Channels of in_proj's input, at most, of a model that is narrow.
_NARROW = 1024


class Shares(NamedTuple):
    """Of the layers, whose in_proj is computed twice: where it is frozen, and in narrow models where it is trained.

    They begin with the first layer and are evenly spread. What the last few layers keep is needed as soon as it is
    there, so that none of them should be among them.
    """

    frozen: float = 0.0
    narrow: float = 0.0

    def of(self, mixer: nn.Module, hidden_states: Tensor) -> float:
        if not mixer.in_proj.weight.requires_grad:
            return self.frozen
        return self.narrow if hidden_states.shape[-1] <= _NARROW else 0.0


def projected_again(
    mixer: nn.Module, hidden_states: Tensor, project: Callable[[Tensor], Tensor], shares: Shares
) -> Tensor:
    """project(hidden_states), by the mixer's in_proj; what backward needs of it is computed again in some layers."""
    if not (recomputing() and _is_among(mixer.layer_idx, shares.of(mixer, hidden_states))):
        return project(hidden_states)
    random_state = random_state_for(mixer.in_proj, hidden_states)
    projected, given = project(hidden_states), reference_to(hidden_states)
    recomputable([projected], with_these_copies(lambda: [project(given())]), random_state)
    return projected


def _is_among(layer: int, share: float) -> bool:
    return math.floor(layer * share) > math.floor((layer - 1) * share)
