"""Which GPU a kernel is launched on, its size, and whether launches are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the tensor's GPU the current one: Triton and CUDA launch on that, not on the one that holds the data."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have of a GPU's shared memory; 0 for other devices, and where PyTorch cannot tell."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 0)


class _Launches:
    recorded = 0  # how many are recording


_launches = _Launches()


@contextlib.contextmanager
def recorded_launches() -> Iterator[None]:
    """Within, in all threads (backward passes have their own), launches are recorded into a CUDA graph, or tried for
    that: of two kernels the one that is quicker on the GPU is taken, however long the host takes to launch it."""
    _launches.recorded += 1
    try:
        yield
    finally:
        _launches.recorded -= 1


def launches_are_recorded() -> bool:
    return _launches.recorded > 0
