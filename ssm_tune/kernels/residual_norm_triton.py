"""The residual stream's addition and norm in training: one Triton kernel forward, one backward.

Forward reads the stream and what is added to it once, and writes the sum and its norm, the norm in the dtype of whoever
reads it. Backward reads the sum again and one number a token, and adds the two gradients that meet there, the norm's
and that of the stream itself. A program of the backward pass goes through rows that are its own and sums their share of
the weight's gradient, so that the result is the same in every run on one kind of GPU. Whoever reads the norm need not
keep it: it comes again from the sum and that number, the same to the bit (`ssm_tune.kernels.recompute`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of, multiprocessors
from ssm_tune.kernels.part_sums import add_up, added_together
from ssm_tune.kernels.recompute import recomputable, recomputing, reference_to
from ssm_tune.kernels.recompute_sums import add_to_sum

_WIDEST = 16384  # channels: one program holds a whole row in registers
# Of the backward pass on a multiprocessor: what its registers hold, at 64 a lane. Without the weight's gradient more
# programs of half the warps are as quick, and quicker where rows are wide.
_WARPS, _WARPS_WITHOUT_WEIGHT = 32, 48


@triton.jit
def _read(pointer, row, stride, places, inside):
    return tl.load(pointer + row * stride + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def residual_rms_norm_kernel(
    stream, x, weight, total, y, scales, dim, eps, stream_stride, x_stride, HAS_X: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < dim
    value = _read(stream, row, stream_stride, places, inside)
    if HAS_X:
        # Rounded as the stream is: what is normed is what goes on.
        rounded = (value + _read(x, row, x_stride, places, inside)).to(total.dtype.element_ty)
        tl.store(total + row * dim + places, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
    tl.store(scales + row, scale)
    normed = value * scale * _read(weight, 0, 0, places, inside)
    tl.store(y + row * dim + places, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_again_kernel(
    total, less, weight, scales, before, y, dim, total_stride, less_stride, HAS_LESS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < dim
    value = _read(total, row, total_stride, places, inside)
    if HAS_LESS:
        value -= _read(less, row, less_stride, places, inside)
        tl.store(before + row * dim + places, value, mask=inside)
    normed = value * tl.load(scales + row) * _read(weight, 0, 0, places, inside)
    tl.store(y + row * dim + places, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def residual_rms_norm_backward_kernel(
    total, weight, scales, dy, dtotal, dstream, dx, dweight, rows, dim, total_stride,
    HAS_DTOTAL: tl.constexpr, HAS_DX: tl.constexpr, NEED_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < dim
    factors = _read(weight, 0, 0, places, inside)
    share = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        scale = tl.load(scales + row)
        normal = _read(total, row, total_stride, places, inside) * scale
        slope = _read(dy, row, dim, places, inside)
        if NEED_WEIGHT:
            share += slope * normal
        slope *= factors
        slope = (slope - normal * (tl.sum(slope * normal, axis=0) / dim)) * scale
        if HAS_DTOTAL:
            slope += _read(dtotal, row, dim, places, inside)
        tl.store(dstream + row * dim + places, slope.to(dstream.dtype.element_ty), mask=inside)
        if HAS_DX:
            tl.store(dx + row * dim + places, slope.to(dx.dtype.element_ty), mask=inside)
    if NEED_WEIGHT:
        tl.store(dweight + program * dim + places, share, mask=inside)


def residual_rms_norm(
    stream: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.residual_rms_norm`.

    Raises:
        Unsupported: float64, rows too wide, or no rows.
    """
    dtype = stream.dtype if dtype is None else dtype
    if torch.float64 in {stream.dtype, weight.dtype, dtype, stream.dtype if x is None else x.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    if stream.shape[-1] > _WIDEST:
        raise Unsupported(f"{stream.shape[-1]} channels, at most {_WIDEST}")
    if not stream.numel():
        raise Unsupported("no tokens")
    y, total, _ = _ResidualNorm.apply(stream, x, weight, eps, dtype)
    return y, total


def _norm_again(
    total: Tensor, less: Tensor | None, weight: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """total - less (None: total itself), and its norm, from the numbers that the forward pass kept of each token."""
    values, y = _rows(total), torch.empty(total.shape, dtype=dtype, device=total.device)
    subtracted = values if less is None else _rows(less)
    before = total if less is None else torch.empty(total.shape, dtype=total.dtype, device=total.device)
    rows, dim = values.shape
    with device_of(total):
        norm_again_kernel[(rows,)](
            values, subtracted, weight, scales, before, y, dim, values.stride(0), subtracted.stride(0),
            HAS_LESS=less is not None, **_sizes(dim),
        )  # fmt: skip
    return before, y


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        before, weight = _rows(stream), weight.contiguous()
        added = before if x is None else _rows(x)
        rows, dim = before.shape
        total = stream if x is None else torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        y = torch.empty(stream.shape, dtype=dtype, device=stream.device)
        scales = torch.empty(rows, dtype=torch.float32, device=stream.device)
        with device_of(stream):
            residual_rms_norm_kernel[(rows,)](
                before, added, weight, total, y, scales, dim, eps, before.stride(0), added.stride(0),
                HAS_X=x is not None, **_sizes(dim),
            )  # fmt: skip
        if recomputing() and any(ctx.needs_input_grad):
            again = functools.partial(_norm_again, weight=weight.detach(), scales=scales, dtype=dtype)
            if x is None or not add_to_sum(stream, x, total, y, again):
                kept = reference_to(total)
                recomputable([y], lambda: again(kept(), None)[1:])
        ctx.save_for_backward(total, weight, scales)
        ctx.x_dtype = None if x is None else x.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scales)
        return y, total, scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        if dy is None:
            dx = None if ctx.x_dtype is None or dtotal is None else dtotal.to(ctx.x_dtype)
            return dtotal, dx, None, None, None
        values = _rows(total)
        rows, dim = values.shape
        dstream = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        dx = None if ctx.x_dtype is None else dstream
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = torch.empty(total.shape, dtype=ctx.x_dtype, device=total.device)
        need_weight = ctx.needs_input_grad[2]
        sizes, warps = (_sizes(dim), _WARPS) if need_weight else (_sizes(dim, 512), _WARPS_WITHOUT_WEIGHT)
        programs = min(rows, warps // sizes["num_warps"] * multiprocessors(total.device))
        shares = torch.empty((programs, dim) if need_weight else (1,), dtype=torch.float32, device=total.device)
        dy = dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        with device_of(total):
            residual_rms_norm_backward_kernel[(programs,)](
                values, weight, scales, dy, dy if dtotal is None else dtotal, dstream, dstream if dx is None else dx,
                shares, rows, dim, values.stride(0), HAS_DTOTAL=dtotal is not None,
                HAS_DX=dx is not None and dx is not dstream, NEED_WEIGHT=need_weight, **sizes,
            )  # fmt: skip
        with added_together():
            dweight = add_up(shares, weight.dtype) if need_weight else None
        return dstream, dx, dweight, None, None


def _rows(tensor: Tensor) -> Tensor:
    """(tokens, dim), channels side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _sizes(dim: int, channels: int = 256) -> dict[str, int]:
    """channels: of a warp."""
    block = triton.next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // channels))}
