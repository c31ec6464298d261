"""The output of in_proj, most of what a layer keeps for backward, computed again there in some layers of a model.

With adapters on frozen projections it is nearly all that is kept: no copies of weights, no inputs of a weight's
gradient go beside it, while what one layer needs in its backward pass stays as large. To keep less, one product in
every so many layers is made twice: a layer's worth of memory for the time of one forward product, which is the cheapest
that is left once everything that takes less has gone.

What is computed again is that of the forward pass but for roundings: its input comes from the residual stream, which
backward gets by subtraction (`ssm_tune.kernels.recompute_sums`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ssm_tune.kernels.recompute import random_state_for, recomputable, recomputing, reference_to
from ssm_tune.mixers.cast_together import with_these_copies


def projected_again(mixer: nn.Module, hidden_states: Tensor, project: Callable[[Tensor], Tensor], every: int) -> Tensor:
    """project(hidden_states), by the mixer's in_proj; of every so many layers, from the first on, one computes it again
    in backward, where in_proj's weight is frozen. `every`: 0 for none."""
    if not (every and mixer.layer_idx % every == 0 and recomputing()) or mixer.in_proj.weight.requires_grad:
        return project(hidden_states)
    random_state = random_state_for(mixer.in_proj, hidden_states)
    projected, given = project(hidden_states), reference_to(hidden_states)
    recomputable([projected], with_these_copies(lambda: [project(given())]), random_state)
    return projected
