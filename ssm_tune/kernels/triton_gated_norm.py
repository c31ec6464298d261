"""Mamba-2's gated norm in Triton: one kernel forward, one backward, each of which goes once over its bytes.

A program goes through rows of one group of channels; it keeps the weight in registers, and the weight's gradient, which
is a sum over its own rows: the result is the same in every run on one kind of GPU. Forward reads the next row while it
computes; backward has no registers for that: other programs of its multiprocessor compute meanwhile, or the next two
rows wait in shared memory (`_stages`). Rows may lie apart, as those of a part of a wider projection do.
Strides are counted in `UNIT` numbers, which Triton knows: a stride that is a multiple of 8 but not of 16, as that of
mamba2-130m's projection, would otherwise be read number by number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of, multiprocessors, shared_memory
from ssm_tune.kernels.part_sums import add_up, added_together

WIDEST = 16384  # channels of a group: one program holds a whole one in registers
_UNIT = 8  # numbers that a thread reads at a time: 16 bytes of bfloat16


class _Shape(NamedTuple):
    """A program for a group of that many channels: each thread has 8 of them up to `narrow`, and 16 above.

    registers: of a thread with 8 and with 16 channels. Fewer would be spilled more often than is worth another
    program at a time (read in the disassembly for sm_90).
    """

    narrow: int
    registers: tuple[int, int]


_FORWARD, _BACKWARD = _Shape(4096, (64, 128)), _Shape(2048, (80, 128))
_REGISTERS = 65536  # of a multiprocessor


@triton.jit
def _row_after(row, rows):
    """The program's next row; after its last one, that again, which is in the cache."""
    after = row + tl.num_programs(0)
    return tl.where(after < rows, after, row)


@triton.jit(do_not_specialize=["rows", "y_stride", "z_stride", "out_stride"])
def gated_norm_kernel(
    y, z, weight, out, scales, rows, eps, y_stride, z_stride, out_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    first, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1)
    places = tl.arange(0, BLOCK)
    inside = places < GROUP
    places += group * GROUP
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    next_y = tl.load(y + first * y_stride * UNIT + places, mask=inside, other=0.0)
    next_z = tl.load(z + first * z_stride * UNIT + places, mask=inside, other=0.0)
    for row in range(first, rows, tl.num_programs(0)):
        value, before = next_y.to(tl.float32), next_z.to(tl.float32)
        after = _row_after(row, rows)
        next_y = tl.load(y + after * y_stride * UNIT + places, mask=inside, other=0.0)
        next_z = tl.load(z + after * z_stride * UNIT + places, mask=inside, other=0.0)
        gate = before * tl.sigmoid(before)
        if not NORM_FIRST:
            value *= gate
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / GROUP + eps)
        tl.store(scales + row * groups + group, scale)
        value *= scale * factors
        if NORM_FIRST:
            value *= gate
        tl.store(out + row * out_stride * UNIT + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "dout_stride", "y_stride", "z_stride", "dy_stride", "dz_stride"])
def gated_norm_backward_kernel(
    dout, y, z, weight, scales, dy, dz, dweight, out, rows,
    dout_stride, y_stride, z_stride, dy_stride, dz_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NORM_FIRST: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    NEED_OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1)
    places = tl.arange(0, BLOCK)
    inside = places < GROUP
    places += group * GROUP
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=STAGES):
        slope = tl.load(dout + row * dout_stride * UNIT + places, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * y_stride * UNIT + places, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(z + row * z_stride * UNIT + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row * groups + group)
        opening = tl.sigmoid(before)
        gate = before * opening
        change = opening + gate * (1 - opening)  # of the gate, with z
        # total is what is normed; slope becomes the gradient of its norm, and then its own.
        slope *= scale
        if NORM_FIRST:
            total = value
            dgate = slope * total * factors
            slope *= gate
        else:
            total = value * gate
        if NEED_OUT:  # rows as those of dy
            again = total * scale * factors
            if NORM_FIRST:
                again *= gate
            tl.store(out + row * dy_stride * UNIT + places, again.to(out.dtype.element_ty), mask=inside)
        if NEED_WEIGHT:
            share += slope * total
        slope *= factors
        slope -= total * (tl.sum(slope * total, axis=0) * (scale * scale / GROUP))
        if not NORM_FIRST:
            dgate = slope * value
            slope *= gate
        tl.store(dy + row * dy_stride * UNIT + places, slope.to(dy.dtype.element_ty), mask=inside)
        tl.store(dz + row * dz_stride * UNIT + places, (dgate * change).to(dz.dtype.element_ty), mask=inside)
    if NEED_WEIGHT:
        tl.store(dweight + first * groups * GROUP + places, share, mask=inside)


def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None = None, norm_before_gate: bool = False
) -> Tensor:
    """The operation of `ssm_tune.kernels.gated_rms_norm`.

    Raises:
        Unsupported: float64, groups too wide, or no rows.
    """
    group_size = group_size or y.shape[-1]
    if torch.float64 in {y.dtype, z.dtype, weight.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    if group_size > WIDEST:
        raise Unsupported(f"a mean over {group_size} channels, at most {WIDEST}")
    if not y.numel():
        raise Unsupported("no tokens")
    return _GatedNorm.apply(y, z, weight, eps, group_size, norm_before_gate)


def normalise(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor]:
    """The forward pass, unknown to autograd: y, z (..., dim), weight (dim,).

    Returns:
        The result, and what backward needs beside its inputs: 1 / sqrt(mean + eps), (rows, groups), float32.
    """
    rows_y, rows_z = _rows(y), _rows(z)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, dim = rows_y.shape
    groups = dim // group_size
    scales = torch.empty((rows, groups), dtype=torch.float32, device=y.device)
    sizes = _sizes(group_size, _FORWARD)
    strides, unit = _in_units(rows_y.stride(0), rows_z.stride(0), dim)
    with device_of(y):
        gated_norm_kernel[_programs(rows, groups, sizes, y.device), groups](
            rows_y, rows_z, weight.contiguous(), out, scales, rows, eps, *strides,
            GROUP=group_size, UNIT=unit, NORM_FIRST=norm_before_gate, **sizes,
        )  # fmt: skip
    return out, scales


def normalise_backward(
    dout: Tensor,
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    scales: Tensor,
    dz: Tensor,
    group_size: int,
    norm_before_gate: bool,
    need_weight: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The backward pass of `normalise`; writes the gradient of z into `dz`, which may be part of a wider tensor, and
    the result of `normalise` again into `out`, contiguous.

    Returns:
        The gradients of y, and of the weight, if it is needed (`add_up`).

    Raises:
        RuntimeError: a `dz` whose rows are not equally far apart.
    """
    rows_dout, rows_y, rows_z, rows_dz = _rows(dout), _rows(y), _rows(z), dz.view(-1, dz.shape[-1])
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, dim = rows_y.shape
    groups = dim // group_size
    sizes = _sizes(group_size, _BACKWARD)
    programs = _programs(rows, groups, sizes, y.device)
    shares = torch.empty((programs, dim) if need_weight else (1,), dtype=torch.float32, device=y.device)
    strides, unit = _in_units(*(t.stride(0) for t in (rows_dout, rows_y, rows_z)), dim, rows_dz.stride(0))
    with device_of(y):
        gated_norm_backward_kernel[programs, groups](
            rows_dout, rows_y, rows_z, weight.contiguous(), scales, dy, rows_dz, shares, dy if out is None else out,
            rows, *strides, GROUP=group_size, UNIT=unit, NORM_FIRST=norm_before_gate, NEED_WEIGHT=need_weight,
            NEED_OUT=out is not None, STAGES=_stages(sizes["BLOCK"], (rows_dout, rows_y, rows_z)), **sizes,
        )  # fmt: skip
    return dy, add_up(shares, weight.dtype) if need_weight else None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
    ) -> Tensor:
        out, scales = normalise(y, z, weight, eps, group_size, norm_before_gate)
        ctx.save_for_backward(y, z, weight, scales)
        ctx.settings = group_size, norm_before_gate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, scales = ctx.saved_tensors
        dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        settings = (*ctx.settings, ctx.needs_input_grad[2])
        with added_together():
            dy, dweight = normalise_backward(dout, y, z, weight, scales, dz, *settings)
        return dy, dz, dweight, None, None, None


def _rows(tensor: Tensor) -> Tensor:
    """(tokens, dim), channels side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_units(*strides: int) -> tuple[list[int], int]:
    """Strides, in units of as many numbers as divide them all, 8 at most."""
    unit = math.gcd(_UNIT, *strides)
    return [stride // unit for stride in strides], unit


def _sizes(group_size: int, shape: _Shape) -> dict[str, int]:
    block = triton.next_power_of_2(group_size)
    wide = block > shape.narrow
    warps = max(1, min(16, block // (32 * _UNIT * (1 + wide))))
    return {"BLOCK": block, "num_warps": warps, "maxnreg": shape.registers[wide]}


def _stages(block: int, tensors: tuple[Tensor, ...]) -> int:
    """Rows that a program of the backward kernel reads or computes at a time: 3 or 1.

    Two programs of 4096 channels on a multiprocessor are slower with 3 than with 1; one of 8192 is quicker, as nobody
    computes while it reads (113 and 115 microseconds for 4096 tokens on an H200).
    """
    waiting = 2 * block * sum(tensor.element_size() for tensor in tensors)
    alone = block == 8192 and waiting + 4096 <= shared_memory(tensors[0].device)
    return 3 if block <= _BACKWARD.narrow or alone else 1


def _programs(rows: int, groups: int, sizes: dict[str, int], device: torch.device) -> int:
    """For each group, so that all of them run at the same time."""
    at_once = _REGISTERS // (32 * sizes["num_warps"] * sizes["maxnreg"]) * multiprocessors(device)
    return max(1, min(rows, at_once // groups))
