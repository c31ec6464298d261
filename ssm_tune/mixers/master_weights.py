"""Linear layers under autocast that keep their float32 weights for backward, not copies of lower precision.

Autocast casts a weight for the forward pass, and autograd keeps the copy until backward: 2 bytes a parameter beside the
4 of the master, which is there anyway. Here the master is kept and cast a second time, and its gradient comes out of
the matrix product in float32, where autocast's is rounded to lower precision and then cast.

    y = x W' + bias          dx = dy W          dW = dy' x, in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ssm_tune.kernels.products import product_in
from ssm_tune.kernels.recompute import saving_less
from ssm_tune.mixers.cast_together import cast_at_once, copy_in
from ssm_tune.mixers.watched import is_watched

_LOW = (torch.bfloat16, torch.float16)
# Numbers in a weight whose copy is kept for backward where blocks are recorded: x_proj and dt_proj of Mamba-1.
SMALL = 2**20


def keeps_master(linear: nn.Module, x: Tensor) -> bool:
    """Whether `linear` is to be called by `master_linear`: a plain layer that nobody watches, under autocast, where
    what is kept for backward is for this package to decide."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not saving_less(x):
        return False
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and linear.weight.dtype == torch.float32
        and x.dtype in (torch.float32, *_LOW)
        and torch.get_autocast_dtype(kind) in _LOW
        and not is_watched(linear)
    )


def master_linear(linear: nn.Module, x: Tensor, leave: Callable[[Tensor], None] | None = None) -> Tensor:
    """`linear(x)` under autocast: x (..., in), and the result (..., out), in autocast's dtype.

    leave: takes care of the weight's gradient; given the slope of the result, (tokens, out), in backward.
    """
    weight = linear.weight if leave is None else linear.weight.detach()
    return _MasterLinear.apply(x.to(torch.get_autocast_dtype(x.device.type)), weight, linear.bias, leave)


@contextmanager
def small_weights_cast(blocks: Iterable[nn.Module], kind: str) -> Iterator[None]:
    """Inside, `master_linear` has copies of the blocks' small weights, cast in one launch, and keeps them for backward:
    in a layer two launches of a few microseconds each would take longer than they are worth.

    kind: of device.
    """
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    linears = [module for block in blocks for module in block.modules() if type(module) is nn.Linear]
    weights = [linear.weight for linear in linears if linear.weight.dtype == torch.float32]
    small = [weight for weight in weights if 0 < weight.numel() <= SMALL and weight.is_contiguous()]
    with cast_at_once(small if dtype in _LOW else [], dtype or torch.float32):
        yield


class _MasterLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leave: Callable[[Tensor], None] | None
    ) -> Tensor:
        need_x, need_weight, *_ = ctx.needs_input_grad
        ctx.leave, ctx.bias_dtype = leave, None if bias is None else bias.dtype
        copy = copy_in(weight, x.dtype)
        ctx.save_for_backward(x if need_weight else None, (weight if copy is None else copy) if need_x else None)
        # Cast here, not by autocast, which would keep the copies until it ends.
        with torch.autocast(x.device.type, enabled=False):
            low = weight.to(x.dtype) if copy is None else copy
            return F.linear(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        with torch.autocast(dy.device.type, enabled=False):
            flat = dy.flatten(0, -2)
            if weight is not None:
                dx = torch.mm(flat, weight.to(dy.dtype)).view(*dy.shape[:-1], -1)
            if x is not None:
                dweight = product_in(torch.float32, flat.t(), x.flatten(0, -2))
            if ctx.needs_input_grad[2]:
                dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if ctx.leave is not None:
            ctx.leave(flat)
        return dx, dweight, dbias, None
