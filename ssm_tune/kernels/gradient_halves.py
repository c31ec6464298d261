"""The gradients of both halves of a tensor, written side by side into one tensor by what the halves were given to.

Of a tensor that was cut in two autograd joins the gradients by copying both into a new one. Here an operation asks in
its forward pass where the gradient by an input of it is to go (`gradient_of`). If that input is a half of
`split_in_two`, and somebody asked for the other half too, then whoever comes first in a backward pass makes a tensor
for both, and the other writes beside. Two halves that lie so are one tensor already.

Nothing depends on that: each half of such a tensor is given out once, so that gradients never overwrite each other,
and what arrives otherwise - one half alone, a sum of several gradients, one that a hook has changed, one of another
backward pass - is joined by copying. What is known of a tensor hangs on its node in the graph and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Kinds of device whose kernels ask.
DEVICES = ("cuda",)


def split_in_two(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The halves (..., n), (..., n) of a tensor (..., 2 n): views, as `tensor.chunk(2, dim=-1)` gives."""
    wanted = (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and tensor.device.type in DEVICES
        and type(tensor) is Tensor
        and not torch.compiler.is_compiling()
    )
    return _Split.apply(tensor) if wanted else tensor.chunk(2, dim=-1)


def gradient_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that backward calls with `tensor`, or one like it, for an empty tensor to write the gradient into.

    It is contiguous, or a half of one that is. To be called in the forward pass, with the very tensor that was given:
    if that is a half is told by its history, which views and copies of it have not.
    """
    halves = getattr(tensor.grad_fn, "halves", None)
    if not isinstance(halves, _Halves):
        return _alone
    side = tensor.output_nr
    halves.asked.add(side)
    return lambda like: halves.empty(side, like)


def _alone(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


class _Halves:
    """What operations on the halves of one tensor, number 0 and 1, know of each other."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        # By the number of the half that nobody has yet: the whole, whose other half was given out.
        self.waiting: dict[int, Tensor] = {}

    def empty(self, side: int, like: Tensor) -> Tensor:
        if len(self.asked) < 2:
            return _alone(like)
        whole = self.waiting.pop(side, None)
        if whole is None:
            size = (*like.shape[:-1], 2 * like.shape[-1])
            whole = self.waiting[1 - side] = torch.empty(size, dtype=like.dtype, device=like.device)
        return whole.narrow(-1, side * like.shape[-1], like.shape[-1])


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.halves = _Halves()
        ctx.set_materialize_grads(False)
        return tensor.chunk(2, dim=-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        ctx.halves.waiting.clear()  # a half that nobody took in this pass
        given = first if first is not None else second
        if given is None:
            return None
        first, second = (torch.zeros_like(given) if half is None else half for half in (first, second))
        whole = None if torch.is_grad_enabled() else _side_by_side(first, second)
        return torch.cat([first, second], dim=-1) if whole is None else whole


def _side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """The tensor that the two are halves of, if they lie so in memory."""
    width = first.shape[-1]
    if not (
        type(first) is type(second) is Tensor
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + width == second.storage_offset()
        and first.stride() == second.stride()
    ):
        return None
    whole = first.as_strided((*first.shape[:-1], 2 * width), first.stride(), first.storage_offset())
    return whole if whole.is_contiguous() else None
