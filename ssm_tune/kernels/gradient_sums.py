"""A tensor that goes two ways, whose two gradients are added by the operation that made it.

Autograd adds the gradients of a tensor's uses by a pass over both. Where the backward pass of what made the tensor can
take two (`takes_two`), it is handed the first as its gradient and the second beside (`second_gradient`), and adds them
as it reads them. What is known of a tensor hangs on its node in the graph and goes with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def takes_two(ctx: Any) -> None:
    """To be called in an operation's forward pass: its backward pass asks for `second_gradient`, every time."""
    ctx.second = None


def second_gradient(ctx: Any) -> Tensor | None:
    """In the backward pass: what is to be added to the gradient of the (only) output; of the same shape and dtype."""
    second, ctx.second = ctx.second, None
    return second


def used_twice(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor, once for each of two uses."""
    wanted = (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and type(tensor) is Tensor
        and not torch.compiler.is_compiling()
        and hasattr(tensor.grad_fn, "second")
    )
    return _Both.apply(tensor, tensor.grad_fn) if wanted else (tensor, tensor)


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, maker: Any) -> tuple[Tensor, Tensor]:
        ctx.maker = maker
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor), tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.maker.second = None
        if first is None or second is None:
            return (first if second is None else second), None
        if torch.is_grad_enabled() or first.dtype != second.dtype:
            return first + second, None
        ctx.maker.second = second
        return first, None
