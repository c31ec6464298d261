"""Gradients of weights on a second stream, beside the rest of a backward pass that is being recorded in a CUDA graph.

Nothing in backward waits for the gradient of a weight, yet on one stream everything after it does. On a second stream
it becomes a branch of the graph, which fills what the other kernels leave idle: scans that wait for memory, and the
microseconds between one kernel and the next. Outside a recording, which would gain nothing, all is computed at once.

Such a gradient never passes through autograd, which might add it to another before it is there: the operation gives
none, and whoever asked for the backward pass finds it in what `beside` gives, after the branch has joined.

Memory is kept by stream, and what one stream gave back is not given to another. So a gradient is allocated on the first
stream, where it may take the place of activations that have been used; and what it is computed from is held until the
first stream has waited for it, a few gradients later, for it would be given out again while it is still read.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Whether recordings have the second stream.
ON = False
# Calls of `aside` whose tensors are held at most. With more the first stream waits, which costs time too, for all but
# half of them.
HELD = 4
# Bytes of a gradient that goes aside, at most.
LARGEST = 2**40

# A weight, and what computes its gradient: in the tensor that it is given, contiguous and like the weight, or in one of
# its own. (None: in one of its own.)
Job = tuple[Tensor, Callable[[Tensor | None], Tensor]]

_branch: _Branch | None = None


def aside(*jobs: Job) -> list[Tensor | None]:
    """The gradients of weights, in backward; None: it is left to the second stream.

    What a job reads must have been launched, and must not be written again.
    """
    branch = _branch
    if branch is None or not jobs or not branch.takes(jobs):
        return [compute(None) for _, compute in jobs]
    branch.launch(jobs)
    return [None] * len(jobs)


@contextmanager
def beside(weights: Sequence[Tensor], device: torch.device) -> Iterator[dict[Tensor, Tensor]]:
    """Within, in a recording, gradients of these weights may go aside. Behind it, they are in the dictionary given."""
    global _branch
    stream = recorded_stream(device) if ON else None
    if stream is None:
        yield {}
        return
    branch = _branch = _Branch(weights, stream, _side_stream(device))
    try:
        yield branch.gradients
    finally:
        _branch = None
        branch.join()


def first_stream() -> torch.cuda.Stream | None:
    """The stream to record on: one that goes before the second. None: any."""
    return _first_stream(torch.cuda.current_device()) if ON else None


def recorded_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream, if what is launched on it goes into a graph."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device)


# One of each for a device: cuBLAS keeps memory for every stream that it has seen.
@functools.cache
def _first_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Branch:
    """What is launched on the second stream, `side`, in the recording of one backward pass on the first, `main`."""

    def __init__(self, weights: Sequence[Tensor], main: Any, side: Any) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self._weights, self._main, self._side = set(weights), main, side
        self._held: deque[tuple[Any, Any]] = deque()
        self._parted = False

    def takes(self, jobs: Sequence[Job]) -> bool:
        """Whether all are gradients of this pass; another thread's is on a stream of its own."""
        known = all(weight in self._weights and weight.nbytes <= LARGEST for weight, _ in jobs)
        return known and recorded_stream(jobs[0][0].device) == self._main

    def launch(self, jobs: Sequence[Job]) -> None:
        into = [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) for weight, _ in jobs]
        self._side.wait_stream(self._main)
        self._parted = True
        with torch.cuda.stream(self._side):
            for (weight, compute), empty in zip(jobs, into, strict=True):
                gradient, before = compute(empty), self.gradients.get(weight)
                self.gradients[weight] = gradient if before is None else before.add_(gradient)
        self._held.append((self._side.record_event(), (jobs, into)))
        if len(self._held) > HELD:
            let_go = [self._held.popleft() for _ in range(len(self._held) - max(1, HELD // 2))]
            self._main.wait_event(let_go[-1][0])

    def join(self) -> None:
        """Let the first stream wait for all."""
        if self._parted:
            self._main.wait_stream(self._side)
            self._held.clear()
