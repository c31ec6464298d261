"""A linear layer's gradient that waits for the layer's input until the backward pass of what made it has it again.

Backward comes to out_proj before it comes to the scan. The scan's output, which is not kept, would have to be computed
for out_proj's weight, although the scan's own backward pass finds it on its way. So out_proj gives the gradient of its
input alone, and keeps the slope of its output; the product of the two is made before the scan, in a node that the
scan's input goes through: it is what backward comes to next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ssm_tune.kernels import narrow_weight_gradient
from ssm_tune.kernels.recompute import Reference, graph_is_kept, recomputing, reference_to
from ssm_tune.mixers.master_weights import keeps_master, master_linear
from ssm_tune.mixers.projections import project


class LaterLayer:
    """A layer that can leave the gradient of one factor of its weight, (out, in), for later."""

    def later_factor(self, like: Tensor) -> Tensor | None:
        """That factor, as it is used for inputs like this one; None: nothing is to be left."""
        raise NotImplementedError

    def forward_later(self, x: Tensor, later: LaterGradient) -> Tensor:
        """The layer's output, of the factor in `later`, whose backward pass sets `later.slope`."""
        raise NotImplementedError


class LaterGradient:
    """That of `factor` (out, in): slope' inputs, of the slope (tokens, out) and what the layer is given
    (batch, length, in)."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor
        self.inputs: Reference | None = None
        self.slope: Tensor | None = None

    def set_slope(self, slope: Tensor) -> None:
        """Leave the product for later; in the layer's backward pass."""
        self.slope = slope
        if self.inputs is not None:
            self.inputs.expect()

    def gradient(self) -> Tensor | None:
        slope, self.slope = self.slope, None
        reference = self.inputs
        if not graph_is_kept():
            self.inputs = None  # and with it what they would be computed from
        if slope is None or reference is None:
            return None
        inputs = reference().flatten(0, -2).to(slope.dtype)
        with torch.autocast(slope.device.type, enabled=False):
            return narrow_weight_gradient(slope, inputs, self.factor.dtype)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, later: LaterGradient) -> Tensor:
        ctx.later = later
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, ctx.later.gradient(), None


def later_gradient(linear: nn.Module, x: Tensor) -> LaterGradient | None:
    """For `linear`, given what is made of x; None where its gradient need not wait, or it has none."""
    if not (recomputing() and x.requires_grad):
        return None
    factor = None
    if isinstance(linear, LaterLayer):
        factor = linear.later_factor(x)
    elif keeps_master(linear, x):
        factor = linear.weight
    return LaterGradient(factor) if factor is not None and factor.requires_grad else None


def tapped(x: Tensor, later: LaterGradient | None) -> Tensor:
    """x, for the operation whose output the layer is given: before it, backward makes the gradient that was left."""
    return x if later is None else _Tap.apply(x, later.factor, later)


def project_later(
    linear: nn.Module, x: Tensor, later: LaterGradient | None, quantised_dtype: torch.dtype | None = None
) -> Tensor:
    """`projections.project`, with the gradient left for later, if there is one to leave."""
    if later is None:
        return project(linear, x, quantised_dtype)
    later.inputs = reference_to(x)
    if isinstance(linear, LaterLayer):
        return linear.forward_later(x, later)
    return master_linear(linear, x, later.set_slope)
