"""What is installed, what is chosen, why; said once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels import reference


class KernelError(RuntimeError):
    """Kernels are required and only a fallback can serve, or a kernel cannot do what it was asked."""


@dataclass(frozen=True)
class KernelChoice:
    """What serves an operation on a device: the backend, why it was chosen, and what it costs against the fastest one."""

    operation: str
    backend: str
    reason: str
    cost: str


def call(operation: str, *args: Any, **kwargs: Any) -> Any:
    """Run `operation` with the best backend for these arguments."""
    return getattr(reference, operation)(*args, **kwargs)


def kernel_report(device: torch.device | str) -> list[KernelChoice]:
    """What serves each operation on `device`."""
    return []


def set_kernel_order(order: Sequence[str] | None, required: bool = False) -> None:
    """Prefer the backends named in `order`; with `required`, a fallback is an error."""


def check_shapes(operation: str, **expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise a ValueError that names the first argument whose shape is not the expected one."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{operation}: {name} is {tuple(tensor.shape)}, expected {shape}.")
