"""What is installed, what is chosen, why; said once.

Every operation has an ordered list of backends, each for some kinds of device. A backend is chosen for a device by
calling it there once, forward and backward, and comparing with the reference (`trials.py`): being importable proves
nothing. What failed is remembered with the error's own words. A call that a working backend cannot serve
(`Unsupported`) goes to the next.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels.backend_table import BACKENDS, OPERATIONS, SOURCES, Backend
from ssm_tune.kernels.tuning import keep_tuning

logger = logging.getLogger(__name__)


class KernelError(RuntimeError):
    """Kernels are required, and only a fallback can serve."""


class Unsupported(Exception):
    """Raised by a backend, before it does anything, for a call that it cannot serve; says why."""


@dataclass(frozen=True)
class KernelChoice:
    """What serves an operation on a device; why no earlier backend does ("" if it is the first); what that costs."""

    operation: str
    backend: str
    reason: str
    cost: str


# What a broken package or a missing device raises; a lack of memory is none of it and is passed on.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Unsupported,
)


class _Settings:
    """The one mutable thing here: the order asked for, what trials gave, what has been said."""

    def __init__(self) -> None:
        self.order: tuple[str, ...] = ()
        self.required = False
        self.trials: dict[tuple[Backend, str], str] = {}  # "" where the trial succeeded, else what went wrong
        self.lists: dict[tuple[str, str], tuple[Backend, ...]] = {}
        self.said: set[tuple[str, ...]] = set()
        self.record: list[KernelChoice] | None = None


_settings = _Settings()


def set_kernel_order(order: Sequence[str] | None, required: bool = False) -> None:
    """Prefer the backends named in `order`, by name or by source, over the others, in that order; None: the order of
    preference.

    With `required`, a call that only a slower backend can serve raises KernelError.

    Raises:
        ValueError: a name that no backend has; names the nearest.
    """
    names = kernel_names()
    for name in order or ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"kernels.order: {name!r} is not a backend.{hint} There are: {', '.join(names)}.")
    _settings.order, _settings.required = tuple(order or ()), required
    _settings.lists, _settings.said = {}, set()


def kernel_names() -> list[str]:
    """What an order may name: the sources, and every backend."""
    return [*SOURCES, *sorted({backend.name for backend in BACKENDS} - set(SOURCES))]


@torch.compiler.disable  # torch.compile cuts its graphs here: which backend serves is found by calling
def call(operation: str, *args: Any, **kwargs: Any) -> Any:
    """Run `operation` with the first backend that works on the device of its first argument and can serve the call."""
    device = args[0].device
    reasons: list[str] = []
    refused: set[str] = set()
    for backend in _candidates(operation, device.type):
        if backend.module in refused:  # the same kernel from the Hub: it cannot serve the call either
            continue
        failure = _failure(backend, device)
        if failure:
            reasons.append(f"{backend.name}: {failure}")
            continue
        if reasons:
            _announce(operation, device, backend, reasons)
        try:
            result = _function(backend)(*args, **kwargs)
        except Unsupported as refusal:
            reasons.append(f"{backend.name}: {refusal}")
            refused.add(backend.module)
            continue
        if _settings.record is not None:
            _settings.record.append(_choice(backend, reasons))
        return result
    raise KernelError(f"{operation} on {device}: no backend can serve this call. " + "; ".join(reasons))


def first_that_works(operation: str, device: torch.device, names: Sequence[str]) -> str | None:
    """Of the backends of these names the preferred one that works on `device`: for what is made of several of them."""
    for backend in _candidates(operation, device.type):
        if backend.name in names and not _failure(backend, device):
            return backend.name
    return None


def kernel_report(device: torch.device | str, operations: Sequence[str] = OPERATIONS) -> list[KernelChoice]:
    """What serves each of `operations` on `device`, after trying; a call that a backend cannot serve goes to the next.

    A first trial compiles the kernel, which takes seconds on a GPU: name the operations that matter.
    """
    device = torch.empty(0, device=device).device  # "cuda" is the current one of several
    choices = []
    for operation in operations:
        reasons: list[str] = []
        for backend in _candidates(operation, device.type):
            failure = _failure(backend, device)
            if not failure:
                choices.append(_choice(backend, reasons))
                break
            reasons.append(f"{backend.name}: {failure}")
    return choices


def _choice(backend: Backend, reasons: Sequence[str]) -> KernelChoice:
    return KernelChoice(backend.operation, backend.name, "; ".join(reasons), backend.cost if reasons else "")


@contextmanager
def recorded_calls() -> Iterator[list[KernelChoice]]:
    """Inside, what served each call of an operation is added to the list that is given, in the order of the calls.

    Fallbacks are not announced, and `required` does not count: whoever records them tells of them.
    """
    before = _settings.record, _settings.required, _settings.said
    record: list[KernelChoice] = []
    _settings.record, _settings.required, _settings.said = record, False, set()
    try:
        with _silenced():
            yield record
    finally:
        _settings.record, _settings.required, _settings.said = before


@contextmanager
def _silenced() -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True)
class KernelTrial:
    """What came of calling one kernel: `failure` "" if it is right, None if there is no such device here."""

    operation: str
    backend: str
    source: str
    package: str
    device: str
    failure: str | None


def try_kernels(
    operations: Sequence[str] = OPERATIONS, say: Callable[[str], None] = lambda line: None
) -> list[KernelTrial]:
    """Call every kernel of these operations once, on the kind of device that it is for.

    `say` is told what comes next: compiling a kernel may take a minute.
    """
    trials = []
    for backend in BACKENDS:
        if backend.operation not in operations or backend.devices is None:
            continue
        for kind in backend.devices:
            if _is_here(kind):
                say(f"{backend.operation} by {backend.name}")
            found = _failure(backend, torch.empty(0, device=kind).device) if _is_here(kind) else None
            name = backend.prebuilt.repo if backend.prebuilt is not None else backend.package
            trials.append(KernelTrial(backend.operation, backend.name, backend.source, name, kind, found))
    return trials


def _is_here(kind: str) -> bool:
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def check_shapes(operation: str, **expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise a ValueError that names the first argument whose shape is not the expected one."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{operation}: {name} is {tuple(tensor.shape)}, expected {shape}.")


def _candidates(operation: str, device_type: str) -> tuple[Backend, ...]:
    """The backends of an operation for a kind of device, those that the user named first."""
    found = _settings.lists.get((operation, device_type))
    if found is None:
        order = _settings.order

        def place(backend: Backend) -> int:
            named = [order.index(name) for name in (backend.name, backend.source, *backend.also) if name in order]
            return min(named, default=len(order))

        fitting = [b for b in BACKENDS if b.operation == operation and (b.devices is None or device_type in b.devices)]
        found = _settings.lists[operation, device_type] = tuple(sorted(fitting, key=place))
    return found


def _function(backend: Backend) -> Callable[..., Any]:
    module = importlib.import_module(f"ssm_tune.kernels.{backend.module}")
    function = vars(module)[backend.operation]
    return function if backend.prebuilt is None else functools.partial(function, package=backend.prebuilt)


def _failure(backend: Backend, device: torch.device) -> str:
    """What is wrong with a backend on a device, "" if nothing; tried at the first question, remembered afterwards."""
    if backend.devices is None:
        return ""
    key = (backend, str(device))
    found = _settings.trials.get(key)
    if found is None:
        # Not under a lock, since a trial has a thread of its own: two threads may try the same, and find the same.
        found = _settings.trials[key] = _try(backend, device)
    return found


def _try(backend: Backend, device: torch.device) -> str:
    from ssm_tune.kernels.trials import run_trial

    if device.type == "cuda":
        keep_tuning()
    try:
        function = _function(backend)
    except _FAILURES as failure:
        return _describe(failure, backend)
    try:
        run_trial(backend.operation, function, device)
    except torch.OutOfMemoryError:
        raise
    except (*_FAILURES, *_own_errors(backend)) as failure:
        return _describe(failure, backend)
    return ""


def _own_errors(backend: Backend) -> list[type[Exception]]:
    pairs = [error.split(":") for error in backend.errors]
    # A module that was never loaded has raised nothing; where Triton is missing, loading it would raise once more.
    return [vars(sys.modules[module])[name] for module, name in pairs if module in sys.modules]


def _describe(failure: BaseException, backend: Backend) -> str:
    """The error in its own words. Only a package that is absent itself is called not installed."""
    if isinstance(failure, ModuleNotFoundError) and failure.name == backend.package:
        return f"{backend.package} is not installed"
    words = " ".join(str(failure).split())
    return f"does not work here: {type(failure).__name__}: {words[:500]}"


def _announce(operation: str, device: torch.device, backend: Backend, reasons: Sequence[str]) -> None:
    """Say once that another backend serves, with the reason and the cost; raise if it is slower and kernels required.

    That the prebuilt kernel serves where none is installed costs nothing, and is no warning.
    """
    cost = f" ({backend.cost})" if backend.cost else ""
    message = f"{operation} on {device}: {'; '.join(reasons)}. {backend.name} serves instead{cost}."
    if _settings.required and backend.cost:
        raise KernelError(f"{message} But kernels.required is set: repair the kernel, or set it to false.")
    # The reasons of one call name its sizes: they would be said again for every other size.
    said = (operation, str(device), backend.name, *(reason.split(":")[0] for reason in reasons))
    if said not in _settings.said:
        _settings.said.add(said)
        fine = not backend.cost and all(reason.endswith("is not installed") for reason in reasons)
        logger.log(logging.INFO if fine else logging.WARNING, message)
