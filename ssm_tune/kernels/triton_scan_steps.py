"""What the passes of the Triton selective scan have in common: reading tokens, step sizes, one group of tokens.

Layout. A program has one warp and works on `BLOCK` channels, one lane each, through a piece of a row, a group of
`GROUP` tokens at a time. The states of a channel are the rows of a tile (STATES, BLOCK), so that they lie in the
registers of its lane and sums over states need no shuffles. B and C come as float32, side by side (`prepare_kernel`):
every lane reads the same numbers.

Documents. `codes` has one byte a token: PLAIN, START (the state is set to zero before it) or PADDING (it is as if it
were not there; the tokens that fill the last group up are padding too). `flags` says for every eight tokens whether any
is not plain. Groups of plain tokens take the short path, so that documents cost next to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_scan_documents import FLAGGED_TOKENS, PADDING, START

FLAGGED: tl.constexpr = tl.constexpr(FLAGGED_TOKENS)
_START: tl.constexpr = tl.constexpr(START)
_PADDING: tl.constexpr = tl.constexpr(PADDING)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def read_row(pointer, channels, dims, real, EVEN: tl.constexpr, CAREFUL: tl.constexpr):
    """One token's numbers of the block's channels, float32; zero beyond the last channel and for padding."""
    if CAREFUL:
        values = tl.load(pointer + channels, mask=channels < tl.where(real, dims, 0), other=0.0)
    elif EVEN:
        values = tl.load(pointer + channels)
    else:
        values = tl.load(pointer + channels, mask=channels < dims, other=0.0)
    return values.to(tl.float32)


@triton.jit
def write_row(pointer, channels, dims, values, inside, EVEN: tl.constexpr, CAREFUL: tl.constexpr):
    """Counterpart of `read_row`; `inside`: whether the token is one of the row's."""
    values = values.to(pointer.dtype.element_ty)
    if CAREFUL:
        tl.store(pointer + channels, values, mask=channels < tl.where(inside, dims, 0))
    elif EVEN:
        tl.store(pointer + channels, values)
    else:
        tl.store(pointer + channels, values, mask=channels < dims)


@triton.jit
def softplus(x):
    """log(1 + e^x), and its slope. The series keeps small steps exact, where 1 + e^x rounds."""
    e = tl.exp2(x * _LOG2_E)
    series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
    y = tl.where(e < 0.03125, series, tl.log2(1.0 + e) * _LN_2)
    large = x > 20.0
    return tl.where(large, x, y), tl.where(large, 1.0, e / (1.0 + e))


@triton.jit
def silu_parts(x):
    """The sigmoid of x, from which silu and its slope follow."""
    return 1.0 / (1.0 + tl.exp2(-x * _LOG2_E))


@triton.jit
def step_size(dt, bias, real, SOFTPLUS: tl.constexpr, CAREFUL: tl.constexpr):
    """The step of the recurrence and its slope by dt; no step at padding."""
    dt = dt + bias
    if SOFTPLUS:
        step, slope = softplus(dt)
    else:
        step, slope = dt, tl.full(dt.shape, 1.0, tl.float32)
    if CAREFUL:
        step = tl.where(real, step, 0.0)
        slope = tl.where(real, slope, 0.0)
    return step, slope


@triton.jit
def advance(h, step, q, A, b, start, CAREFUL: tl.constexpr):
    """The state after one token: exp(step A) h + step x B. A is in units of log 2."""
    if CAREFUL:
        h = tl.where(start, 0.0, h)
    return tl.exp2(step[:, None] * A) * h + q[:, None] * b[None, :]


@triton.jit(do_not_specialize=["length", "padded", "states"])
def prepare_kernel(
    B, C, codes, BC, length, padded, states,
    B_row, B_token, B_state, C_row, C_token, C_state,
    STATES: tl.constexpr, TOKENS: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """B and C side by side, (batch, padded, 2, STATES), float32; zero at padding and beyond the last of each."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.arange(0, STATES)
    mask = (t < length)[:, None] & (n < states)[None, :]
    if HAS_CODES:
        code = tl.load(codes + row * padded + t, mask=t < padded, other=_PADDING)
        mask = mask & (code != _PADDING)[:, None]
    t = t.to(tl.int64)
    b = tl.load(B + row * B_row + t[:, None] * B_token + n[None, :] * B_state, mask=mask, other=0.0)
    c = tl.load(C + row * C_row + t[:, None] * C_token + n[None, :] * C_state, mask=mask, other=0.0)
    to = BC + (row * padded + t[:, None]) * 2 * STATES + n[None, :]
    tl.store(to, b.to(tl.float32), mask=(t < padded)[:, None])
    tl.store(to + STATES, c.to(tl.float32), mask=(t < padded)[:, None])
