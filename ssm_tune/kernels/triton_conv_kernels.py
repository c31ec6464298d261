"""The device code of the Triton causal convolution.

A program has `TOKENS` tokens of `BLOCK` channels at a time, channels side by side. What each token sees is either the
tokens just before it or, where documents share a row, said by a table (`triton_conv.find_windows`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_scan_steps import silu_parts


@triton.jit
def find_rows(
    table, t, back, length, HEAD: tl.constexpr, WIDTH: tl.constexpr, HAS_TABLE: tl.constexpr, REVERSE: tl.constexpr
):
    """Where the input stands that token t sees `back` places before itself; -1: nowhere.

    REVERSE: t are inputs, and what is found are the tokens that see them `back` places before themselves. With a state
    there are HEAD more inputs than tokens, before them.
    """
    count = length + HEAD if REVERSE else length
    if HAS_TABLE:
        return tl.load(table + t * WIDTH + back, mask=t < count, other=-1)
    found = t - HEAD + back if REVERSE else t + HEAD - back
    return tl.where((t < count) & (found >= 0) & (found < (length if REVERSE else length + HEAD)), found, -1)


@triton.jit
def read_rows(pointer, rows, token_stride, channels, dims):
    """Rows of inputs or of gradients, (TOKENS, BLOCK), float32; zero for row -1."""
    mask = (rows >= 0)[:, None] & (channels < dims)[None, :]
    at = rows.to(tl.int64)[:, None] * token_stride + channels[None, :]
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def convolve(
    x, weight, bias, table, t, x_token, channels, dims, length,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The sum at tokens t before the activation, (TOKENS, BLOCK), and the inputs it is of, the nearest first."""
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=channels < dims, other=0.0).to(tl.float32)[None, :]
    inputs = ()
    for back in tl.static_range(WIDTH):
        rows = find_rows(table, t, back, length, HEAD, WIDTH, HAS_TABLE, REVERSE)
        inputs += (read_rows(x, rows, x_token, channels, dims),)
        factor = tl.load(weight + channels * WIDTH + (WIDTH - 1 - back), mask=channels < dims, other=0.0)
        total += inputs[back] * factor.to(tl.float32)[None, :]
    return total, inputs


@triton.jit(do_not_specialize=["length"])
def conv_kernel(
    x, weight, bias, table, y, dims, length, x_row, x_token, y_row, y_token,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, SILU: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """y (batch, length, dims) from x (batch, HEAD + length, dims); REVERSE: the gradient by x, of that shape, from the
    gradient by the sums before the activation. Grid: (blocks of channels, blocks of tokens, batch)."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2).to(tl.int64)
    count = length + HEAD if REVERSE else length
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    table += row * count * WIDTH
    value, _ = convolve(
        x + row * x_row, weight, bias, table, t, x_token, channels, dims, length,
        HEAD, WIDTH, TOKENS, BLOCK, HAS_BIAS, HAS_TABLE, REVERSE,
    )  # fmt: skip
    if SILU:
        value = value * silu_parts(value)
    if HAS_TABLE and not REVERSE:  # padding gives zero
        real = find_rows(table, t, 0, length, HEAD, WIDTH, HAS_TABLE, REVERSE) >= 0
        value = tl.where(real[:, None], value, 0.0)
    at = row * y_row + t.to(tl.int64)[:, None] * y_token + channels[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=(t < count)[:, None] & (channels < dims)[None, :])


@triton.jit(do_not_specialize=["length", "chunks", "rounds"])
def conv_slope_kernel(
    x, weight, bias, table, dy, slopes, dweight, dims, length, chunks, rounds, x_row, x_token,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, SILU: tl.constexpr, NEED_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradient by the sums before the activation, (batch, length, dims), and for every chunk of TOKENS * rounds
    tokens those by the weights and the bias, to be summed: (batch, chunks, WIDTH + 1, dims).

    Grid: (blocks of channels, chunks, batch).
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    x += row * x_row
    table += row * length * WIDTH
    sums = ()
    for _ in tl.static_range(WIDTH + 1):
        sums += (tl.zeros([TOKENS, BLOCK], tl.float32),)
    for round in range(rounds):
        t = (chunk * rounds + round) * TOKENS + tl.arange(0, TOKENS)
        at = (row * length + t)[:, None] * dims + channels[None, :]
        mask = (t < length)[:, None] & (channels < dims)[None, :]
        real = find_rows(table, t, 0, length, HEAD, WIDTH, HAS_TABLE, False) >= 0
        slope = tl.load(dy + at, mask=mask & real[:, None], other=0.0).to(tl.float32)
        value, inputs = convolve(
            x, weight, bias, table, t, x_token, channels, dims, length,
            HEAD, WIDTH, TOKENS, BLOCK, HAS_BIAS, HAS_TABLE, False,
        )  # fmt: skip
        if SILU:
            s = silu_parts(value)
            slope = slope * s * (1.0 + value * (1.0 - s))
        tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=mask)
        if NEED_WEIGHT:
            old, sums = sums, ()
            for back in tl.static_range(WIDTH):
                sums += (old[back] + slope * inputs[back],)
            sums += (old[WIDTH] + slope,)
    if NEED_WEIGHT:
        dweight += (row * chunks + chunk) * (WIDTH + 1) * dims
        for back in tl.static_range(WIDTH):
            tl.store(dweight + (WIDTH - 1 - back) * dims + channels, tl.sum(sums[back], axis=0), mask=channels < dims)
        tl.store(dweight + WIDTH * dims + channels, tl.sum(sums[WIDTH], axis=0), mask=channels < dims)
