"""A = -exp(A_log), the rates at which states decay (Mamba, section 3.6), with as few kernels as there can be.

Left to autograd it takes four, of a few microseconds each in every layer: exp, its negation, and the gradients of both.
Here it takes three, and where blocks are recorded in a CUDA graph three for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_local = threading.local()  # `rates`: what `rates_together` has computed, by the id of A_log, with A_log itself


def decay_rates(A_log: Tensor) -> Tensor:
    """A of any shape, in float32."""
    known: dict[int, tuple[Tensor, Tensor]] = getattr(_local, "rates", {})
    found = known.get(id(A_log))
    return _Rates.apply(A_log.float())[0] if found is None else found[1]


@contextmanager
def rates_together(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, `decay_rates` of these blocks are there already, whose gradients are computed together, too: when those
    of all of them are known."""
    named = (pair for block in blocks for pair in block.named_parameters())
    A_logs = [parameter for name, parameter in named if name.split(".")[-1] == "A_log"]
    before = getattr(_local, "rates", {})
    rates: tuple[Tensor, ...] = _Rates.apply(*(A_log.float() for A_log in A_logs)) if A_logs else ()
    _local.rates = {id(A_log): (A_log, A) for A_log, A in zip(A_logs, rates, strict=True)}
    try:
        yield
    finally:
        _local.rates = before


class _Rates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *A_logs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rates = torch._foreach_exp(A_logs)
        torch._foreach_neg_(rates)
        ctx.save_for_backward(*rates)
        return tuple(rates)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(slope, A) for slope, A in zip(slopes, ctx.saved_tensors, strict=True) if slope is not None]
        found = iter(torch._foreach_mul(*map(list, zip(*pairs, strict=True)))) if pairs else iter(())
        return tuple(None if slope is None else next(found) for slope in slopes)
