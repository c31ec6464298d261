"""A step as a CUDA graph: launched whole, where PyTorch launches hundreds of kernels, each from Python."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels.devices import device_of

logger = logging.getLogger(__name__)

_said: set[str] = set()


def say_once(message: str, *arguments: Any) -> None:
    """A warning, at the first time alone."""
    text = message % arguments
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


class Graphed:
    """Calls `function(tensor)`; on a GPU, from the second call with as many rows on, as one graph.

    The first call runs as it is (kernels are compiled and tuned in it), and counts. Where a graph cannot be had, that
    is said once, and every call runs as it is. Random numbers come from PyTorch's own generator and go on from call to
    call.

    Args:
        function: from a tensor (rows, ...) to a tensor or several; what else it reads and writes lies at addresses that
            do not change.
        device: of the tensor.
        what: it is, in a word.
    """

    def __init__(self, function: Callable[[Tensor], Any], device: torch.device, what: str = "step") -> None:
        self._function = function
        self._what = what
        self.enabled = device.type == "cuda"
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}
        self._memory: Any = None  # the graphs never run side by side, so they share what they need in between

    def __call__(self, tensor: Tensor) -> Any:
        """The result is overwritten by the next call."""
        rows = tensor.shape[0]
        if rows in self._graphs:
            graph, source, result = self._graphs[rows]
            source.copy_(tensor, non_blocking=True)
            graph.replay()
            return result
        result = self._function(tensor)
        if self.enabled:
            self._capture(rows, tensor)
        return result

    def forget(self) -> None:
        """The addresses have changed."""
        self._graphs.clear()
        self._memory = None

    def _capture(self, rows: int, like: Tensor) -> None:
        begin = time.perf_counter()
        try:
            with device_of(like):
                source = torch.zeros_like(like)
                if self._memory is None:
                    self._memory = torch.cuda.graph_pool_handle()
                graph, result = self._record(source)
        except RuntimeError as error:  # of CUDA, a kernel's refusal, a lack of memory: what it works on is as it was
            self.enabled = False
            self.forget()
            say_once(
                "decoding: the %s cannot be captured as a CUDA graph (%s). Every kernel of it is launched from "
                "Python: correct, but several times slower for few rows.",
                self._what,
                str(_first(error)).splitlines()[0],
            )
            return
        self._graphs[rows] = (graph, source, result)
        logger.debug("decoding: captured a %s of %d rows in %.2f s", self._what, rows, time.perf_counter() - begin)

    def _record(self, source: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
        """As torch.cuda.graph, which gives all unused memory back first: the next prompt would ask for it again."""
        graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _without_cast_cache(source.device):
            # Other threads (a server's) may go on with the GPU meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                result = self._function(source)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph, result


def _first(error: BaseException) -> BaseException:
    """What went wrong first: ending a capture that has failed raises once more."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def _without_cast_cache(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, but nothing kept that was cast before the graph: it would be gone when the graph runs."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=False)
