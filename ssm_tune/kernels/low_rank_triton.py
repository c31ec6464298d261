"""A product with a low-rank matrix, and the gradients through its wide factor, each in one pass: Triton kernels.

Forward, a program takes tokens through both factors: h = scale x A' stays in registers for y = h B'. It may take but a
part of the columns of y, and computes h again with every part.

Backward, the slope dy (tokens, out) is by far the largest tensor, and both products contract it, over one dimension
each. A program reads a block of columns over a range of tokens, sums its share of dB over them, and writes its columns'
share of dh for each token. A second kernel adds the shares, always in the same order. dA = dh' x is found as dB is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of, multiprocessors, shared_memory

# Of the second kernel: numbers and shares that a program reads at a time, columns of dx that it writes at a time.
_NUMBERS, _SUMMED = 256, {"PARTS": 8, "CHANNELS": 256}


class Tile(NamedTuple):
    """What a program of the first kernel reads at a time: so many tokens and columns of dy."""

    tokens: int = 128
    columns: int = 256
    warps: int = 8
    stages: int = 3
    programs: int = 1  # on a multiprocessor

    @classmethod
    def fitting(cls, rank: int, device: torch.device) -> Tile:
        """The largest whose shares stay in registers, and itself, as often as it has stages, in shared memory."""
        if rank > 16:
            return cls(64, 128, 4, programs=2)
        tile = cls()
        fits = 2 * tile.tokens * tile.columns * tile.stages <= shared_memory(device)
        return tile if fits else cls(64, 256, 4, programs=2)


class Walk(NamedTuple):
    """How a program of the forward kernel goes: so many tokens, channels of x and columns of y at a time."""

    tokens: int = 64
    channels: int = 128
    columns: int = 256
    warps: int = 4
    stages: int = 4
    splits: int = 2  # programs that share the columns of y


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x, A, B, h, y, tokens, channels, out, rank, x_stride, scale,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = (rows < tokens)[:, None]
    ranks = tl.arange(0, RANK)
    low = tl.zeros([TOKENS, RANK], tl.float32)
    for first in range(0, channels, CHANNELS):
        places = first + tl.arange(0, CHANNELS)
        inside = places < channels
        value = tl.load(
            x + rows.to(tl.int64)[:, None] * x_stride + places[None, :], mask=here & inside[None, :], other=0.0
        )
        within = inside[:, None] & (ranks < rank)[None, :]
        factor = tl.load(A + ranks[None, :] * channels + places[:, None], mask=within, other=0.0)
        low = tl.dot(value, factor, low)
    rounded = (low * scale).to(h.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(h + rows[:, None] * rank + ranks[None, :], rounded, mask=here & (ranks < rank)[None, :])
    for first in range(tl.program_id(1) * COLUMNS, out, tl.num_programs(1) * COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (columns < out)[None, :]
        within = (ranks < rank)[:, None] & inside
        factor = tl.load(B + columns[None, :] * rank + ranks[:, None], mask=within, other=0.0)
        product = tl.dot(rounded, factor).to(y.dtype.element_ty)
        tl.store(y + rows.to(tl.int64)[:, None] * out + columns[None, :], product, mask=here & inside)


def low_rank_product(x: Tensor, A: Tensor, B: Tensor, scale: float, walk: Walk | None = None) -> tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.low_rank_product`.

    Raises:
        Unsupported: other dtypes than bfloat16 and float16, or no tokens.
    """
    (tokens, channels), (out, rank) = x.shape, B.shape
    check_dtypes(x, A, B)
    x = x if x.stride(1) == 1 else x.contiguous()
    A, B = A.contiguous(), B.contiguous()
    # Where y is the smaller one, reading x again costs more than more programs save.
    walk = walk or Walk(splits=1 if out <= channels else 2, stages=4 if rank <= 16 else 3)
    h, y = x.new_empty(tokens, rank), x.new_empty(tokens, out)
    with device_of(x):
        product_kernel[(triton.cdiv(tokens, walk.tokens), walk.splits)](
            x, A, B, h, y, tokens, channels, out, rank, x.stride(0), scale, TOKENS=walk.tokens,
            CHANNELS=walk.channels, COLUMNS=walk.columns, RANK=padded_rank(rank), num_warps=walk.warps,
            num_stages=walk.stages,
        )  # fmt: skip
    return h, y


@triton.jit(do_not_specialize=["tokens", "span"])
def shares_kernel(
    dy, B, h, dh_shares, dB_shares, tokens, out, rank, dy_stride, span,
    OF_TOKENS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    if OF_TOKENS:
        inside = (columns < out)[:, None] & (ranks < rank)[None, :]
        factor = tl.load(B + columns[:, None] * rank + ranks[None, :], mask=inside, other=0.0)
    share = tl.zeros([COLUMNS, RANK], tl.float32)
    for first in range(part * span, tl.minimum(part * span + span, tokens), TOKENS):
        rows = first + tl.arange(0, TOKENS)
        here = rows < tokens
        slope = tl.load(
            dy + rows.to(tl.int64)[:, None] * dy_stride + columns[None, :],
            mask=here[:, None] & (columns < out)[None, :],
            other=0.0,
        )
        low = tl.load(
            h + rows[:, None] * rank + ranks[None, :], mask=here[:, None] & (ranks < rank)[None, :], other=0.0
        )
        share = tl.dot(tl.trans(slope), low, share)
        if OF_TOKENS:
            places = (block.to(tl.int64) * tokens + rows)[:, None] * RANK + ranks[None, :]
            tl.store(dh_shares + places, tl.dot(slope, factor), mask=here[:, None])
    places = (part.to(tl.int64) * out + columns)[:, None] * RANK + ranks[None, :]
    tl.store(dB_shares + places, share, mask=(columns < out)[:, None])


@triton.jit
def _add_shares(
    shares, total, program, count, parts, rank, row, column,
    RANK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        where = part.to(tl.int64)[:, None] * count + places[None, :]
        value += tl.sum(tl.load(shares + where, mask=(part < parts)[:, None] & inside[None, :], other=0.0), axis=0)
    of_rank = places % RANK
    target = total + places // RANK * row + of_rank * column
    tl.store(target, value.to(total.dtype.element_ty), mask=inside & (of_rank < rank))


@triton.jit
def _add_slopes(
    shares, A, dh, dx, program, tokens, channels, blocks, scale, rank,
    FIND: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    rows, ranks = program * TOKENS + tl.arange(0, TOKENS), tl.arange(0, RANK)
    here = (rows < tokens)[:, None]
    places = rows[:, None] * RANK + ranks[None, :]
    value = tl.zeros([TOKENS, RANK], tl.float32)
    for first in range(0, blocks, PARTS):
        block = (first + tl.arange(0, PARTS))[:, None, None]
        where = block.to(tl.int64) * tokens * RANK + places[None, :, :]
        value += tl.sum(tl.load(shares + where, mask=(block < blocks) & here[None, :, :], other=0.0), axis=0)
    slope = (value * scale).to(dh.dtype.element_ty)
    tl.store(dh + rows[:, None] * rank + ranks[None, :], slope, mask=here & (ranks < rank)[None, :])
    if FIND:
        for first in range(0, channels, CHANNELS):
            columns = first + tl.arange(0, CHANNELS)
            inside = (columns < channels)[None, :]
            within = (ranks < rank)[:, None] & inside
            factor = tl.load(A + ranks[:, None] * channels + columns[None, :], mask=within, other=0.0)
            product = tl.dot(slope, factor).to(dx.dtype.element_ty)
            tl.store(dx + rows.to(tl.int64)[:, None] * channels + columns[None, :], product, mask=here & inside)


@triton.jit(do_not_specialize=["tokens", "parts", "blocks"])
def sums_kernel(
    dh_shares, dB_shares, A, dh, dB, dx, scale, tokens, channels, out, rank, blocks, parts,
    FIND: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    of_dh = tl.cdiv(tokens, TOKENS)
    if program < of_dh:
        _add_slopes(
            dh_shares, A, dh, dx, program, tokens, channels, blocks, scale, rank, FIND, TOKENS, CHANNELS, RANK, PARTS
        )
    else:
        _add_shares(dB_shares, dB, program - of_dh, out * RANK, parts, rank, rank, 1, RANK, BLOCK, PARTS)


def low_rank_gradients(
    dy: Tensor,
    B: Tensor,
    h: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
    A: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operation of `ssm_tune.kernels.low_rank_gradients`.

    Raises:
        Unsupported: other dtypes than bfloat16 and float16, or no tokens.
    """
    (tokens, out), rank = dy.shape, B.shape[1]
    check_dtypes(dy, B, h, B if A is None else A)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    B, h = B.contiguous(), h.contiguous()
    padded = padded_rank(rank)
    tile = tile or Tile.fitting(padded, dy.device)
    blocks, parts, span = _spread(tokens, out, tile, dy.device)
    dh, dB = dy.new_empty(tokens, rank), dy.new_empty(out, rank, dtype=dtype)
    dh_shares = dy.new_empty(blocks, tokens, padded, dtype=torch.float32)
    dB_shares = dy.new_empty(parts, out, padded, dtype=torch.float32)
    dx = None if A is None else dy.new_empty(tokens, A.shape[1])
    low = dB if A is None else A.contiguous()
    rows = max(16, _NUMBERS // padded)
    adders = triton.cdiv(tokens, rows) + triton.cdiv(out * padded, _NUMBERS)
    with device_of(dy):
        shares_kernel[(blocks, parts)](
            dy, B, h, dh_shares, dB_shares, tokens, out, rank, dy.stride(0), span, OF_TOKENS=True,
            TOKENS=tile.tokens, COLUMNS=tile.columns, RANK=padded, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        sums_kernel[(adders,)](
            dh_shares, dB_shares, low, dh, dB, dh if dx is None else dx, scale, tokens, low.shape[1], out, rank,
            blocks, parts, FIND=A is not None, TOKENS=rows, RANK=padded, BLOCK=_NUMBERS, **_SUMMED,
        )  # fmt: skip
    return dh, dB, dx


@triton.jit(do_not_specialize=["parts"])
def weight_sums_kernel(
    shares, total, channels, rank, parts, RANK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    _add_shares(shares, total, tl.program_id(0), channels * RANK, parts, rank, 1, channels, RANK, BLOCK, PARTS)


def narrow_weight_gradient(
    dy: Tensor, x: Tensor, dtype: torch.dtype = torch.float32, tile: Tile | None = None
) -> Tensor:
    """The operation of `ssm_tune.kernels.narrow_weight_gradient`.

    Raises:
        Unsupported: other dtypes than bfloat16 and float16, or no tokens.
    """
    (tokens, channels), rank = x.shape, dy.shape[1]
    check_dtypes(x, dy)
    x, dy = x if x.stride(1) == 1 else x.contiguous(), dy.contiguous()
    padded = padded_rank(rank)
    tile = tile or Tile.fitting(padded, x.device)
    blocks, parts, span = _spread(tokens, channels, tile, x.device)
    total = x.new_empty(rank, channels, dtype=dtype)
    shares = x.new_empty(parts, channels, padded, dtype=torch.float32)
    with device_of(x):
        shares_kernel[(blocks, parts)](
            x, dy, dy, shares, shares, tokens, channels, rank, x.stride(0), span, OF_TOKENS=False,
            TOKENS=tile.tokens, COLUMNS=tile.columns, RANK=padded, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        weight_sums_kernel[(triton.cdiv(channels * padded, _NUMBERS),)](
            shares, total, channels, rank, parts, RANK=padded, BLOCK=_NUMBERS, PARTS=_SUMMED["PARTS"]
        )
    return total


def _spread(tokens: int, columns: int, tile: Tile, device: torch.device) -> tuple[int, int, int]:
    """Blocks of columns, parts of the tokens, and tokens of a part."""
    blocks, tiles = triton.cdiv(columns, tile.columns), triton.cdiv(tokens, tile.tokens)
    span = tile.tokens * triton.cdiv(tiles, _parts(blocks, tiles, tile.programs * multiprocessors(device)))
    return blocks, triton.cdiv(tokens, span), span


@functools.lru_cache(maxsize=256)
def _parts(blocks: int, tiles: int, room: int) -> int:
    """Into how many parts to cut so many tiles of every block, to be done soonest by programs of which there is room
    for so many at a time; a program takes as long as two tiles to begin and to end."""
    return min(
        range(1, min(tiles, 4 * triton.cdiv(room, blocks)) + 1),
        key=lambda parts: triton.cdiv(blocks * parts, room) * (triton.cdiv(tiles, parts) + 2),
    )


def check_dtypes(*tensors: Tensor) -> None:
    """Raise Unsupported for tensors that the products here cannot take."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        raise Unsupported(f"{', '.join(map(str, dtypes))}: one of bfloat16 and float16 only")
    if not tensors[0].numel():
        raise Unsupported("no tokens")


def padded_rank(rank: int) -> int:
    """Ranks in a tile, which the tensor cores take by 16."""
    return max(16, triton.next_power_of_2(rank))
