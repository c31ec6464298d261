"""Mamba-2's scan as compiled loops over tokens, forward and backward, in float32.

One call does one row of the batch and a range of heads, as in `cpu_loops.py`, whose notes hold here too. The
recurrence is followed token by token: a head's state, (head_dim, state), stays in the nearest cache, and the
innermost loops run over the state. There are no sums of logarithms of decays over a chunk, whose differences lose
digits when a head forgets fast.

Every array is float32 and C-contiguous, `marks` int8. Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray as Array

from ssm_tune.kernels.cpu_loops import PADDING, STARTS
from ssm_tune.kernels.cpu_math import compiled, exp

_ZERO = np.float32(0.0)


@compiled
def ssd_segment_length(head_dim: int, states: int) -> int:
    """Tokens between two kept states: as many as let a head's recomputed states stay in half a megabyte."""
    return min(64, max(4, 131072 // (head_dim * states)))


@compiled
def ssd_forward(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    marks: Array,
    keep: bool,
    initial_state: Array,
    out: Array,
    final_state: Array,
    kept: Array,
    first: int,
    last: int,
) -> None:
    """Heads `first` to `last` of one row; fills out, final_state, and kept when `keep` is set.

    x, out (length, heads, head_dim); dt (length, heads), as the recurrence uses it; A (heads); B, C (length, groups,
    state); D (heads, head_dim); marks (length); initial_state, final_state (heads, head_dim, state); kept (segments,
    ... the same).
    """
    length, heads, head_dim = x.shape
    groups, states = B.shape[1:]
    segment = ssd_segment_length(head_dim, states)
    state = np.empty((head_dim, states), np.float32)
    for head in range(first, last):
        group = head // (heads // groups)
        state[:] = initial_state[head]
        for t in range(length):
            if keep and t % segment == 0:
                kept[t // segment, head] = state
            if marks[t] == PADDING:
                out[t, head] = _ZERO
                continue
            if marks[t] == STARTS:
                state[:] = _ZERO
            step = dt[t, head]
            _advance_head(exp(step * A[head]), step, x[t, head], B[t, group], C[t, group], D[head], state, out[t, head])
        final_state[head] = state


@compiled
def _advance_head(decay: float, step: float, x: Array, B: Array, C: Array, D: Array, state: Array, y: Array) -> None:
    """One token of one head: h = decay h + step x B^T, y = h C + D x."""
    for p in range(x.shape[0]):
        entering, total = step * x[p], _ZERO
        for n in range(B.shape[0]):
            after = decay * state[p, n] + entering * B[n]
            state[p, n] = after
            total += after * C[n]
        y[p] = total + D[p] * x[p]


@compiled
def ssd_backward(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    marks: Array,
    kept: Array,
    grad_out: Array,
    grad_final_state: Array,
    grad_x: Array,
    grad_dt: Array,
    grad_A: Array,
    grad_B: Array,
    grad_C: Array,
    grad_D: Array,
    grad_initial_state: Array,
    first: int,
    last: int,
) -> None:
    """Gradients of `ssd_forward` for the same row and heads, from those of out and of the final state.

    grad_A (heads), grad_B, grad_C (length, groups, state) and grad_D (heads, head_dim) are added to: ranges of heads
    that run at the same time need a grad_B and a grad_C each. The others are written.
    """
    length, heads, head_dim = x.shape
    groups, states = B.shape[1:]
    segment = ssd_segment_length(head_dim, states)
    history = np.empty((segment + 1, head_dim, states), np.float32)
    grad_state = np.empty((head_dim, states), np.float32)
    for head in range(first, last):
        group = head // (heads // groups)
        grad_state[:] = grad_final_state[head]
        for t0 in range((length - 1) // segment * segment, -1, -segment):
            t1 = min(length, t0 + segment)
            history[0] = kept[t0 // segment, head]
            for t in range(t0, t1):
                _recall(t, head, group, x, dt, A, B, marks, history[t - t0], history[t - t0 + 1])
            for t in range(t1 - 1, t0 - 1, -1):
                if marks[t] == PADDING:
                    grad_x[t, head] = _ZERO
                    grad_dt[t, head] = _ZERO
                    continue
                step = dt[t, head]
                decay = exp(step * A[head])
                by_decay, by_step = _go_back_head(
                    decay, step, x[t, head], B[t, group], C[t, group], D[head], grad_out[t, head],
                    history[t - t0], history[t - t0 + 1], grad_state,
                    grad_x[t, head], grad_B[t, group], grad_C[t, group], grad_D[head],
                )  # fmt: skip
                if marks[t] == STARTS:
                    # The state before is another document's: it did not decay into this one, and gets no gradient.
                    by_decay = _ZERO
                    grad_state[:] = _ZERO
                grad_dt[t, head] = by_decay * decay * A[head] + by_step
                grad_A[head] += by_decay * decay * step
        grad_initial_state[head] = grad_state


@compiled
def _recall(
    t: int, head: int, group: int, x: Array, dt: Array, A: Array, B: Array, marks: Array, before: Array, after: Array
) -> None:
    """The state after token t from the one before it."""
    if marks[t] == STARTS:
        after[:] = _ZERO
    else:
        after[:] = before
    if marks[t] == PADDING:
        return
    step = dt[t, head]
    decay = exp(step * A[head])
    values, keys = x[t, head], B[t, group]
    for p in range(values.shape[0]):
        entering = step * values[p]
        for n in range(keys.shape[0]):
            after[p, n] = decay * after[p, n] + entering * keys[n]


@compiled
def _go_back_head(
    decay: float, step: float, x: Array, B: Array, C: Array, D: Array, grad_y: Array, before: Array, after: Array,
    grad_state: Array, grad_x: Array, grad_B: Array, grad_C: Array, grad_D: Array,
) -> tuple[float, float]:  # fmt: skip
    """One token of one head backward; returns the gradients by the decay and by the step where it multiplies x.

    Turns grad_state, the gradient of the state after the token, into that of the state before it.
    """
    by_decay, by_step = _ZERO, _ZERO
    for p in range(x.shape[0]):
        slope, entering, by_entering = grad_y[p], step * x[p], _ZERO
        for n in range(B.shape[0]):
            grad_C[n] += slope * after[p, n]
        for n in range(B.shape[0]):
            grad_h = grad_state[p, n] + slope * C[n]
            grad_B[n] += grad_h * entering
            by_entering += grad_h * B[n]
            by_decay += grad_h * before[p, n]
            grad_state[p, n] = grad_h * decay
        by_step += by_entering * x[p]
        grad_x[p] = by_entering * step + slope * D[p]
        grad_D[p] += slope * x[p]
    return by_decay, by_step
