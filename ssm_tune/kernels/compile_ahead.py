"""Triton's kernels compiled side by side on all cores.

Triton compiles a kernel at its first call, one after the other, while the GPU and all cores but one wait: Mamba-2's
scan has some twenty, each in a dozen configurations that are timed. Triton from 3.6 on can compile in a pool of threads
(`AsyncCompileMode`); with an older one, or a single core, everything here does nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any


def compiling_threads() -> int:
    """How many kernels are compiled at a time in this process: its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


class _Running:
    """How many wish that kernels run, although somebody round them only compiles."""

    depth = 0


_running = _Running()


@contextmanager
def running() -> Iterator[None]:
    """Inside, kernels run as ever: for what reads results within `compiling_only`, as a backend's first trial does."""
    _running.depth += 1
    try:
        yield
    finally:
        _running.depth -= 1


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, every Triton kernel that is called is compiled and not run; on leaving, all of them are ready.

    For calls whose results nobody reads: outputs hold what the memory held. What cannot be compiled raises nothing
    here, and its own error at its next call.
    """
    threads = compiling_threads()
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        threads = 1
    if threads == 1:
        yield
        return
    run, lock = JITFunction.run, threading.Lock()
    with ThreadPoolExecutor(threads, "ssm-tune-compile") as executor:
        mode = AsyncCompileMode(executor, ignore_errors=True)

        def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if _running.depth:
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            # Set in whatever thread this is: autograd calls the kernels of a backward pass in one of its own.
            with lock:
                token = active_mode.set(mode)
                try:
                    run(self, *args, grid=grid, warmup=True, **kwargs)
                finally:
                    active_mode.reset(token)
            return None

        JITFunction.run = compile_it
        try:
            yield
        finally:
            JITFunction.run = run
            with mode:  # which waits for all of them on leaving
                pass


def compile_configurations(tuner: Any, configurations: Sequence[Any], keywords: dict[str, Any]) -> None:
    """Compile a kernel that Triton's `Autotuner` is about to time in all of these configurations.

    keywords: those of the call that it is tuned for; its other arguments are in `tuner.nargs`.
    """
    if not _is_compiled(tuner.fn):
        return
    with compiling_only():
        for configuration in configurations:
            # What does not compile is met again, and handled, when it is timed.
            with suppress(Exception):
                tuner.fn.run(*tuner.nargs.values(), **keywords, **configuration.all_kwargs())


def _is_compiled(function: Any) -> bool:
    """Not so in Triton's interpreter, which would run it."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return False
    while not isinstance(function, JITFunction) and hasattr(function, "fn"):
        function = function.fn
    return isinstance(function, JITFunction)
