"""Triton's tuning: said when it happens, kept in a file of ours, and left out of trials.

mamba-ssm's Triton kernels are tuned when they first meet a shape: dozens of configurations are compiled and timed, a
minute or two in all, in every process again, since Triton's own cache of results leaves kernels out that have hooks
(these do). `keep_tuning` keeps what was chosen, by GPU, version of Triton, source of the kernel and shape.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ssm_tune.kernels.compile_ahead import compile_configurations, compiling_threads

logger = logging.getLogger(__name__)


@dataclass
class _Tuning:
    """One kernel that is being tuned for one shape."""

    kernel: str
    shape: str
    configurations: int
    begin: float
    timings: list[tuple[float, dict[str, Any]]] = field(default_factory=list)


class _State:
    """What was tuned in this process, and what the file holds."""

    def __init__(self) -> None:
        self.installed = False
        self.paused = 0
        self.file: Path | None = None
        self.kept: dict[str, dict[str, Any]] = {}  # by kernel and shape: the keywords of a configuration
        self.said = False
        self.kernels, self.seconds = 0, 0.0  # since `report_tuning` was last asked


_state = _State()


def tuning_folder() -> Path:
    """Where chosen configurations are kept: $SSM_TUNE_CACHE, else ssm-tune in the user's cache folder."""
    given = os.environ.get("SSM_TUNE_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssm-tune"
    return (Path(given).expanduser() if given else cache) / "triton-tuning"


def keep_tuning() -> None:
    """From here on, in this process, take configurations from the file, and add what Triton chooses. Once is enough.

    Costs nothing at a launch: only a kernel that meets a new shape is looked up. Without Triton it does nothing.
    """
    if _state.installed:
        return
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    _state.installed = True
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, kwargs: Any) -> list[Any]:
        configurations = prune(self, kwargs)
        self._ssm_tuning = None
        if _state.paused or len(configurations) < 2:
            return configurations
        kernel, shape = _name(self), _shape(self, kwargs)
        kept = _kept(kernel, shape)
        chosen = [c for c in configurations if c.all_kwargs() == kept]
        self._ssm_tuning = _Tuning(kernel, shape, len(chosen or configurations), time.monotonic())
        if not chosen:
            _say_that_it_tunes()
            compile_configurations(self, configurations, kwargs)
        return chosen or configurations

    def timed(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        tuning = self._ssm_tuning
        if tuning is not None and tuning.configurations == 1:
            return [0.0, 0.0, 0.0]  # known already
        timings = bench(self, *args, config=config, **meta)
        if tuning is not None:
            tuning.timings.append((timings[0], config.all_kwargs()))
            if len(tuning.timings) == tuning.configurations:
                _keep(tuning)
        return timings

    Autotuner._ssm_tuning = None
    Autotuner.prune_configs, Autotuner._bench = prune_configs, timed


def report_tuning() -> str:
    """What Triton has tuned since this was last asked, in a sentence; "" if nothing."""
    kernels, seconds = _state.kernels, _state.seconds
    _state.kernels, _state.seconds = 0, 0.0
    if not kernels:
        return ""
    kept = f"kept in {_state.file} for the next run" if _state.file is not None else "not kept: no file can be written"
    return f"Triton tuned {kernels} kernels in {seconds:.0f} s; {kept}."


def _name(tuner: Any) -> str:
    """The kernel's name, and a hash of its source and of what it calls."""
    function = tuner.fn
    while not hasattr(function, "cache_key"):
        function = function.fn
    return f"{function.__name__} {function.cache_key[:16]}"


def _shape(tuner: Any, kwargs: dict[str, Any]) -> str:
    """What Triton tunes for anew: the arguments that are its key, and the dtypes of all tensors."""
    given = {**tuner.nargs, **kwargs}
    arguments = {name: given[name] for name in given if name in tuner.arg_names}
    key = [str(arguments[name]) for name in tuner.keys if name in arguments]
    return ", ".join([*key, *(str(value.dtype) for value in arguments.values() if hasattr(value, "dtype"))])


def _kept(kernel: str, shape: str) -> dict[str, Any] | None:
    if _state.file is None:
        _state.file = _file()
        _state.kept = _read(_state.file)
    return _state.kept.get(f"{kernel}: {shape}")


def _file() -> Path:
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    name = f"{device} triton {triton.__version__}".lower().replace(" ", "-").replace("/", "-")
    return tuning_folder() / f"{name}.json"


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): Triton tunes its kernels again.", file, error)
        return {}
    return found if isinstance(found, dict) else {}


def _say_that_it_tunes() -> None:
    if not _state.said:
        _state.said = True
        logger.warning(
            "Triton is timing configurations of its kernels for these shapes, compiled on %d cores: ten seconds to two "
            "minutes in the first steps. What it chooses is kept in %s, so that the next run starts in seconds.",
            compiling_threads(),
            _state.file,
        )


def _keep(tuning: _Tuning) -> None:
    """Add what was chosen to the file, and what other processes have put there to what is known here."""
    _state.kernels += 1
    _state.seconds += time.monotonic() - tuning.begin
    chosen = min(tuning.timings, key=lambda timing: timing[0])[1]
    file = _state.file
    _state.kept = {**_read(file), **_state.kept, f"{tuning.kernel}: {tuning.shape}": chosen}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as scratch:
            json.dump(_state.kept, scratch, indent=0)
        Path(scratch.name).replace(file)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next run tunes again.", file, error)


def smallest(configurations: Sequence[Any]) -> Any:
    """Of Triton's configurations the one with the smallest blocks and fewest stages."""

    def size(configuration: Any) -> tuple[int, int]:
        values = [value for value in configuration.kwargs.values() if type(value) is int]
        return math.prod(values) * configuration.num_stages, configuration.num_warps

    return min(configurations, key=size)


@contextmanager
def without_tuning() -> Iterator[None]:
    """Inside, a Triton kernel that is tuned takes its smallest configuration: seconds instead of minutes.

    That one compiles fastest and fits into any card's shared memory; which is fastest says nothing of whether a kernel
    is right. It is forgotten on leaving, so that training tunes for itself. Without Triton it does nothing.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    prune, bench = Autotuner.prune_configs, Autotuner._bench
    known: dict[int, tuple[Any, set[Any]]] = {}

    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        known.setdefault(id(self), (self, set(self.cache)))
        return [smallest(prune(self, *args, **kwargs))]

    def not_timed(self: Any, *args: Any, **kwargs: Any) -> list[float]:
        return [0.0, 0.0, 0.0]  # there is no other

    Autotuner.prune_configs, Autotuner._bench = prune_configs, not_timed
    _state.paused += 1
    try:
        yield
    finally:
        _state.paused -= 1
        Autotuner.prune_configs, Autotuner._bench = prune, bench
        for tuner, before in known.values():
            for key in set(tuner.cache) - before:
                del tuner.cache[key]
