"""Mamba-1's selective scan as compiled loops over tokens, forward and backward, in float32.

One call does one row of the batch and a range of channels, without the interpreter's lock, so that threads can share
the work (`cpu_scan.py`). Channels go in blocks of BLOCK and tokens in segments. The innermost loops run over the
channels of a block, side by side in memory, which LLVM vectorises; the state of a block, (state, BLOCK), stays in the
nearest cache from the first token to the last. Nothing of size length x channels x state ever exists: the forward
keeps the state before every segment, and the backward recomputes the states of one segment at a time, last segment
first (Mamba, section 3.3.2).

Two habits below are for the vectoriser. Channels are counted in unsigned integers: a signed index into a whole row
would be tested for being negative, and a loop with such tests is not vectorised. And a loop writes to few arrays: it
is vectorised only while testing that they do not overlap stays cheap.

The first call compiles, 5 to 10 s for all loops of one operation; later processes read the code from disk. Every
array is float32 and C-contiguous, `marks` int8. Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray as Array

from ssm_tune.kernels.cpu_math import compiled, exp, sigmoid, softplus
from ssm_tune.kernels.cpu_threads import BLOCK

CONTINUES, STARTS, PADDING = 0, 1, 2
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def segment_length(states: int) -> int:
    """Tokens between two kept states: as many as let the recomputed states of a block stay in a core's second cache."""
    return min(64, max(8, 256 // states))


@compiled
def scan_forward(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    z: Array,
    dt_bias: Array,
    marks: Array,
    dt_softplus: bool,
    gated: bool,
    keep: bool,
    initial_state: Array,
    out: Array,
    final_state: Array,
    kept: Array,
    first: int,
    last: int,
) -> None:
    """Channels `first` to `last` of one row; fills out, final_state, and kept when `keep` is set.

    x, dt, z, out (length, dim), z (0, dim) unless `gated`; B, C (length, state); A, initial_state, final_state (dim,
    state); D, dt_bias (dim); marks (length): CONTINUES, STARTS (from a zero state) or PADDING; kept (segments, state,
    dim).
    """
    length, states = B.shape
    segment = segment_length(states)
    A_block = np.empty((states, BLOCK), np.float32)
    state = np.empty((states, BLOCK), np.float32)
    time_step = np.empty((segment, BLOCK), np.float32)
    entering = np.empty((segment, BLOCK), np.float32)
    y = np.empty((segment, BLOCK), np.float32)
    for start in range(first, last, BLOCK):
        channels = min(BLOCK, last - start)
        _take_block(A, A_block, start, channels)
        _take_block(initial_state, state, start, channels)
        for t0 in range(0, length, segment):
            t1 = min(length, t0 + segment)
            if keep:
                kept[t0 // segment, :, start : start + channels] = state[:, :channels]
            _enter(t0, t1, start, channels, x, dt, D, dt_bias, dt_softplus, time_step, entering, y)
            _advance(t0, t1, channels, A_block, B, C, marks, time_step, entering, state, y)
            if gated:
                _gate(t0, t1, start, channels, z, y)
            _leave(t0, t1, start, channels, marks, y, out)
        _give_block(state, final_state, start, channels)


@compiled
def _take_block(source: Array, target: Array, start: int, channels: int) -> None:
    """target (state, BLOCK) = the block's rows of source (dim, state), turned."""
    for n in range(source.shape[1]):
        for i in range(channels):
            target[n, i] = source[start + i, n]


@compiled
def _give_block(source: Array, target: Array, start: int, channels: int) -> None:
    """The opposite of `_take_block`."""
    for n in range(target.shape[1]):
        for i in range(channels):
            target[start + i, n] = source[n, i]


@compiled
def _enter(
    t0: int, t1: int, start: int, channels: int, x: Array, dt: Array, D: Array, dt_bias: Array, dt_softplus: bool,
    time_step: Array, entering: Array, y: Array,
) -> None:  # fmt: skip
    """What tokens bring, before any state: the time step, time step * x, and D * x, their output so far."""
    c, width = np.uintp(start), np.uintp(channels)
    for t in range(t0, t1):
        s = t - t0
        if dt_softplus:
            for i in range(width):
                time_step[s, i] = softplus(dt[t, c + i] + dt_bias[c + i])
        else:
            for i in range(width):
                time_step[s, i] = dt[t, c + i] + dt_bias[c + i]
        for i in range(width):
            entering[s, i] = time_step[s, i] * x[t, c + i]
            y[s, i] = D[c + i] * x[t, c + i]


@compiled
def _advance(
    t0: int, t1: int, channels: int, A: Array, B: Array, C: Array, marks: Array, time_step: Array, entering: Array,
    state: Array, y: Array,
) -> None:  # fmt: skip
    """The recurrence: h = exp(dt A) h + dt x B, and y += h C."""
    width = np.uintp(channels)
    for t in range(t0, t1):
        s = t - t0
        if marks[t] == PADDING:
            continue
        if marks[t] == STARTS:
            state[:] = _ZERO
        for n in range(B.shape[1]):
            B_n, C_n = B[t, n], C[t, n]
            for i in range(width):
                after = exp(time_step[s, i] * A[n, i]) * state[n, i] + entering[s, i] * B_n
                state[n, i] = after
                y[s, i] += after * C_n


@compiled
def _gate(t0: int, t1: int, start: int, channels: int, z: Array, y: Array) -> None:
    """y * silu(z), in place."""
    c, width = np.uintp(start), np.uintp(channels)
    for t in range(t0, t1):
        for i in range(width):
            y[t - t0, i] *= z[t, c + i] * sigmoid(z[t, c + i])


@compiled
def _leave(t0: int, t1: int, start: int, channels: int, marks: Array, block: Array, whole: Array) -> None:
    """The block's values to the rows they belong in, zero where there is padding."""
    c, width = np.uintp(start), np.uintp(channels)
    for t in range(t0, t1):
        if marks[t] == PADDING:
            for i in range(width):
                whole[t, c + i] = _ZERO
        else:
            for i in range(width):
                whole[t, c + i] = block[t - t0, i]


@compiled
def scan_backward(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    z: Array,
    dt_bias: Array,
    marks: Array,
    dt_softplus: bool,
    gated: bool,
    kept: Array,
    grad_out: Array,
    grad_final_state: Array,
    grad_x: Array,
    grad_dt: Array,
    grad_z: Array,
    grad_A: Array,
    grad_B: Array,
    grad_C: Array,
    grad_D: Array,
    grad_dt_bias: Array,
    grad_initial_state: Array,
    first: int,
    last: int,
) -> None:
    """Gradients of `scan_forward` for the same row and channels, from those of out and of the final state.

    grad_B, grad_C (length, state), grad_D and grad_dt_bias (dim) are added to: ranges of channels that run at the
    same time need a grad_B and a grad_C each. The others are written.
    """
    length, states = B.shape
    segment = segment_length(states)
    A_block = np.empty((states, BLOCK), np.float32)
    state = np.empty((states, BLOCK), np.float32)
    grad_state = np.empty((states, BLOCK), np.float32)
    grad_A_block = np.zeros((states, BLOCK), np.float32)
    decay = np.empty((segment, states, BLOCK), np.float32)
    decayed = np.empty((segment, states, BLOCK), np.float32)
    time_step = np.empty((segment, BLOCK), np.float32)
    entering = np.empty((segment, BLOCK), np.float32)
    y = np.empty((segment, BLOCK), np.float32)
    grad_y = np.empty((segment, BLOCK), np.float32)
    grad_entering = np.empty((segment, BLOCK), np.float32)
    grad_time_step = np.empty((segment, BLOCK), np.float32)
    for start in range(first, last, BLOCK):
        channels = min(BLOCK, last - start)
        _take_block(A, A_block, start, channels)
        _take_block(grad_final_state, grad_state, start, channels)
        grad_A_block[:] = _ZERO
        for t0 in range((length - 1) // segment * segment, -1, -segment):
            t1 = min(length, t0 + segment)
            state[:, :channels] = kept[t0 // segment, :, start : start + channels]
            grad_y[: t1 - t0, :channels] = grad_out[t0:t1, start : start + channels]
            _enter(t0, t1, start, channels, x, dt, D, dt_bias, dt_softplus, time_step, entering, y)
            if gated:
                _gate(t0, t1, start, channels, z, grad_y)
            _recompute(
                t0, t1, channels, A_block, B, C, marks, time_step, entering, state, y, grad_y, decay, decayed, grad_C
            )
            if gated:
                _gate_back(t0, t1, start, channels, z, y, grad_out)
                _leave(t0, t1, start, channels, marks, y, grad_z)
            _go_back(
                t0, t1, channels, A_block, B, C, marks, time_step, entering, grad_y, decay, decayed,
                grad_state, grad_A_block, grad_B, grad_entering, grad_time_step,
            )  # fmt: skip
            _enter_back(
                t0, t1, start, channels, x, dt, D, dt_bias, dt_softplus, marks, time_step, grad_y,
                grad_entering, grad_time_step, grad_D, grad_dt_bias,
            )  # fmt: skip
            _leave(t0, t1, start, channels, marks, grad_entering, grad_x)
            _leave(t0, t1, start, channels, marks, grad_time_step, grad_dt)
        _give_block(grad_A_block, grad_A, start, channels)
        _give_block(grad_state, grad_initial_state, start, channels)


@compiled
def _recompute(
    t0: int, t1: int, channels: int, A: Array, B: Array, C: Array, marks: Array, time_step: Array, entering: Array,
    state: Array, y: Array, grad_y: Array, decay: Array, decayed: Array, grad_C: Array,
) -> None:  # fmt: skip
    """`_advance` again, keeping exp(dt A) and exp(dt A) h; adds to grad_C, which needs the state after each token."""
    width = np.uintp(channels)
    for t in range(t0, t1):
        s = t - t0
        if marks[t] == PADDING:
            continue
        if marks[t] == STARTS:
            state[:] = _ZERO
        for n in range(B.shape[1]):
            B_n, C_n, grad_C_n = B[t, n], C[t, n], _ZERO
            for i in range(width):
                factor = exp(time_step[s, i] * A[n, i])
                before = factor * state[n, i]
                decay[s, n, i] = factor
                decayed[s, n, i] = before
                state[n, i] = before + entering[s, i] * B_n
            for i in range(width):
                y[s, i] += state[n, i] * C_n
                grad_C_n += grad_y[s, i] * state[n, i]
            grad_C[t, n] += grad_C_n


@compiled
def _gate_back(t0: int, t1: int, start: int, channels: int, z: Array, y: Array, grad_out: Array) -> None:
    """y becomes the gradient of y * silu(z) by z."""
    c, width = np.uintp(start), np.uintp(channels)
    for t in range(t0, t1):
        for i in range(width):
            gate = sigmoid(z[t, c + i])
            y[t - t0, i] *= grad_out[t, c + i] * gate * (_ONE + z[t, c + i] * (_ONE - gate))


@compiled
def _go_back(
    t0: int, t1: int, channels: int, A: Array, B: Array, C: Array, marks: Array, time_step: Array, entering: Array,
    grad_y: Array, decay: Array, decayed: Array, grad_state: Array, grad_A: Array, grad_B: Array,
    grad_entering: Array, grad_time_step: Array,
) -> None:  # fmt: skip
    """The recurrence backward: the gradient of the state after each token becomes that of the state before it."""
    width = np.uintp(channels)
    product = np.empty(BLOCK, np.float32)
    for t in range(t1 - 1, t0 - 1, -1):
        s = t - t0
        grad_entering[s] = _ZERO
        grad_time_step[s] = _ZERO
        if marks[t] == PADDING:
            continue
        for n in range(B.shape[1]):
            B_n, C_n, grad_B_n = B[t, n], C[t, n], _ZERO
            for i in range(width):
                grad_h = grad_state[n, i] + grad_y[s, i] * C_n
                grad_B_n += grad_h * entering[s, i]
                grad_entering[s, i] += grad_h * B_n
                product[i] = grad_h * decayed[s, n, i]
                grad_state[n, i] = grad_h * decay[s, n, i]
            for i in range(width):
                grad_A[n, i] += product[i] * time_step[s, i]
                grad_time_step[s, i] += product[i] * A[n, i]
            grad_B[t, n] += grad_B_n
        if marks[t] == STARTS:
            grad_state[:] = _ZERO


@compiled
def _enter_back(
    t0: int, t1: int, start: int, channels: int, x: Array, dt: Array, D: Array, dt_bias: Array, dt_softplus: bool,
    marks: Array, time_step: Array, grad_y: Array,
    grad_entering: Array, grad_time_step: Array, grad_D: Array, grad_dt_bias: Array,
) -> None:  # fmt: skip
    """The gradients by x and dt, left in grad_entering and grad_time_step; adds to those by D and dt_bias."""
    c, width = np.uintp(start), np.uintp(channels)
    for t in range(t0, t1):
        s = t - t0
        if marks[t] == PADDING:
            continue
        for i in range(width):
            grad_time_step[s, i] += grad_entering[s, i] * x[t, c + i]
        if dt_softplus:
            for i in range(width):
                grad_time_step[s, i] *= sigmoid(dt[t, c + i] + dt_bias[c + i])
        for i in range(width):
            grad_entering[s, i] = grad_entering[s, i] * time_step[s, i] + grad_y[s, i] * D[c + i]
        for i in range(width):
            grad_D[c + i] += grad_y[s, i] * x[t, c + i]
            grad_dt_bias[c + i] += grad_time_step[s, i]
