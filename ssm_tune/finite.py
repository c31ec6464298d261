"""Losses and gradient norms that are not finite, found without letting a GPU run out of work.

To read a number is to wait for everything that was given to the GPU before. So a number is copied to the host when it
is computed, and read two micro-batches later, when the GPU has long passed it and has others to work on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Micro-batches between a number and its reading, on a GPU.
LAG = 2


class Watched(NamedTuple):
    """A number, the step that it is of, and the source rows that it comes from (None: of no rows, as a norm)."""

    step: int
    rows: Tensor | None
    value: Tensor


class FiniteWatch:
    """Numbers that are to be finite, in the order in which they were computed."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Watched, torch.cuda.Event | None]] = []
        self._batches = 0

    def add(self, step: int, value: Tensor, rows: Tensor | None = None) -> None:
        """value: any shape; read when `next_batch` or `rest` gives it back."""
        copied = None
        if type(value) is Tensor and value.is_cuda:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)  # only into such can be copied ahead
            value = host.copy_(value, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._pending.append((self._batches, Watched(step, rows, value), copied))

    def next_batch(self) -> Watched | None:
        """Told that a micro-batch begins: the first number that is not finite, of those that can be read by now."""
        self._batches += 1
        due, later = [], []
        for entry in self._pending:
            noted, _, copied = entry
            (due if copied is None or noted <= self._batches - LAG else later).append(entry)
        self._pending = later
        return _first(due)

    def rest(self) -> Watched | None:
        """The first number that is not finite, of all; waits for the last."""
        due, self._pending = self._pending, []
        return _first(due)


def _first(due: list[tuple[int, Watched, torch.cuda.Event | None]]) -> Watched | None:
    for _, watched, copied in due:
        if copied is not None:
            copied.synchronize()
        if not torch.isfinite(watched.value).all():
            return watched
    return None
