"""A narrow linear layer with a low-rank part, y = x W + h B of many columns, as one Triton kernel.

Both products are added up in registers and rounded once. What is narrow is x, so that the time goes into writing y; h
(tokens, rank) is given, or scale x A, which every program computes for its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.low_rank_triton import check_dtypes, padded_rank


class Tile(NamedTuple):
    """What a program computes of y, and how many channels of x it takes at a time."""

    tokens: int = 128
    columns: int = 128
    channels: int = 64
    warps: int = 8
    stages: int = 3


@triton.jit(do_not_specialize=["tokens"])
def narrow_kernel(
    x, W, A, B, h, y, tokens, channels, out, rank, x_stride, W_row, W_column, B_row, B_column, scale,
    FIND: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANK)
    here, inside = (rows < tokens)[:, None], (columns < out)[None, :]
    value = tl.zeros([TOKENS, COLUMNS], tl.float32)
    low = tl.zeros([TOKENS, RANK], tl.float32)
    for first in range(0, channels, CHANNELS):
        places = first + tl.arange(0, CHANNELS)
        within = places < channels
        given = tl.load(
            x + rows.to(tl.int64)[:, None] * x_stride + places[None, :], mask=here & within[None, :], other=0.0
        )
        weight = tl.load(
            W + places[:, None] * W_row + columns[None, :] * W_column, mask=within[:, None] & inside, other=0.0
        )
        value = tl.dot(given, weight, value)
        if FIND:
            known = within[:, None] & (ranks < rank)[None, :]
            factor = tl.load(A + ranks[None, :] * channels + places[:, None], mask=known, other=0.0)
            low = tl.dot(given, factor, low)
    of_h = h + rows[:, None] * rank + ranks[None, :]
    known = here & (ranks < rank)[None, :]
    if FIND:
        rounded = (low * scale).to(h.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(of_h, rounded, mask=known)
    else:
        rounded = tl.load(of_h, mask=known, other=0.0)
    factor = tl.load(
        B + ranks[:, None] * B_row + columns[None, :] * B_column, mask=(ranks < rank)[:, None] & inside, other=0.0
    )
    value = tl.dot(rounded, factor, value)
    tl.store(y + rows.to(tl.int64)[:, None] * out + columns[None, :], value.to(y.dtype.element_ty), mask=here & inside)


def narrow_linear(
    x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scale: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.narrow_linear`.

    Raises:
        Unsupported: other dtypes than bfloat16 and float16, or no tokens.
    """
    check_dtypes(x, weight, A, B)
    h = x.new_empty(len(x), len(A))
    return h, _compute(x, weight.t(), A.contiguous(), B.t(), h, scale, tile)


def narrow_gradient(dy: Tensor, weight: Tensor, dh: Tensor, A: Tensor, tile: Tile | None = None) -> Tensor:
    """The operation of `ssm_tune.kernels.narrow_gradient`.

    Raises:
        Unsupported: other dtypes than bfloat16 and float16, or no tokens.
    """
    check_dtypes(dy, weight, dh, A)
    return _compute(dy, weight, None, A, dh.contiguous(), 1.0, tile)


def _compute(
    x: Tensor, weight: Tensor, A: Tensor | None, B: Tensor, h: Tensor, scale: float, tile: Tile | None
) -> Tensor:
    """x (tokens, in), weight (in, out), A (rank, in), B (rank, out); h is written if there is an A."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, channels), (rank, out) = x.shape, B.shape
    y, tile = x.new_empty(tokens, out), tile or Tile()
    grid = (triton.cdiv(out, tile.columns), triton.cdiv(tokens, tile.tokens))
    with device_of(x):
        narrow_kernel[grid](
            x, weight, h if A is None else A, B, h, y, tokens, channels, out, rank, x.stride(0), *weight.stride(),
            *B.stride(), scale, FIND=A is not None, TOKENS=tile.tokens, COLUMNS=tile.columns, CHANNELS=tile.channels,
            RANK=padded_rank(rank), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y
