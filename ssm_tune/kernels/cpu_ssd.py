"""Mamba-2's scan on the CPU: `cpu_ssd_loops.py` for PyTorch tensors, with its own backward.

Importing this module imports numba.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.cpu_scan import token_marks
from ssm_tune.kernels.cpu_ssd_loops import ssd_backward, ssd_forward, ssd_segment_length
from ssm_tune.kernels.cpu_threads import empty, float_array, run_parallel, split_ranges, tensor_like, zeros
from ssm_tune.kernels.reference import PADDING, time_step


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.ssd_scan`, in float32 whatever the inputs' dtype; `chunk_size` changes
    nothing.

    Raises:
        Unsupported: float64, which would be rounded.
    """
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed in PyTorch only")
    heads, head_dim = x.shape[2:]
    # A number per head and token: PyTorch does these, and autograd undoes them, in no time.
    if seq_idx is not None:
        dt = dt.masked_fill((seq_idx == PADDING)[..., None], 0.0)  # a NaN there would come back through softplus
    dt = time_step(dt, dt_bias, dt_softplus, dt_limit)
    if D is not None:
        D = (D if D.dim() == 2 else D[:, None]).expand(heads, head_dim)
    inputs = (x, dt, A, B, C, D, initial_state)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    y, state = _SsdScan.apply(*inputs, seq_idx, differentiable)
    return (y, state) if return_final_state else y


class _SsdScan(torch.autograd.Function):
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
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        batch, length, heads, head_dim = x.shape
        states = B.shape[-1]
        marks = token_marks(seq_idx, x)
        segments = -(-length // ssd_segment_length(head_dim, states)) if differentiable else 0
        kept, y = empty(batch, segments, heads, head_dim, states), empty(*x.shape)
        final_state = empty(batch, heads, head_dim, states)
        given = _Arrays(x, dt, A, B, C, D, marks)
        initial = float_array(initial_state, final_state.shape)
        run_parallel(
            partial(
                ssd_forward, *given.row(row), differentiable, initial[row], y[row], final_state[row], kept[row], *some
            )
            for row in range(batch)
            for some in split_ranges(batch, heads)
        )
        if differentiable:
            ctx.save_for_backward(x, dt, A, B, C, D, initial_state, marks, torch.from_numpy(kept))
        return torch.from_numpy(y).to(x.dtype), torch.from_numpy(final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, initial_state, marks, kept = ctx.saved_tensors
        batch, length, heads, head_dim = x.shape
        given = _Arrays(x, dt, A, B, C, D, marks)
        grad_out = float_array(grad_y, grad_y.shape)
        grad_state = float_array(grad_final_state, grad_final_state.shape)
        ranges = split_ranges(batch, heads)
        grad_x, grad_dt = empty(*x.shape), empty(batch, length, heads)
        grad_B, grad_C = zeros(2, len(ranges), *B.shape)
        grad_A, grad_D = zeros(batch, heads), zeros(batch, heads, head_dim)
        grad_initial_state = empty(*grad_final_state.shape)
        jobs = []
        for row in range(batch):
            for place, some in enumerate(ranges):
                grads = (grad_x[row], grad_dt[row], grad_A[row], grad_B[place, row], grad_C[place, row], grad_D[row])
                grads = (*grads, grad_initial_state[row])
                grads_in = (kept[row].numpy(), grad_out[row], grad_state[row])
                jobs.append(partial(ssd_backward, *given.row(row), *grads_in, *grads, *some))
        run_parallel(jobs)
        return (
            tensor_like(x, grad_x),
            tensor_like(dt, grad_dt),
            tensor_like(A, grad_A.sum(0)),
            tensor_like(B, grad_B.sum(0)),
            tensor_like(C, grad_C.sum(0)),
            tensor_like(D, grad_D.sum(0)),
            tensor_like(initial_state, grad_initial_state),
            None,
            None,
        )


class _Arrays:
    """The inputs as arrays for the loops."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, marks: Tensor) -> None:
        self._per_row = [float_array(t, t.shape) for t in (x, dt)], [float_array(t, t.shape) for t in (B, C)]
        self._A, self._D = float_array(A, A.shape), float_array(D, tuple(x.shape[2:]))
        self._marks = marks.numpy()

    def row(self, row: int) -> list[Any]:
        """The arguments that the loops begin with, for one row of the batch."""
        before, after = ([array[row] for array in arrays] for arrays in self._per_row)
        return [*before, self._A, *after, self._D, self._marks[row]]
