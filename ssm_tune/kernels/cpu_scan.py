"""Mamba-1's selective scan on the CPU: `cpu_loops.py` for PyTorch tensors, with its own backward.

Importing this module imports numba.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.cpu_loops import PADDING, STARTS, scan_backward, scan_forward, segment_length
from ssm_tune.kernels.cpu_threads import BLOCK, empty, float_array, run_parallel, split_ranges, tensor_like, zeros
from ssm_tune.kernels.reference import starts_and_padding


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.selective_scan`, in float32 whatever the inputs' dtype.

    Raises:
        Unsupported: float64, which would be rounded.
    """
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed by the reference only")
    inputs = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    y, state = _SelectiveScan.apply(*inputs, seq_idx, dt_softplus, differentiable)
    return (y, state) if return_final_state else y


class _SelectiveScan(torch.autograd.Function):
    """Saves its inputs, and the state before every segment of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        dt_softplus: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        batch, length, dim = x.shape
        states = A.shape[-1]
        marks = token_marks(seq_idx, x)
        segments = -(-length // segment_length(states)) if differentiable else 0
        kept, y = empty(batch, segments, states, dim), empty(batch, length, dim)
        final_state = empty(batch, dim, states)
        rows = [*_arrays(x, dt, A, B, C, D, z, dt_bias), marks.numpy()]
        initial = float_array(initial_state, (batch, dim, states))
        flags = (dt_softplus, z is not None, differentiable)
        ranges = split_ranges(batch, dim, BLOCK)
        run_parallel(
            partial(
                scan_forward, *_row(rows, row), *flags, initial[row], y[row], final_state[row], kept[row], *channels
            )
            for row in range(batch)
            for channels in ranges
        )
        if differentiable:
            ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, initial_state, marks, torch.from_numpy(kept))
            ctx.dt_softplus = dt_softplus
        return torch.from_numpy(y).to(x.dtype), torch.from_numpy(final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, z, dt_bias, initial_state, marks, kept = ctx.saved_tensors
        batch, length, dim = x.shape
        states = A.shape[-1]
        rows = [*_arrays(x, dt, A, B, C, D, z, dt_bias), marks.numpy()]
        grad_outputs = float_array(grad_y, (batch, length, dim)), float_array(grad_final_state, (batch, dim, states))
        ranges = split_ranges(batch, dim, BLOCK)
        grad_x, grad_dt = empty(2, batch, length, dim)
        grad_z = empty(batch, length if z is not None else 0, dim)
        grad_A, grad_initial_state = empty(2, batch, dim, states)
        grad_D, grad_dt_bias = zeros(2, batch, dim)
        grad_B, grad_C = zeros(2, len(ranges), batch, length, states)
        flags = (ctx.dt_softplus, z is not None)
        jobs = []
        for row in range(batch):
            for place, channels in enumerate(ranges):
                grads = (grad_x[row], grad_dt[row], grad_z[row], grad_A[row], grad_B[place, row], grad_C[place, row])
                grads = [*grads, grad_D[row], grad_dt_bias[row], grad_initial_state[row]]
                grads_in = (kept[row].numpy(), *(g[row] for g in grad_outputs))
                jobs.append(partial(scan_backward, *_row(rows, row), *flags, *grads_in, *grads, *channels))
        run_parallel(jobs)
        return (
            tensor_like(x, grad_x),
            tensor_like(dt, grad_dt),
            tensor_like(A, grad_A.sum(0)),
            tensor_like(B, grad_B.sum(0)),
            tensor_like(C, grad_C.sum(0)),
            tensor_like(D, grad_D.sum(0)),
            tensor_like(z, grad_z),
            tensor_like(dt_bias, grad_dt_bias.sum(0)),
            tensor_like(initial_state, grad_initial_state),
            None,
            None,
            None,
        )


def token_marks(seq_idx: Tensor | None, x: Tensor) -> Tensor:
    """(batch, length), int8: CONTINUES, STARTS or PADDING, for every token."""
    starts, padding = starts_and_padding(seq_idx, x.shape[0], x.shape[1], x.device)
    return (starts * STARTS + padding * PADDING).to(torch.int8)


def _arrays(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None
) -> list[np.ndarray]:
    dim = x.shape[-1]
    always = [float_array(t, t.shape) for t in (x, dt, A, B, C)]
    return [*always, float_array(D, (dim,)), float_array(z, (x.shape[0], 0, dim)), float_array(dt_bias, (dim,))]


def _row(arrays: list[np.ndarray], row: int) -> list[np.ndarray]:
    """The arguments of a loop for one row of the batch: A, D and dt_bias have no batch."""
    x, dt, A, B, C, D, z, dt_bias, marks = arrays
    return [x[row], dt[row], A, B[row], C[row], D, z[row], dt_bias, marks[row]]
