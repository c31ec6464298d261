"""The causal convolution on the CPU: `cpu_conv_loops.py` for PyTorch tensors, with its own backward.

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
from ssm_tune.kernels.cpu_conv_loops import conv_backward, conv_forward, find_sources
from ssm_tune.kernels.cpu_threads import BLOCK, empty, float_array, run_parallel, split_ranges, tensor_like, zeros
from ssm_tune.kernels.reference import starts_and_padding


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.causal_conv1d`, in float32 whatever the inputs' dtype.

    Raises:
        Unsupported: float64, which would be rounded.
    """
    if torch.float64 in {x.dtype, weight.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    y, state = _Conv.apply(x, weight, bias, initial_state, seq_idx, activation == "silu")
    return (y, state) if return_final_state else y


class _Conv(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        silu: bool,
    ) -> tuple[Tensor, Tensor]:
        batch, length, dim = x.shape
        width = weight.shape[-1]
        sources = _sources(seq_idx, x, width)
        arrays = _arrays(x, weight, bias, initial_state)
        y = empty(batch, length, dim)
        run_parallel(
            partial(conv_forward, *_row(arrays, row), sources[row].numpy(), silu, y[row], *channels)
            for row in range(batch)
            for channels in split_ranges(batch, dim, BLOCK)
        )
        ctx.save_for_backward(x, weight, bias, initial_state, sources)
        ctx.silu = silu
        return torch.from_numpy(y).to(x.dtype), _remaining(x, initial_state, sources, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial_state, sources = ctx.saved_tensors
        batch, length, dim = x.shape
        width = weight.shape[-1]
        arrays = _arrays(x, weight, bias, initial_state)
        grad_out = float_array(grad_y, grad_y.shape)
        rows = zeros(batch, width - 1 + length, dim)
        grad_weight, grad_bias = zeros(batch, width, dim), zeros(batch, dim)
        # What remained in the window is a copy of rows, so its gradient is theirs.
        window = sources[:, -1, 1:].flip(1)
        kept = (window >= 0)[..., None] * grad_final_state.transpose(1, 2).float()
        torch.from_numpy(rows).scatter_add_(1, window.clamp(min=0)[..., None].expand_as(kept), kept)
        jobs = []
        for row in range(batch):
            grads = rows[row, width - 1 :], rows[row, : width - 1], grad_weight[row], grad_bias[row]
            for channels in split_ranges(batch, dim, BLOCK):
                given = (*_row(arrays, row), sources[row].numpy(), ctx.silu, grad_out[row])
                jobs.append(partial(conv_backward, *given, *grads, *channels))
        run_parallel(jobs)
        return (
            tensor_like(x, rows[:, width - 1 :]),
            tensor_like(weight, grad_weight.sum(0).T),
            tensor_like(bias, grad_bias.sum(0)),
            tensor_like(initial_state, rows[:, : width - 1].swapaxes(1, 2)),
            None,
            None,
        )


def _sources(seq_idx: Tensor | None, x: Tensor, width: int) -> Tensor:
    """(batch, length + 1, width): `find_sources` of every row."""
    starts, padding = starts_and_padding(seq_idx, x.shape[0], x.shape[1], x.device)
    rows = zip(starts.numpy(), padding.numpy(), strict=True)
    return torch.stack([torch.from_numpy(find_sources(*row, width)) for row in rows])


def _remaining(x: Tensor, initial_state: Tensor | None, sources: Tensor, width: int) -> Tensor:
    """The final state, (batch, dim, width - 1): the window of a token that would follow."""
    window = sources[:, -1, 1:].flip(1)[:, None]
    from_x = window - (width - 1)
    taken = x.transpose(1, 2).gather(2, from_x.clamp(min=0).expand(-1, x.shape[-1], -1))
    if initial_state is None:
        return taken.masked_fill(from_x < 0, 0.0)
    held = initial_state.gather(2, window.clamp(0, width - 2).expand(-1, x.shape[-1], -1))
    return torch.where(from_x < 0, held.masked_fill(window < 0, 0.0), taken.to(held.dtype))


def _arrays(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> list[np.ndarray]:
    batch, _, dim = x.shape
    width = weight.shape[-1]
    state = None if initial_state is None else initial_state.transpose(1, 2)
    return [
        float_array(x, x.shape),
        float_array(state, (batch, width - 1, dim)),
        float_array(weight.t(), (width, dim)),
        float_array(bias, (dim,)),
    ]


def _row(arrays: list[np.ndarray], row: int) -> list[np.ndarray]:
    x, state, weight, bias = arrays
    return [x[row], state[row], weight, bias]
