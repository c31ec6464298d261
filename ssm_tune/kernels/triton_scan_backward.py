"""The backward pass of the Triton selective scan.

States are recomputed: from those kept for every segment to the start of each of its groups (in a scratch of the
program's own, small enough to stay in the cache), then token by token within a group, in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_scan_pieces import advance_group
from ssm_tune.kernels.triton_scan_steps import (
    _LN_2,
    _LOG2_E,
    _PADDING,
    _START,
    FLAGGED,
    advance,
    read_row,
    silu_parts,
    step_size,
    write_row,
)


@triton.jit
def recompute_group(
    h, x, dt, z, dy, dz, BC, codes, t, x_token, dt_token, z_token, A, skip, bias, channels, dims, length,
    STATES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The forward pass of a group again: what the reverse pass needs of each token. The gate's gradient is written."""
    n = tl.arange(0, STATES)
    xs, dts, zs, gs, kinds = (), (), (), (), ()
    for i in tl.static_range(GROUP):
        real = True
        if CAREFUL:
            kind = tl.load(codes + i)
            kinds += (kind,)
            real = kind != _PADDING
        xs += (read_row(x + i * x_token, channels, dims, real, EVEN, CAREFUL),)
        dts += (read_row(dt + i * dt_token, channels, dims, real, EVEN, CAREFUL),)
        gs += (read_row(dy + i * dims, channels, dims, real, EVEN, CAREFUL),)
        if HAS_Z:
            zs += (read_row(z + i * z_token, channels, dims, real, EVEN, CAREFUL),)
    states, steps, slopes, outer, dzs = (h,), (), (), (), ()
    for i in tl.static_range(GROUP):
        real, start = True, False
        if CAREFUL:
            real, start = kinds[i] != _PADDING, kinds[i] == _START
        step, slope = step_size(dts[i], bias, real, SOFTPLUS, CAREFUL)
        h = advance(h, step, step * xs[i], A, tl.load(BC + i * 2 * STATES + n), start, CAREFUL)
        states += (h,)
        steps += (step,)
        slopes += (slope,)
        g = gs[i]
        if HAS_Z:
            c = tl.load(BC + (i * 2 + 1) * STATES + n)
            value = tl.sum(h * c[None, :], axis=1) + skip * xs[i]
            s = silu_parts(zs[i])
            gate_slope = g * value * s * (1.0 + zs[i] * (1.0 - s))
            if CAREFUL:
                gate_slope = tl.where(real, gate_slope, 0.0)
            dzs += (gate_slope,)
            g = g * zs[i] * s
        outer += (g,)
    if HAS_Z:
        for i in tl.static_range(GROUP):
            write_row(dz + i * dims, channels, dims, dzs[i], t + i < length, EVEN, CAREFUL)
    return states, steps, slopes, outer, xs, kinds


@triton.jit
def backward_group(
    carry, dA, dD, dbias, h, x, dt, z, dy, dx, ddt, dz, BC, dBC, codes, t, x_token, dt_token, z_token,
    A, skip, bias, channels, dims, length,
    STATES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr,
    NEED_A: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A group of tokens backwards, from the state h before it. Pointers are at its first token.

    With g the gradient by C h + D x and `carry` that by the state: carry += g C; then dC = g h, dB = carry step x,
    each summed over channels; carry *= exp(step A) takes it to the state before.
    """
    n = tl.arange(0, STATES)
    states, steps, slopes, outer, xs, kinds = recompute_group(
        h, x, dt, z, dy, dz, BC, codes, t, x_token, dt_token, z_token, A, skip, bias, channels, dims, length,
        STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, CAREFUL,
    )  # fmt: skip
    for i in tl.static_range(GROUP - 1, -1, -1):
        real, start, before = True, False, states[i]
        if CAREFUL:
            real, start = kinds[i] != _PADDING, kinds[i] == _START
            before = tl.where(start, 0.0, before)
        b = tl.load(BC + i * 2 * STATES + n)
        c = tl.load(BC + (i * 2 + 1) * STATES + n)
        g, step = outer[i], steps[i]
        carry += g[:, None] * c[None, :]
        through_b = tl.sum(carry * b[None, :], axis=1)
        by_b = tl.sum(carry * (step * xs[i])[:, None], axis=0)
        by_c = tl.sum(g[:, None] * states[i + 1], axis=0)
        if CAREFUL:  # a state that is not finite does not reach padding
            by_b = tl.where(real, by_b, 0.0)
            by_c = tl.where(real, by_c, 0.0)
        tl.store(dBC + i * 2 * STATES + n, by_b)
        tl.store(dBC + (i * 2 + 1) * STATES + n, by_c)
        carry *= tl.exp2(step[:, None] * A)
        change = carry * before
        by_step = xs[i] * through_b + tl.sum(change * A, axis=1) * _LN_2
        if NEED_A:
            dA += change * step[:, None]
        dD += g * xs[i]
        by_dt = by_step * slopes[i]
        by_x = skip * g + step * through_b
        if CAREFUL:
            by_dt = tl.where(real, by_dt, 0.0)
            by_x = tl.where(real, by_x, 0.0)
            carry = tl.where(start, 0.0, carry)
        dbias += by_dt
        write_row(dx + i * dims, channels, dims, by_x, t + i < length, EVEN, CAREFUL)
        write_row(ddt + i * dims, channels, dims, by_dt, t + i < length, EVEN, CAREFUL)
    return carry, dA, dD, dbias


@triton.jit(do_not_specialize=["length", "padded", "pieces", "piece_tokens", "segments", "unit"])
def backward_kernel(
    x, dt, z, dy, A, BC, D, bias, codes, flags, kept, last, scratch,
    dx, ddt, dz, dBC, dA, dD, dbias, dfirst,
    dims, length, padded, pieces, piece_tokens, segments, unit, x_row, x_token, dt_row, dt_token, z_row, z_token,
    STATES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
    EVEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    NEED_A: tl.constexpr, HAS_CODES: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """All gradients, from the states kept by the forward pass and the gradient by the state after each piece (last).

    Grid: (blocks of channels, pieces, batch). dBC: (blocks, batch, padded, 2, STATES); dA: (batch, pieces, STATES,
    dims); dD, dbias: (batch, pieces, dims): to be summed. dfirst: the gradient by the state before the row.
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    place = row * pieces + piece
    inside = channels < dims
    n = tl.arange(0, STATES)
    tile = n[None, :] * dims + channels[:, None] * (1 if SPREAD else unit)
    mine = n[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None] * (1 if SPREAD else unit)
    log_decay = tl.load(A + tile, mask=inside[:, None], other=0.0) * _LOG2_E
    skip = tl.load(D + channels, mask=inside, other=0.0) if HAS_D else tl.zeros([BLOCK], tl.float32)
    shift = tl.load(bias + channels, mask=inside, other=0.0) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    carry = tl.load(last + place * STATES * dims + tile, mask=inside[:, None], other=0.0)
    sum_A = tl.zeros([BLOCK, STATES], tl.float32)
    sum_D = tl.zeros([BLOCK], tl.float32)
    sum_bias = tl.zeros([BLOCK], tl.float32)
    scratch += (place * tl.num_programs(0) + tl.program_id(0)) * (SEGMENT // GROUP) * STATES * BLOCK
    begin = piece * piece_tokens
    in_piece = tl.minimum(piece_tokens, padded - begin)
    rounds = tl.cdiv(in_piece, SEGMENT)
    for round in range(rounds):
        first = (rounds - 1 - round) * SEGMENT  # of the segment, within the piece
        groups = tl.minimum(SEGMENT, in_piece - first) // GROUP
        at = (begin + first).to(tl.int64)
        h = tl.load(kept + (row * segments + at // SEGMENT) * STATES * dims + tile, mask=inside[:, None], other=0.0)
        x_at, dt_at = x + row * x_row + at * x_token, dt + row * dt_row + at * dt_token
        z_at, dy_at = z + row * z_row + at * z_token, dy + (row * length + at) * dims
        BC_at, codes_at = BC + (row * padded + at) * 2 * STATES, codes + row * padded + at
        flags_at = flags + (row * padded + at) // FLAGGED
        for group in range(groups - 1):
            tl.store(scratch + group * STATES * BLOCK + mine, h)
            careful = tl.load(flags_at + group * GROUP // FLAGGED) != 0 if HAS_CODES else False
            by = group * GROUP
            if careful:
                h, _ = advance_group(
                    h, sum_D, x_at + by * x_token, dt_at + by * dt_token, BC_at + by * 2 * STATES, codes_at + by,
                    x_token, dt_token, log_decay, shift, channels, dims, STATES, GROUP, EVEN, SOFTPLUS, True,
                )  # fmt: skip
            else:
                h, _ = advance_group(
                    h, sum_D, x_at + by * x_token, dt_at + by * dt_token, BC_at + by * 2 * STATES, codes_at + by,
                    x_token, dt_token, log_decay, shift, channels, dims, STATES, GROUP, EVEN, SOFTPLUS, False,
                )  # fmt: skip
        out = (row * length + at) * dims
        dBC_at = dBC + ((tl.program_id(0).to(tl.int64) * tl.num_programs(2) + row) * padded + at) * 2 * STATES
        for turn in range(groups):
            group = groups - 1 - turn
            if turn > 0:
                h = tl.load(scratch + group * STATES * BLOCK + mine)
            by = group * GROUP
            careful = tl.load(flags_at + group * GROUP // FLAGGED) != 0 if HAS_CODES else False
            if careful:
                carry, sum_A, sum_D, sum_bias = backward_group(
                    carry, sum_A, sum_D, sum_bias, h, x_at + by * x_token, dt_at + by * dt_token, z_at + by * z_token,
                    dy_at + by * dims, dx + out + by * dims, ddt + out + by * dims, dz + out + by * dims,
                    BC_at + by * 2 * STATES, dBC_at + by * 2 * STATES, codes_at + by, begin + first + by,
                    x_token, dt_token, z_token, log_decay, skip, shift, channels, dims, length,
                    STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, NEED_A, True,
                )  # fmt: skip
            else:
                carry, sum_A, sum_D, sum_bias = backward_group(
                    carry, sum_A, sum_D, sum_bias, h, x_at + by * x_token, dt_at + by * dt_token, z_at + by * z_token,
                    dy_at + by * dims, dx + out + by * dims, ddt + out + by * dims, dz + out + by * dims,
                    BC_at + by * 2 * STATES, dBC_at + by * 2 * STATES, codes_at + by, begin + first + by,
                    x_token, dt_token, z_token, log_decay, skip, shift, channels, dims, length,
                    STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, NEED_A, False,
                )  # fmt: skip
    if NEED_A:
        tl.store(dA + place * STATES * dims + tile, sum_A, mask=inside[:, None])
    tl.store(dD + place * dims + channels, sum_D, mask=inside)
    tl.store(dbias + place * dims + channels, sum_bias, mask=inside)
    if piece == 0:
        tl.store(dfirst + row * STATES * dims + tile, carry, mask=inside[:, None])
