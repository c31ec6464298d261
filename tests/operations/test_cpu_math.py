"""Scalar functions of the compiled loops: their error, their edges, and that loops over them become vector code."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from ssm_tune.kernels import cpu_math

# The function, the truth, and the largest relative error.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "exp": (cpu_math.exp, np.exp, 1e-7),
    "sigmoid": (cpu_math.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 2e-7),
    "softplus": (cpu_math.softplus, lambda x: np.logaddexp(0, x), 3e-7),
}


def loop_over(function: Callable[..., Any]) -> Callable[..., Any]:
    @njit
    def loop(values: np.ndarray, results: np.ndarray) -> None:
        for i in range(values.size):
            results[i] = function(values[i])

    return loop


@pytest.mark.parametrize("name", FUNCTIONS)
def test_relative_error(name: str) -> None:
    function, truth, largest = FUNCTIONS[name]
    values = np.concatenate([np.linspace(-87, 87, 200_001), np.linspace(-1, 1, 200_001)]).astype(np.float32)
    results = np.empty_like(values)
    loop_over(function)(values, results)
    expected = truth(values.astype(np.float64))
    assert np.max(np.abs(results - expected) / expected) < largest


def test_beyond_the_range_of_float32() -> None:
    exp, softplus = cpu_math.exp, cpu_math.softplus
    assert 0 <= exp(np.float32(-1e30)) < 2e-38
    assert 0 <= exp(np.float32(-np.inf)) < 2e-38
    assert exp(np.float32(1e30)) > 1e38
    assert exp(np.float32(0)) == 1
    assert softplus(np.float32(1e30)) == np.float32(1e30)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_stays_a_nan(name: str) -> None:
    assert np.isnan(FUNCTIONS[name][0](np.float32(np.nan)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86-64")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loops_become_vector_code(name: str) -> None:
    loop = loop_over(FUNCTIONS[name][0])
    loop(np.zeros(1, np.float32), np.zeros(1, np.float32))
    (assembly,) = loop.inspect_asm().values()
    lines = assembly.splitlines()
    packed = sum("mulps" in line or ("fmadd" in line and "ps" in line) for line in lines)
    assert packed >= 4


def test_compiling_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit_on_a_read_only_disk(
        function: Callable[..., Any], cache: bool = False, **options: Any
    ) -> Callable[..., Any]:
        if cache:
            raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available for file")
        return njit(function, **options)

    monkeypatch.setattr(cpu_math, "njit", njit_on_a_read_only_disk)
    assert cpu_math.compiled(lambda x: x + 1)(2) == 3
