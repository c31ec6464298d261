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


class GraphedStep:
    """Calls `step(ids)`; on a GPU, from the second call with as many rows on, as one graph.

    The first call runs as it is (kernels are compiled and tuned in it), and counts. Where a graph cannot be had, that
    is said once, and every call runs as it is.

    Args:
        step: from ids (rows,) to a tensor; what else it reads and writes lies at addresses that do not change.
        device: of the ids.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._step = step
        self._device = device
        self.enabled = device.type == "cuda"
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._memory: Any = None  # the graphs never run side by side, so they share what they need in between

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: (rows,). The result is overwritten by the next call."""
        rows = ids.shape[0]
        if rows in self._graphs:
            graph, source, result = self._graphs[rows]
            source.copy_(ids, non_blocking=True)
            graph.replay()
            return result
        result = self._step(ids)
        if self.enabled:
            self._capture(rows)
        return result

    def forget(self) -> None:
        """The addresses have changed."""
        self._graphs.clear()
        self._memory = None

    def _capture(self, rows: int) -> None:
        begin = time.perf_counter()
        source = torch.zeros(rows, dtype=torch.long, device=self._device)
        try:
            with device_of(source):
                if self._memory is None:
                    self._memory = torch.cuda.graph_pool_handle()
                graph = torch.cuda.CUDAGraph()
                # Other threads (a server's) may go on with the GPU meanwhile.
                capturing = torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local")
                with capturing, _without_cast_cache(self._device):
                    result = self._step(source)
        except RuntimeError as error:  # of CUDA, a kernel's refusal, a lack of memory: the states are as they were
            self.enabled = False
            self.forget()
            say_once(
                "decoding: the step cannot be captured as a CUDA graph (%s). Every kernel of it is launched from "
                "Python: correct, but several times slower for few rows.",
                str(error).splitlines()[0],
            )
            return
        self._graphs[rows] = (graph, source, result)
        logger.debug("decoding: captured a step of %d rows in %.2f s", rows, time.perf_counter() - begin)


def _without_cast_cache(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, but nothing kept that was cast before the graph: it would be gone when the graph runs."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=False)
