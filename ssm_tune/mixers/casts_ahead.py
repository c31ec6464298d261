"""Casts of large weights, launched before they are needed, beside what is computed until then, in recorded passes.

A cast reads and writes memory for tens of microseconds and waits for nothing but the memory that it writes. On a stream
of its own it is a branch of the graph, next to the scan, which leaves the memory idle. What comes next is known from
the passes before the recording. The copy is allocated on the first stream, which uses it and gives it back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssm_tune.kernels.side_stream import recorded_stream

# Whether recordings have casts ahead.
ON = False
# Casts that are launched before they are needed: each takes the memory of a copy.
AHEAD = 2
# Numbers in a weight, at least.
SMALLEST = 2**20


class Use(NamedTuple):
    """A weight, by the address, that is cast."""

    address: int
    dtype: torch.dtype


_pass: _Learnt | _Ahead | None = None


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight.to(dtype)`, without a gradient; to be read only, and by what is launched next."""
    return weight.to(dtype) if _pass is None else _pass.cast(weight, dtype)


@contextmanager
def casts_ahead(uses: list[Use], weights: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Within, a pass that uses `weights`: writes `uses` down or, in a recording, launches these casts ahead."""
    global _pass
    if not ON:
        yield
        return
    known = {weight.data_ptr(): weight.detach() for weight in weights if weight.numel() >= SMALLEST}
    stream = recorded_stream(device)
    before = _pass
    _pass = current = _Learnt(uses, known) if stream is None else _Ahead(uses, known, stream, _cast_stream(device))
    try:
        yield
    finally:
        _pass = before
        current.join()


@functools.cache
def _cast_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Learnt:
    """A pass that writes down which weights are cast, in their order."""

    def __init__(self, uses: list[Use], known: dict[int, Tensor]) -> None:
        uses.clear()
        self._uses, self._known = uses, known

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.data_ptr() in self._known and weight.dtype != dtype:
            self._uses.append(Use(weight.data_ptr(), dtype))
        return weight.to(dtype)

    def join(self) -> None:
        """Nothing to wait for."""


class _Ahead:
    """A pass on the stream `main` whose casts are launched on `side`."""

    def __init__(self, uses: Sequence[Use], known: dict[int, Tensor], main: Any, side: Any) -> None:
        self._uses, self._known, self._main, self._side = uses, known, main, side
        self._ready: dict[int, tuple[Tensor, Any]] = {}
        self._next = 0
        self._parted = False

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        expected = self._next < len(self._uses) and self._uses[self._next] == Use(weight.data_ptr(), dtype)
        if not expected or recorded_stream(weight.device) != self._main:
            return weight.to(dtype)
        number, self._next = self._next, self._next + 1
        for coming in range(self._next, min(self._next + AHEAD, len(self._uses))):
            if coming not in self._ready:
                self._launch(coming)
        if number not in self._ready:
            return weight.to(dtype)
        copy, done = self._ready.pop(number)
        self._main.wait_event(done)
        return copy

    def _launch(self, number: int) -> None:
        address, dtype = self._uses[number]
        weight = self._known[address]
        copy = torch.empty_like(weight, dtype=dtype)
        self._side.wait_stream(self._main)  # which may still use what was in that memory
        self._parted = True
        with torch.cuda.stream(self._side), torch.no_grad():
            copy.copy_(weight)
        self._ready[number] = copy, self._side.record_event()

    def join(self) -> None:
        """Let the first stream wait for casts that nobody needed."""
        if self._parted:
            self._main.wait_stream(self._side)
            self._ready.clear()
