"""Mamba-2's gate without a norm, in Triton: y times silu(z) in float32, rounded once; backward in one kernel too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.devices import device_of

_BLOCK = 1024  # channels of a program


@triton.jit(do_not_specialize=["dim"])
def gate_kernel(y, z, out, dim, y_row, z_row, out_row, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of channels)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < dim
    value = tl.load(y + row * y_row + place, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(z + row * z_row + place, mask=inside, other=0.0).to(tl.float32)
    value *= before * tl.sigmoid(before)
    tl.store(out + row * out_row + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["dim"])
def gate_backward_kernel(dout, y, z, dy, dz, dim, dout_row, y_row, z_row, dy_row, dz_row, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of channels)."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < dim
    slope = tl.load(dout + row * dout_row + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + row * y_row + place, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(z + row * z_row + place, mask=inside, other=0.0).to(tl.float32)
    opening = tl.sigmoid(before)
    gate = before * opening
    tl.store(dy + row * dy_row + place, (slope * gate).to(dy.dtype.element_ty), mask=inside)
    by_gate = slope * value * (opening + gate * (1 - opening))
    tl.store(dz + row * dz_row + place, by_gate.to(dz.dtype.element_ty), mask=inside)


def gate(y: Tensor, z: Tensor) -> Tensor:
    """y * silu(z), like y; y, z (batch, length, heads, head_dim), unknown to autograd."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    tensors = _rows(y), _rows(z), _rows(out)
    rows, dim = tensors[0].shape
    with device_of(y):
        gate_kernel[rows, -(-dim // _BLOCK)](*tensors, dim, *(t.stride(0) for t in tensors), BLOCK=_BLOCK, num_warps=4)
    return out


def gate_backward(dout: Tensor, y: Tensor, z: Tensor, dz: Tensor) -> Tensor:
    """The gradient of y, like y; writes that of z into `dz`, which may be part of a wider tensor.

    Raises:
        RuntimeError: a `dz` whose rows are not equally far apart.
    """
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    tensors = _rows(dout), _rows(y), _rows(z), _rows(dy), dz.view(-1, dz.shape[-2] * dz.shape[-1])
    rows, dim = tensors[0].shape
    with device_of(y):
        gate_backward_kernel[rows, -(-dim // _BLOCK)](
            *tensors, dim, *(t.stride(0) for t in tensors), BLOCK=_BLOCK, num_warps=4
        )
    return dy


def _rows(tensor: Tensor) -> Tensor:
    """(tokens, channels), channels side by side."""
    rows = tensor.reshape(-1, tensor.shape[-2] * tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
