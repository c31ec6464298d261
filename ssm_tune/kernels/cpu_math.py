"""Scalar functions for compiled loops in float32, written so that LLVM turns loops over them into vector code.

The maths library's own exp, log1p and tanh are calls that stop a loop from being vectorised, and exp is what a scan
spends its time on. These are polynomials: relative errors stay below 3e-7 (`tests/operations/test_cpu_math.py`). A NaN
stays a NaN. Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# "contract" allows fused multiply-add. "reassoc" is kept out of the functions below: it would fold the two parts of
# ln 2.
_EXACT = {"contract", "nsz"}
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# 2^k is a normal float32 between these: below, exp is 1.2e-38, above 1.6e38. Neither ever matters to a scan.
_LOWEST = np.float32(-87.3)
_HIGHEST = np.float32(87.6)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop at its first call, to run without the interpreter's lock; keep the code on disk where that can
    be done.

    Its sums may be reordered, which lets them be vectorised; NaN and infinity keep their meaning. Numba looks at the
    file that holds `function` to decide whether kept code is stale, not at the files of what it calls: whoever edits
    this module empties the `__pycache__` beside it.
    """
    loose = {"contract", "nsz", "arcp", "reassoc"}
    try:
        return njit(function, nogil=True, fastmath=loose, error_model="numpy", cache=True)
    except RuntimeError:  # "no locator available": neither the package's folder nor the user's cache can be written
        return njit(function, nogil=True, fastmath=loose, error_model="numpy")


@intrinsic
def _floor(typing_context: Any, x: Any) -> Any:
    """floor of a float32 as one machine instruction."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()]), arguments)

    return types.float32(types.float32), emit


@intrinsic
def _float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are those of an int32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@njit(fastmath=_EXACT, error_model="numpy")
def exp(x: float) -> float:
    """e^x = 2^k e^r with |r| <= ln(2) / 2: e^r by a polynomial of degree 6, 2^k by writing its exponent."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    k = _floor(x * _LOG2_E + _HALF)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.float32(1.38638e-3)
    p = p * r + np.float32(8.36748e-3)
    p = p * r + np.float32(4.166724e-2)
    p = p * r + np.float32(1.6666534e-1)
    p = p * r + _HALF
    # 1 is added last: r + r^2 p is small, so that its rounding errors are small against the sum.
    p = (r * r * p + r) + _ONE
    return p * _float_from_bits((np.int32(k) + np.int32(127)) << np.int32(23))


@njit(fastmath=_EXACT, error_model="numpy")
def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp(-x))


@njit(fastmath=_EXACT, error_model="numpy")
def softplus(x: float) -> float:
    """log(1 + e^x) = max(x, 0) + 2 artanh(u / (2 + u)) with u = e^-|x|: no cancellation at either end."""
    u = exp(-abs(x))
    s = u / (_TWO + u)
    q = s * s
    p = np.float32(1.0 / 15.0)
    p = p * q + np.float32(1.0 / 13.0)
    p = p * q + np.float32(1.0 / 11.0)
    p = p * q + np.float32(1.0 / 9.0)
    p = p * q + np.float32(1.0 / 7.0)
    p = p * q + np.float32(1.0 / 5.0)
    p = p * q + np.float32(1.0 / 3.0)
    p = p * q + _ONE
    return (x if x > _ZERO else _ZERO) + _TWO * s * p
