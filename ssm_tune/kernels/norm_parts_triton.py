"""RMS norms without weights of three parts of one tensor: one Triton kernel forward, one backward.

The parts are narrow, so that a norm of each by itself would be mostly launches and copies. Backward writes the
gradients side by side, as the tensor lies, and takes the scales from the tensor again: nothing else is kept. Whoever
reads the parts need not keep them: they come again from the tensor (`ssm_tune.kernels.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.recompute import recomputable, recomputing, reference_to

_WIDEST = 4096  # channels of a part
_NUMBERS = 2048  # of a tile, about


@triton.jit
def _tile(pointer, rows, stride, width, inside, BLOCK: tl.constexpr):
    """(rows, BLOCK) numbers of a part, in float32, and where they are."""
    columns = tl.arange(0, BLOCK)
    within = inside[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=within, other=0.0).to(tl.float32), within


@triton.jit
def _norm(x, y, rows, x_stride, width, eps, inside, BLOCK: tl.constexpr):
    value, within = _tile(x, rows, x_stride, width, inside, BLOCK)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    places = rows[:, None] * width + tl.arange(0, BLOCK)[None, :]
    tl.store(y + places, (value * scale[:, None]).to(y.dtype.element_ty), mask=within)


@triton.jit
def _norm_backward(x, dy, dx, rows, x_stride, dy_stride, dx_stride, width, eps, inside, BLOCK: tl.constexpr):
    value, within = _tile(x, rows, x_stride, width, inside, BLOCK)
    slope, _ = _tile(dy, rows, dy_stride, width, inside, BLOCK)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)[:, None]
    value *= scale
    slope = (slope - value * (tl.sum(slope * value, axis=1) / width)[:, None]) * scale
    places = rows[:, None] * dx_stride + tl.arange(0, BLOCK)[None, :]
    tl.store(dx + places, slope.to(dx.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["tokens"])
def norm_parts_kernel(
    x, y0, y1, y2, tokens, x_stride, width0, width1, width2, eps,
    ROWS: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    _norm(x, y0, rows, x_stride, width0, eps, inside, BLOCK0)
    _norm(x + width0, y1, rows, x_stride, width1, eps, inside, BLOCK1)
    _norm(x + width0 + width1, y2, rows, x_stride, width2, eps, inside, BLOCK2)


@triton.jit(do_not_specialize=["tokens"])
def norm_parts_backward_kernel(
    x, dy0, dy1, dy2, dx, tokens, x_stride, dy0_stride, dy1_stride, dy2_stride, dx_stride, width0, width1, width2, eps,
    ROWS: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    _norm_backward(x, dy0, dx, rows, x_stride, dy0_stride, dx_stride, width0, eps, inside, BLOCK0)
    second = width0
    _norm_backward(x + second, dy1, dx + second, rows, x_stride, dy1_stride, dx_stride, width1, eps, inside, BLOCK1)
    third = width0 + width1
    _norm_backward(x + third, dy2, dx + third, rows, x_stride, dy2_stride, dx_stride, width2, eps, inside, BLOCK2)


def rms_norm_parts(x: Tensor, sizes: Sequence[int], eps: float) -> tuple[Tensor, ...]:
    """The operation of `ssm_tune.kernels.rms_norm_parts`.

    Raises:
        Unsupported: other than three parts, parts too wide, float64, or no tokens.
    """
    if len(sizes) != 3 or min(sizes) < 1 or max(sizes) > _WIDEST:
        raise Unsupported(f"parts of {tuple(sizes)} channels: three of at most {_WIDEST} only")
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed by the reference only")
    if not x.numel():
        raise Unsupported("no tokens")
    return _NormParts.apply(x, tuple(sizes), eps)


class _NormParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], eps: float) -> tuple[Tensor, ...]:
        parts = _compute(x, sizes, eps)
        if recomputing() and ctx.needs_input_grad[0]:
            kept = reference_to(x)
            recomputable(parts, lambda: _compute(kept(), sizes, eps))
        ctx.save_for_backward(x)
        ctx.sizes, ctx.eps = sizes, eps
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows, slopes = _rows(x), tuple(map(_rows, slopes))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid, blocks = _blocks(len(rows), ctx.sizes)
        strides = (rows.stride(0), *(slope.stride(0) for slope in slopes), x.shape[-1])
        with device_of(x):
            norm_parts_backward_kernel[grid](rows, *slopes, dx, len(rows), *strides, *ctx.sizes, ctx.eps, **blocks)
        return dx, None, None


def _compute(x: Tensor, sizes: tuple[int, ...], eps: float) -> tuple[Tensor, ...]:
    rows = _rows(x)
    parts = tuple(x.new_empty(*x.shape[:-1], size) for size in sizes)
    grid, blocks = _blocks(len(rows), sizes)
    with device_of(x):
        norm_parts_kernel[grid](rows, *parts, len(rows), rows.stride(0), *sizes, eps, **blocks)
    return parts


def _rows(tensor: Tensor) -> Tensor:
    """(tokens, channels), channels side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _blocks(tokens: int, sizes: Sequence[int]) -> tuple[tuple[int], dict[str, int]]:
    blocks = [triton.next_power_of_2(size) for size in sizes]
    rows = max(1, min(16, _NUMBERS // max(blocks)))
    named = {f"BLOCK{number}": block for number, block in enumerate(blocks)}
    return (triton.cdiv(tokens, rows),), {"ROWS": rows, **named}
