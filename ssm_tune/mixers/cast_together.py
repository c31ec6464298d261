"""Small weights of several layers cast to lower precision together: one launch, where each would take a launch.

The copies hold for one call of the mixer that the layers belong to, or of some blocks, so that they can never be older
than the weights, and for what that call has computed again in its backward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
Copies = dict[tuple[int, torch.dtype], Tensor]  # by the address of the weight, which lives as long

# Kinds of device where a cast of a small weight costs a launch above all.
DEVICES = ("cuda",)
_ALIGNED = 64  # numbers: where each copy begins
_PIECE, _LAUNCH = 2**14, 64  # numbers that a block of threads casts; tensors that go with one launch

_local = threading.local()


class CastLayer:
    """A layer that takes casts of its weights by `in_dtype`."""

    def weights_to_cast(self, like: Tensor) -> tuple[list[Tensor], torch.dtype] | None:
        """Those of one dtype, and the dtype that they are used in, for inputs like this one. None: the layer computes
        otherwise."""
        raise NotImplementedError


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight.to(dtype)`, without a gradient: the copy, if there is one."""
    copy = copy_in(weight, dtype)
    return weight.to(dtype) if copy is None else copy


def copy_in(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The copy, which may be kept for backward, if there is one."""
    copies: Copies | None = getattr(_local, "copies", None)
    copy = None if not copies else copies.get((weight.data_ptr(), dtype))
    return None if copy is None or copy.shape != weight.shape else copy


def casts_together(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Of a mixer's forward: the weights of its layers of these names are cast together before it."""

    def decorate(forward: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(forward)
        def with_copies(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Result:
            layers = [layer for name in names if isinstance(layer := self._modules.get(name), CastLayer)]
            if not layers or hidden_states.device.type not in DEVICES or torch.compiler.is_compiling():
                return forward(self, hidden_states, *args, **kwargs)
            with _holding(_cast(layers, hidden_states)):
                return forward(self, hidden_states, *args, **kwargs)

        return with_copies

    return decorate


def with_these_copies(function: Callable[[], Result]) -> Callable[[], Result]:
    """The function, for later: it is given the copies that there are now."""
    copies: Copies | None = getattr(_local, "copies", None)
    if not copies:
        return function

    def called() -> Result:
        with _holding(copies):
            return function()

    return called


@contextmanager
def cast_at_once(weights: Sequence[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Inside, there are copies of these weights, all on one device."""
    if not weights or weights[0].device.type not in DEVICES:
        yield
        return
    with torch.no_grad():
        copies = _copies(weights, dtype)
    with _holding(copies):
        yield


@contextmanager
def _holding(copies: Copies) -> Iterator[None]:
    before, _local.copies = getattr(_local, "copies", None), copies
    try:
        yield
    finally:
        _local.copies = before


@torch.no_grad()
def _cast(layers: Sequence[CastLayer], like: Tensor) -> Copies:
    """The copies that there are, and those that the layers lack."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}
    for layer in layers:
        weights, dtype = layer.weights_to_cast(like) or ([], None)
        for weight in weights:
            plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous() and weight.numel()
            wanted = weight.dtype != dtype and weight.device == like.device
            if plain and wanted and copy_in(weight, dtype) is None:
                groups.setdefault((weight.dtype, dtype), []).append(weight)
    copies: Copies = dict(getattr(_local, "copies", None) or {})
    for (_, dtype), weights in groups.items():
        copies |= _copies(weights, dtype)
    return copies


def _copies(weights: Sequence[Tensor], dtype: torch.dtype) -> Copies:
    """Of contiguous weights of one dtype, in one piece of memory."""
    sizes = [-(-weight.numel() // _ALIGNED) * _ALIGNED for weight in weights]
    places = torch.empty(sum(sizes), dtype=dtype, device=weights[0].device).split(sizes)
    into = [place[: w.numel()].view(w.shape) for place, w in zip(places, weights, strict=True)]
    pairs: list[list[Tensor]] = [into, list(weights)]
    if sum(sizes) <= _LAUNCH * _PIECE:
        # One launch still, of as many blocks: PyTorch's own pieces are too long for so little.
        pairs = [[part for tensor in side for part in tensor.view(-1).split(_PIECE)] for side in pairs]
    torch._foreach_copy_(*pairs)
    return {(weight.data_ptr(), dtype): copy for weight, copy in zip(weights, into, strict=True)}
