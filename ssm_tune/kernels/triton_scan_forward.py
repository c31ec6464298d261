"""The forward pass of the Triton selective scan."""

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
    write_row,
)


@triton.jit
def forward_group(
    h, x, dt, z, y, BC, codes, t, x_token, dt_token, z_token, A, skip, bias, channels, dims, length,
    STATES: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    HAS_Z: tl.constexpr, SOFTPLUS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A group of tokens: the state after it; outputs are written. Pointers are at its first token."""
    n = tl.arange(0, STATES)
    xs, dts, zs, bs, cs, kinds, ys = (), (), (), (), (), (), ()
    for i in tl.static_range(GROUP):
        real = True
        if CAREFUL:
            kind = tl.load(codes + i)
            kinds += (kind,)
            real = kind != _PADDING
        xs += (read_row(x + i * x_token, channels, dims, real, EVEN, CAREFUL),)
        dts += (read_row(dt + i * dt_token, channels, dims, real, EVEN, CAREFUL),)
        if HAS_Z:
            zs += (read_row(z + i * z_token, channels, dims, real, EVEN, CAREFUL),)
        bs += (tl.load(BC + i * 2 * STATES + n),)
        cs += (tl.load(BC + (i * 2 + 1) * STATES + n),)
    for i in tl.static_range(GROUP):
        real, start = True, False
        if CAREFUL:
            real, start = kinds[i] != _PADDING, kinds[i] == _START
        step, _ = step_size(dts[i], bias, real, SOFTPLUS, CAREFUL)
        h = advance(h, step, step * xs[i], A, bs[i], start, CAREFUL)
        value = tl.sum(h * cs[i][None, :], axis=1) + skip * xs[i]
        if HAS_Z:
            value = value * zs[i] * silu_parts(zs[i])
        if CAREFUL:
            value = tl.where(real, value, 0.0)
        ys += (value,)
    # Stores come last: loads are not moved before a store, which might change what they read.
    for i in tl.static_range(GROUP):
        write_row(y + i * dims, channels, dims, ys[i], t + i < length, EVEN, CAREFUL)
    return h


@triton.jit(do_not_specialize=["length", "padded", "pieces", "piece_tokens", "segments", "unit"])
def forward_kernel(
    x, dt, z, A, BC, D, bias, codes, flags, first, y, kept, last,
    dims, length, padded, pieces, piece_tokens, segments, unit,
    x_row, x_token, dt_row, dt_token, z_row, z_token,
    STATES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
    EVEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_CODES: tl.constexpr, KEEP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """y, and the state at the start of every segment (kept) and after the row (last), from the state before each piece.

    Grid: (blocks of channels, pieces, batch).
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n = tl.arange(0, STATES)
    inside = channels < dims
    tile = n[None, :] * dims + channels[:, None] * (1 if SPREAD else unit)
    log_decay = tl.load(A + tile, mask=inside[:, None], other=0.0) * _LOG2_E
    skip = tl.load(D + channels, mask=inside, other=0.0) if HAS_D else tl.zeros([BLOCK], tl.float32)
    shift = tl.load(bias + channels, mask=inside, other=0.0) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    h = tl.load(first + (row * pieces + piece) * STATES * dims + tile, mask=inside[:, None], other=0.0)
    t = piece * piece_tokens
    at = t.to(tl.int64)
    x += row * x_row + at * x_token
    dt += row * dt_row + at * dt_token
    z += row * z_row + at * z_token
    y += (row * length + at) * dims
    BC += (row * padded + at) * 2 * STATES
    codes += row * padded + at
    flags += (row * padded + at) // FLAGGED
    kept += (row * segments + at // SEGMENT) * STATES * dims
    groups = tl.minimum(piece_tokens, padded - t) // GROUP
    for group in range(groups):
        if KEEP:  # noqa: SIM102  the outer one is decided at compile time
            if group % (SEGMENT // GROUP) == 0:
                tl.store(kept + tile, h, mask=inside[:, None])
                kept += STATES * dims
        careful = tl.load(flags + group * GROUP // FLAGGED) != 0 if HAS_CODES else False
        if careful:
            h = forward_group(
                h, x, dt, z, y, BC, codes, t, x_token, dt_token, z_token, log_decay, skip, shift, channels, dims,
                length, STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, True,
            )  # fmt: skip
        else:
            h = forward_group(
                h, x, dt, z, y, BC, codes, t, x_token, dt_token, z_token, log_decay, skip, shift, channels, dims,
                length, STATES, GROUP, EVEN, HAS_Z, SOFTPLUS, False,
            )  # fmt: skip
        x += GROUP * x_token
        dt += GROUP * dt_token
        z += GROUP * z_token
        y += GROUP * dims
        BC += GROUP * 2 * STATES
        codes += GROUP
        t += GROUP
    if piece == pieces - 1:
        tl.store(last + row * STATES * dims + tile, h, mask=inside[:, None])
