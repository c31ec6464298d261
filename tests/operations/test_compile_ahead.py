"""Triton's kernels are compiled side by side, and not run, for a GPU that need not be there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssm_tune.kernels import compile_ahead
from ssm_tune.kernels.compile_ahead import compile_configurations, compiling_only, running

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytest.importorskip("triton.runtime._async_compile")
compiler = pytest.importorskip("triton.backends.compiler")


class Driver:
    """A Hopper GPU that can compile and nothing else."""

    def get_current_target(self) -> Any:
        return compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def _double(x, y, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, 2 * tl.load(x + place, mask=place < size), mask=place < size)


@triton.jit
def _wrong(x, y, size, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 3)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "compiling_threads", lambda: 4)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    _double.device_caches.clear()
    yield
    _double.device_caches.clear()


def compiled(function: Any) -> int:
    return len(function.device_caches[0][0])


def test_what_is_called_is_compiled_and_not_run() -> None:
    x, y = torch.ones(8), torch.zeros(8)
    with compiling_only():
        for block in (8, 16, 32):
            _double[(1,)](x, y, 8, BLOCK=block)
    assert compiled(_double) == 3
    assert y.sum() == 0
    for kernel in _double.device_caches[0][0].values():
        assert "cubin" in kernel.asm


def test_another_thread_is_served_too() -> None:
    """As autograd's, in which backward passes run."""
    x = torch.ones(8)
    with compiling_only():
        thread = threading.Thread(target=lambda: _double[(1,)](x, x, 8, BLOCK=64))
        thread.start()
        thread.join()
    assert compiled(_double) == 1


def test_what_does_not_compile_stops_nothing_and_is_put_back() -> None:
    before = triton.runtime.jit.JITFunction.run
    x = torch.ones(8)
    with compiling_only():
        _wrong[(1,)](x, x, 8, BLOCK=4)
        _double[(1,)](x, x, 8, BLOCK=8)
    assert compiled(_double) == 1
    assert triton.runtime.jit.JITFunction.run is before


def test_every_configuration_of_a_tuned_kernel() -> None:
    configurations = [triton.Config({"BLOCK": block}) for block in (8, 16, 32, 64)]
    tuner = triton.autotune(configurations, key=["size"])(_double)
    x = torch.ones(8)
    tuner.nargs = {"x": x, "y": x, "size": 8}
    compile_configurations(tuner, configurations, {"grid": (1,), "warmup": False})
    assert compiled(_double) == 4


def test_what_has_to_run_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda self, *args, warmup, **kwargs: called.append(warmup)
    )
    x = torch.ones(8)
    with compiling_only():
        _double[(1,)](x, x, 8, BLOCK=8)
        with running():
            _double[(1,)](x, x, 8, BLOCK=8)
        _double[(1,)](x, x, 8, BLOCK=8)
    assert called == [True, False, True]


def test_one_core_compiles_when_a_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "compiling_threads", lambda: 1)
    before = triton.runtime.jit.JITFunction.run
    with compiling_only():
        assert triton.runtime.jit.JITFunction.run is before


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    alone = compile_ahead.compiling_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert compile_ahead.compiling_threads() == max(1, alone // 2)
