"""The causal convolution as compiled loops over tokens, forward and backward, in float32.

One call does one row of the batch and a range of channels, as in `cpu_loops.py`, whose notes hold here too. Every
array is float32 and C-contiguous; the weight comes turned, (width, dim), so that its channels lie side by side.
Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray as Array

from ssm_tune.kernels.cpu_math import compiled, sigmoid

_NOTHING = -1
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@compiled
def find_sources(starts: Array, padding: Array, width: int) -> Array:
    """(length + 1, width), int64: the rows in each token's window, itself first; -1 where there is none.

    Rows 0 to width - 2 are those of the state, token t is row t + width - 1. The last line is the window of a token
    that would follow. A padding token has an empty window. starts, padding (length): bool.
    """
    length = starts.shape[0]
    sources = np.full((length + 1, width), _NOTHING, np.int64)
    window = np.arange(width - 1)[::-1].copy()
    for t in range(length + 1):
        if t < length:
            if padding[t]:
                continue
            if starts[t]:
                window[:] = _NOTHING
            sources[t, 0] = t + width - 1
        sources[t, 1:] = window
        if width > 1:
            window[1:] = window[:-1].copy()
            window[0] = sources[t, 0]
    return sources


@compiled
def conv_forward(
    x: Array, state: Array, weight: Array, bias: Array, sources: Array, silu: bool, out: Array, first: int, last: int
) -> None:
    """Channels first to last of a row; x, out (length, dim), state (width - 1, dim), weight (width, dim)."""
    length, width = x.shape[0], weight.shape[0]
    c, channels = np.uintp(first), np.uintp(last - first)
    y = np.empty(last - first, np.float32)
    for t in range(length):
        _convolve(t, c, channels, width, x, state, weight, bias, sources, y)
        if sources[t, 0] == _NOTHING:
            y[:] = _ZERO
        elif silu:
            for i in range(channels):
                y[i] *= sigmoid(y[i])
        for i in range(channels):
            out[t, c + i] = y[i]


@compiled
def _convolve(
    t: int,
    c: int,
    channels: int,
    width: int,
    x: Array,
    state: Array,
    weight: Array,
    bias: Array,
    sources: Array,
    y: Array,
) -> None:
    """One token's output before the activation."""
    for i in range(channels):
        y[i] = bias[c + i]
    for back in range(width):
        source, tap = sources[t, back], width - 1 - back
        if source >= width - 1:
            row = source - (width - 1)
            for i in range(channels):
                y[i] += weight[tap, c + i] * x[row, c + i]
        elif source >= 0:
            for i in range(channels):
                y[i] += weight[tap, c + i] * state[source, c + i]


@compiled
def conv_backward(
    x: Array,
    state: Array,
    weight: Array,
    bias: Array,
    sources: Array,
    silu: bool,
    grad_out: Array,
    grad_x: Array,
    grad_state: Array,
    grad_weight: Array,
    grad_bias: Array,
    first: int,
    last: int,
) -> None:
    """Gradients of `conv_forward` for the same row and channels, all added to what is there."""
    length, width = x.shape[0], weight.shape[0]
    c, channels = np.uintp(first), np.uintp(last - first)
    y = np.empty(last - first, np.float32)
    for t in range(length):
        if sources[t, 0] == _NOTHING:
            continue
        if silu:
            _convolve(t, c, channels, width, x, state, weight, bias, sources, y)
            for i in range(channels):
                gate = sigmoid(y[i])
                y[i] = grad_out[t, c + i] * gate * (_ONE + y[i] * (_ONE - gate))
        else:
            for i in range(channels):
                y[i] = grad_out[t, c + i]
        for i in range(channels):
            grad_bias[c + i] += y[i]
        for back in range(width):
            source, tap = sources[t, back], width - 1 - back
            if source >= width - 1:
                row = source - (width - 1)
                for i in range(channels):
                    grad_weight[tap, c + i] += y[i] * x[row, c + i]
                    grad_x[row, c + i] += y[i] * weight[tap, c + i]
            elif source >= 0:
                for i in range(channels):
                    grad_weight[tap, c + i] += y[i] * state[source, c + i]
                    grad_state[source, c + i] += y[i] * weight[tap, c + i]
