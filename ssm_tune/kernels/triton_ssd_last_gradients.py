"""The last kernel of the backward pass of the Triton scan of Mamba-2; see `triton_ssd_backward`.

One launch for two things that need nothing of each other: gradients of steps, and sums of the parts of the gradients of
B and C, if there are any. Each is a few microseconds of waiting for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_ssd_common import step_of


@triton.jit
def step_gradients(
    dt, A, bias, step, by_step, read, mixed, sent, carried, by_skip, ddt, shares, program,
    batch, length, heads, chunks, state_blocks, low, high, dt_row, dt_token, dt_head, ddt_row, ddt_token, ddt_head,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, SUM_SKIP: tl.constexpr,
):  # fmt: skip
    """ddt of a chunk for HEADS heads, and the chunk's shares of the gradients of A, dt_bias and D.

    shares: (3, batch * chunks, heads).
    """
    blocks = tl.cdiv(heads, HEADS)
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    chunk, row = program // blocks % chunks, (program // (blocks * chunks)).to(tl.int64)
    place = tl.arange(0, CHUNK)
    token = chunk.to(tl.int64) * CHUNK + place
    some = head < heads
    of_chunk = (row * heads + head) * chunks + chunk
    tile, here = of_chunk[:, None] * CHUNK + place[None, :], some[:, None]
    size = tl.load(step + tile, mask=here, other=0.0)
    direct = tl.load(by_step + tile, mask=here, other=0.0)
    slope = -direct * size
    share = of_chunk[:, None] * (CHUNK // 16 * CHUNK) + place[None, :]
    for _ in tl.static_range(CHUNK // 16):
        slope += tl.load(mixed + share, mask=here, other=0.0)
        share += CHUNK
    to_the_end = tl.sum(tl.load(sent + tile, mask=here, other=0.0) * size, axis=1)
    every = batch.to(tl.int64) * chunks * heads
    for _ in range(state_blocks):
        slope += tl.load(read + tile, mask=here, other=0.0)
        to_the_end += tl.load(carried + of_chunk, mask=some, other=0.0)
        read += every * CHUNK
        carried += every
    slope = tl.cumsum(slope, axis=1, reverse=True) + to_the_end[:, None]
    value = direct + slope * tl.load(A + head, mask=some, other=0.0)[:, None]
    inside = (token < length)[None, :] & here
    shift = tl.load(bias + head, mask=some, other=0.0) if HAS_BIAS else tl.zeros([HEADS], tl.float32)
    given = tl.load(dt + row * dt_row + token[None, :] * dt_token + head[:, None] * dt_head, mask=inside, other=0.0)
    _, by_dt = step_of(given, shift[:, None], low, high, SOFTPLUS, LIMITED)
    value = tl.where(inside, value * by_dt, 0.0)
    to = ddt + row * ddt_row + token[None, :] * ddt_token + head[:, None] * ddt_head
    tl.store(to, value.to(ddt.dtype.element_ty), mask=inside)
    to = shares + (row * chunks + chunk) * heads + head
    tl.store(to, tl.sum(slope * size, axis=1), mask=some)
    tl.store(to + every, tl.sum(value, axis=1), mask=some)
    if SUM_SKIP:
        skipped = tl.load(by_skip + tile, mask=here, other=0.0)
        tl.store(to + 2 * every, tl.sum(skipped, axis=1), mask=some)


@triton.jit
def add_parts(
    parts_of_B, parts_of_C, dB, dC, program, batch, length, groups, parts, state_dims,
    dB_row, dB_token, dB_group, dC_row, dC_token, dC_group, TOKENS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Sums over parts, (parts, batch, length, groups, state), for TOKENS tokens of a group."""
    group, row = (program % groups).to(tl.int64), (program // groups % batch).to(tl.int64)
    token = (program // (groups * batch)).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    n = tl.arange(0, STATE)
    inside = (token < length)[:, None] & (n < state_dims)[None, :]
    tile = ((row * length + token) * groups + group)[:, None] * state_dims + n[None, :]
    of_B, of_C = tl.zeros([TOKENS, STATE], tl.float32), tl.zeros([TOKENS, STATE], tl.float32)
    every = batch.to(tl.int64) * length * groups * state_dims
    for _ in range(parts):
        of_B += tl.load(parts_of_B + tile, mask=inside, other=0.0)
        of_C += tl.load(parts_of_C + tile, mask=inside, other=0.0)
        parts_of_B += every
        parts_of_C += every
    dB += row * dB_row + group * dB_group + token[:, None] * dB_token + n[None, :]
    dC += row * dC_row + group * dC_group + token[:, None] * dC_token + n[None, :]
    tl.store(dB, of_B.to(dB.dtype.element_ty), mask=inside)
    tl.store(dC, of_C.to(dC.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch", "length", "heads", "chunks", "groups", "parts", "state_blocks"])
def last_gradients_kernel(
    dt, A, bias, step, by_step, read, mixed, sent, carried, by_skip, ddt, shares, parts_of_B, parts_of_C, dB, dC,
    batch, length, heads, chunks, groups, parts, state_dims, state_blocks, low, high,
    dt_row, dt_token, dt_head, ddt_row, ddt_token, ddt_head, dB_row, dB_token, dB_group, dC_row, dC_token, dC_group,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr,
    SUM_SKIP: tl.constexpr, TOKENS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Both of the above. Grid: (chunks * blocks of heads * batch + blocks of tokens * groups * batch,), the second only
    if there are parts."""
    program = tl.program_id(0)
    others = tl.cdiv(heads, HEADS) * chunks * batch
    if program < others:
        step_gradients(
            dt, A, bias, step, by_step, read, mixed, sent, carried, by_skip, ddt, shares, program,
            batch, length, heads, chunks, state_blocks, low, high, dt_row, dt_token, dt_head,
            ddt_row, ddt_token, ddt_head, CHUNK, HEADS, HAS_BIAS, SOFTPLUS, LIMITED, SUM_SKIP,
        )  # fmt: skip
    else:
        add_parts(
            parts_of_B, parts_of_C, dB, dC, program - others, batch, length, groups, parts, state_dims,
            dB_row, dB_token, dB_group, dC_row, dC_token, dC_group, TOKENS, STATE,
        )  # fmt: skip
