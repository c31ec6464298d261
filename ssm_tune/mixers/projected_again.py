"""The output of in_proj, most of what a layer keeps for backward, computed again there in some layers of a model.

With adapters on frozen projections it is nearly all that is kept: no copies of weights, no inputs of a weight's
gradient go beside it, while what one layer needs in its backward pass stays as large. To keep less, the product of a
share of the layers is made twice: a layer's worth of memory for the time of one forward product, which is the cheapest
that is left once everything that takes less has gone.

What is computed again is that of the forward pass but for roundings: its input comes from the residual stream, which
backward gets by subtraction (`ssm_tune.kernels.recompute_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from ssm_tune.kernels.recompute import random_state_for, recomputable, recomputing, reference_to
from ssm_tune.mixers.cast_together import with_these_copies


def projected_again(
    mixer: nn.Module, hidden_states: Tensor, project: Callable[[Tensor], Tensor], share: float
) -> Tensor:
    """project(hidden_states), by the mixer's in_proj. That share of the layers, evenly from the first on, computes it
    again in backward, where in_proj's weight is frozen."""
    if not (recomputing() and _is_among(mixer.layer_idx, share)) or mixer.in_proj.weight.requires_grad:
        return project(hidden_states)
    random_state = random_state_for(mixer.in_proj, hidden_states)
    projected, given = project(hidden_states), reference_to(hidden_states)
    recomputable([projected], with_these_copies(lambda: [project(given())]), random_state)
    return projected


def _is_among(layer: int, share: float) -> bool:
    return math.floor(layer * share) > math.floor((layer - 1) * share)
