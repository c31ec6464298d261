"""The Triton selective scan across pieces of a row: what each piece adds to the state, and the states between pieces.

`unit` is the distance between channels, 1: passed as a number that Triton does not look at, it keeps a channel's states
in one lane. Where Triton sees that channels lie side by side it gives four of them to four lanes, a quarter of the
states each, to load A in pieces of 16 bytes; that is SPREAD.

The recurrence is linear in the state, so that a piece takes the state before it to exp(A S) state + end, where S is the
sum of its steps and `end` the state after it from zero. A start of a document inside the piece lets nothing through:
S is infinite then. The same holds backwards for the gradient by the state (`reverse_ends_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_scan_steps import (
    _LOG2_E,
    _PADDING,
    _START,
    FLAGGED,
    advance,
    read_row,
    silu_parts,
    step_size,
)


@triton.jit
def advance_group(
    h, total, x, dt, BC, codes, x_token, dt_token, A, bias, channels, dims,
    STATES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, SOFTPLUS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The state after a group of tokens and the sum of steps; no outputs. Pointers are at its first token."""
    n = tl.arange(0, STATES)
    xs, dts, bs, kinds = (), (), (), ()
    for i in tl.static_range(GROUP):
        real = True
        if CAREFUL:
            kind = tl.load(codes + i)
            kinds += (kind,)
            real = kind != _PADDING
        xs += (read_row(x + i * x_token, channels, dims, real, EVEN, CAREFUL),)
        dts += (read_row(dt + i * dt_token, channels, dims, real, EVEN, CAREFUL),)
        bs += (tl.load(BC + i * 2 * STATES + n),)
    for i in tl.static_range(GROUP):
        real, start = True, False
        if CAREFUL:
            real, start = kinds[i] != _PADDING, kinds[i] == _START
        step, _ = step_size(dts[i], bias, real, SOFTPLUS, CAREFUL)
        h = advance(h, step, step * xs[i], A, bs[i], start, CAREFUL)
        total += step
        if CAREFUL:
            total = tl.where(start, float("inf"), total)
    return h, total


@triton.jit(do_not_specialize=["padded", "pieces", "piece_tokens", "unit"])
def ends_kernel(
    x, dt, A, BC, bias, codes, flags, states, sums,
    dims, padded, pieces, piece_tokens, unit, x_row, x_token, dt_row, dt_token,
    STATES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_CODES: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """For every piece but the last: the state after it from zero, in the next piece's place, and the sum of its steps.

    Grid: (blocks of channels, pieces - 1, batch). states: (batch, pieces, STATES, dims). sums: (batch, pieces, dims).
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    inside = channels < dims
    n = tl.arange(0, STATES)
    tile = n[None, :] * dims + channels[:, None] * (1 if SPREAD else unit)
    log_decay = tl.load(A + tile, mask=inside[:, None], other=0.0) * _LOG2_E
    shift = tl.load(bias + channels, mask=inside, other=0.0) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    at = piece.to(tl.int64) * piece_tokens
    x += row * x_row + at * x_token
    dt += row * dt_row + at * dt_token
    BC += (row * padded + at) * 2 * STATES
    codes += row * padded + at
    flags += (row * padded + at) // FLAGGED
    h = tl.zeros([BLOCK, STATES], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for group in range(piece_tokens // GROUP):
        careful = tl.load(flags + group * GROUP // FLAGGED) != 0 if HAS_CODES else False
        if careful:
            h, total = advance_group(
                h, total, x, dt, BC, codes, x_token, dt_token, log_decay, shift, channels, dims,
                STATES, GROUP, EVEN, SOFTPLUS, True,
            )  # fmt: skip
        else:
            h, total = advance_group(
                h, total, x, dt, BC, codes, x_token, dt_token, log_decay, shift, channels, dims,
                STATES, GROUP, EVEN, SOFTPLUS, False,
            )  # fmt: skip
        x += GROUP * x_token
        dt += GROUP * dt_token
        BC += GROUP * 2 * STATES
        codes += GROUP
    tl.store(states + (row * pieces + piece + 1) * STATES * dims + tile, h, mask=inside[:, None])
    tl.store(sums + (row * pieces + piece) * dims + channels, total, mask=inside)


@triton.jit
def reverse_group(
    carry, total, dt, z, dy, BC, codes, dt_token, z_token, y_token, A, bias, channels, dims,
    STATES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradient by the state before a group of tokens, from the one by the state after it."""
    n = tl.arange(0, STATES)
    dts, slopes, cs, kinds = (), (), (), ()
    for i in tl.static_range(GROUP):
        real = True
        if CAREFUL:
            kind = tl.load(codes + i)
            kinds += (kind,)
            real = kind != _PADDING
        dts += (read_row(dt + i * dt_token, channels, dims, real, EVEN, CAREFUL),)
        slope = read_row(dy + i * y_token, channels, dims, real, EVEN, CAREFUL)
        if HAS_Z:
            gate = read_row(z + i * z_token, channels, dims, real, EVEN, CAREFUL)
            slope = slope * gate * silu_parts(gate)
        slopes += (slope,)
        cs += (tl.load(BC + (i * 2 + 1) * STATES + n),)
    for i in tl.static_range(GROUP - 1, -1, -1):
        real, start = True, False
        if CAREFUL:
            real, start = kinds[i] != _PADDING, kinds[i] == _START
        step, _ = step_size(dts[i], bias, real, SOFTPLUS, CAREFUL)
        carry += slopes[i][:, None] * cs[i][None, :]
        carry *= tl.exp2(step[:, None] * A)
        total += step
        if CAREFUL:
            carry = tl.where(start, 0.0, carry)
            total = tl.where(start, float("inf"), total)
    return carry, total


@triton.jit(do_not_specialize=["length", "padded", "pieces", "piece_tokens", "unit"])
def reverse_ends_kernel(
    dt, z, dy, A, BC, bias, codes, flags, states, sums,
    dims, length, padded, pieces, piece_tokens, unit, dt_row, dt_token, z_row, z_token,
    STATES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_CODES: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """For every piece but the first: the gradient by the state before it, from zero after it, in the place of the piece
    before; and the sum of its steps. Grid and tensors as in `ends_kernel`; dy is (batch, length, dims), contiguous."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1) + 1
    row = tl.program_id(2).to(tl.int64)
    inside = channels < dims
    n = tl.arange(0, STATES)
    tile = n[None, :] * dims + channels[:, None] * (1 if SPREAD else unit)
    log_decay = tl.load(A + tile, mask=inside[:, None], other=0.0) * _LOG2_E
    shift = tl.load(bias + channels, mask=inside, other=0.0) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    groups = tl.minimum(piece_tokens, padded - piece * piece_tokens) // GROUP
    at = piece.to(tl.int64) * piece_tokens + groups * GROUP  # one group after the last; every round goes back by one
    dt += row * dt_row + at * dt_token
    z += row * z_row + at * z_token
    dy += (row * length + at) * dims
    BC += (row * padded + at) * 2 * STATES
    codes += row * padded + at
    flags += (row * padded + at) // FLAGGED
    carry = tl.zeros([BLOCK, STATES], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for group in range(groups):
        dt -= GROUP * dt_token
        z -= GROUP * z_token
        dy -= GROUP * dims
        BC -= GROUP * 2 * STATES
        codes -= GROUP
        careful = tl.load(flags - 1 - group * GROUP // FLAGGED) != 0 if HAS_CODES else False
        if careful:
            carry, total = reverse_group(
                carry, total, dt, z, dy, BC, codes, dt_token, z_token, dims, log_decay, shift, channels, dims,
                STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, True,
            )  # fmt: skip
        else:
            carry, total = reverse_group(
                carry, total, dt, z, dy, BC, codes, dt_token, z_token, dims, log_decay, shift, channels, dims,
                STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, False,
            )  # fmt: skip
    tl.store(states + (row * pieces + piece - 1) * STATES * dims + tile, carry, mask=inside[:, None])
    tl.store(sums + (row * pieces + piece) * dims + channels, total, mask=inside)


@triton.jit(do_not_specialize=["pieces"])
def carry_kernel(
    states, sums, A, edge, dims, pieces,
    STATES: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From what each piece adds to what is carried into each, in place; `edge`: what is carried into the first.

    Grid: (blocks of channels, batch). states: (batch, pieces, STATES, dims). edge: (batch, STATES, dims).
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = (channels < dims)[:, None]
    n = tl.arange(0, STATES)
    tile = n[None, :] * dims + channels[:, None]
    log_decay = tl.load(A + tile, mask=mask, other=0.0) * _LOG2_E
    carried = tl.load(edge + row * STATES * dims + tile, mask=mask, other=0.0)
    piece = row * pieces + (pieces - 1 if REVERSE else 0)
    tl.store(states + piece * STATES * dims + tile, carried, mask=mask)
    for _ in range(1, pieces):
        total = tl.load(sums + piece * dims + channels, mask=channels < dims, other=0.0)[:, None]
        piece = piece - 1 if REVERSE else piece + 1
        added = tl.load(states + piece * STATES * dims + tile, mask=mask, other=0.0)
        carried = tl.where(total == float("inf"), 0.0, tl.exp2(log_decay * total) * carried) + added
        tl.store(states + piece * STATES * dims + tile, carried, mask=mask)
