"""What `scan_speed.py` measures of the scan in CUDA C++, and of whole scans through autograd."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from scan_speed import NAMES, Inputs, Size, documents, inputs, kernel_times, milliseconds
from torch import Tensor


class Cuda:
    """Our kernels in CUDA C++, forward and backward apart, sums over blocks included."""

    def __init__(self, given: Inputs, seq_idx: Tensor | None) -> None:
        from ssm_tune.kernels import cuda_scan, cuda_tokens

        self.module = cuda_scan
        marks = None if seq_idx is None else cuda_tokens.find_marks(seq_idx)
        tokens, vectors = (
            (given[name] for name in ("x", "dt", "B", "C", "z")),
            (given[n] for n in ("A", "D", "dt_bias")),
        )
        self.row = cuda_scan._row(*tokens, *vectors, marks, True)
        self.dy = torch.randn_like(given["x"])
        self.kept = self.forward()[1]

    def forward(self, keep: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        return self.module.run_forward(self.row, None, keep)

    def backward(self) -> tuple[Tensor | None, ...]:
        return self.module.run_backward(self.row, self.kept, self.dy, None, torch.empty_like(self.dy))


def cuda_lines(size: Size) -> list[str]:
    """Forward, forward keeping states and backward, with documents and without; where the time goes."""
    lines = []
    for name, seq_idx in (("cuda, documents", documents(size)), ("cuda, one a row", None)):
        both = [Cuda(inputs(size, seed), seq_idx) for seed in (0, 1)]
        forward = milliseconds([lambda c=c: c.forward(keep=False) for c in both])
        keeping = milliseconds([c.forward for c in both])
        backward = milliseconds([c.backward for c in both])
        lines.append(f"{name:18} {forward:10.3f} {keeping:16.3f} {backward:10.3f}")
    for direction, run in (("forward", both[0].forward), ("backward", both[0].backward)):
        print(f"cuda {direction}: " + "; ".join(kernel_times(run)), flush=True)
    return lines


def through_autograd(size: Size, function: Callable[..., Tensor], turned: bool, **settings: Any) -> float:
    """Forward and backward of a whole function; `turned`: inputs are (batch, channels, length) already."""
    runs = []
    for seed in (0, 1):
        given = inputs(size, seed)
        if turned:
            given = {n: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for n, t in given.items()}
        leaves = [given[name].requires_grad_() for name in NAMES]
        dy = torch.randn_like(leaves[0])

        def both(leaves: list[Tensor] = leaves, dy: Tensor = dy) -> None:
            torch.autograd.grad(function(*leaves, **settings), leaves, dy)

        runs.append(both)
    return milliseconds(runs)


def autograd_lines(size: Size, names: tuple[str, ...]) -> list[str]:
    """What a layer waits for, by backend."""
    lines, seq_idx = [], documents(size)
    for name in names:
        module = importlib.import_module(f"ssm_tune.kernels.{name}_scan")
        took = through_autograd(size, module.selective_scan, False, seq_idx=seq_idx)
        lines.append(f"{name}, documents, forward and backward through autograd: {took:.3f}")
    with contextlib.suppress(ImportError):  # said by `theirs`
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        took = through_autograd(size, selective_scan_fn, True, delta_softplus=True)
        lines.append(f"mamba_ssm, one a row, turned already, forward and backward through autograd: {took:.3f}")
    return lines
