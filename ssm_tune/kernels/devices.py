"""Which GPU a kernel is launched on."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the tensor's GPU the current one: Triton and CUDA launch on that, not on the one that holds the data."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
