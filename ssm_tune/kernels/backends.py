"""What is installed, what is chosen, why; said once.

Every operation has an ordered list of backends, each for some kinds of device. A backend is chosen for a device by
calling it there once, forward and backward, and comparing with the reference (`trials.py`): being importable proves
nothing. What failed is remembered with the error's own words. A call that a working backend cannot serve
(`Unsupported`) goes to the next.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class KernelError(RuntimeError):
    """Kernels are required, and only a fallback can serve."""


class Unsupported(Exception):
    """Raised by a backend, before it does anything, for a call that it cannot serve; says why."""


@dataclass(frozen=True)
class Backend:
    """One way to run one operation: the function of that name in `module`, tried on devices of these kinds only.

    `devices` None: any device, and no trial, since it is plain PyTorch. `package`: what a user installs for it.
    `errors`: what the package raises beside the built-in exceptions, as "module:class". `cost`: against the first of
    the list.
    """

    operation: str
    name: str
    module: str
    devices: tuple[str, ...] | None = None
    package: str = ""
    errors: tuple[str, ...] = ()
    cost: str = ""


@dataclass(frozen=True)
class KernelChoice:
    """What serves an operation on a device; why no earlier backend does ("" if it is the first); what that costs."""

    operation: str
    backend: str
    reason: str
    cost: str


_CPU = ("cpu",)
_CUDA = ("cuda",)
_NUMBA = ("numba.core.errors:NumbaError",)
_TRITON = ("triton.errors:TritonError",)
_TOKEN_BY_TOKEN = "one token at a time in PyTorch, 100 times slower or more"
_SEVERAL_KERNELS = "several small kernels of PyTorch, about 3 times slower"

# The order within an operation is the order of preference.
BACKENDS = (
    Backend("selective_scan", "numba", "cpu_scan", _CPU, "numba", _NUMBA),
    Backend("selective_scan", "mamba_ssm", "mamba_ssm_scan", _CUDA, "mamba_ssm", _TRITON),
    Backend("selective_scan", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("selective_scan_step", "mamba_ssm", "mamba_ssm_scan", _CUDA, "mamba_ssm", _TRITON),
    Backend("selective_scan_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("ssd_scan", "numba", "cpu_ssd", _CPU, "numba", _NUMBA),
    Backend("ssd_scan", "mamba_ssm", "mamba_ssm_ssd", _CUDA, "mamba_ssm", _TRITON),
    Backend("ssd_scan", "chunked", "ssd_chunked", cost="chunks of matrix products in PyTorch, several times slower"),
    Backend("ssd_scan", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("ssd_step", "mamba_ssm", "mamba_ssm_ssd", _CUDA, "mamba_ssm", _TRITON),
    Backend("ssd_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("mamba3_scan", "mamba_ssm", "mamba3_triton", _CUDA, "mamba_ssm", _TRITON),
    Backend(
        "mamba3_scan", "chunked", "mamba3_chunked", cost="chunks of matrix products in PyTorch, several times slower"
    ),
    Backend("mamba3_scan", "reference", "mamba3_reference", cost=_TOKEN_BY_TOKEN),
    Backend("causal_conv1d", "numba", "cpu_conv", _CPU, "numba", _NUMBA),
    Backend("causal_conv1d", "causal_conv1d", "causal_conv1d_cuda", _CUDA, "causal_conv1d"),
    Backend("causal_conv1d", "gathered", "conv_gathered", cost="several passes over the row, about 5 times slower"),
    Backend("causal_conv1d", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("causal_conv1d_step", "causal_conv1d", "causal_conv1d_cuda", _CUDA, "causal_conv1d"),
    Backend("causal_conv1d_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("rms_norm", "mamba_ssm", "mamba_ssm_norm", _CUDA, "mamba_ssm", _TRITON),
    Backend("rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("gated_rms_norm", "mamba_ssm", "mamba_ssm_norm", _CUDA, "mamba_ssm", _TRITON),
    Backend("gated_rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
)
OPERATIONS = tuple(dict.fromkeys(backend.operation for backend in BACKENDS))

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


_settings = _Settings()


def set_kernel_order(order: Sequence[str] | None, required: bool = False) -> None:
    """Prefer the backends named in `order` over the others, in that order; None: the order of preference.

    With `required`, a call that the first backend of its list for the device cannot serve raises KernelError.

    Raises:
        ValueError: a name that no backend has; names the nearest.
    """
    names = sorted({backend.name for backend in BACKENDS})
    for name in order or ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"kernels.order: {name!r} is not a backend.{hint} There are: {', '.join(names)}.")
    _settings.order, _settings.required = tuple(order or ()), required
    _settings.lists, _settings.said = {}, set()


def call(operation: str, *args: Any, **kwargs: Any) -> Any:
    """Run `operation` with the first backend that works on the device of its first argument and can serve the call."""
    device = args[0].device
    reasons: list[str] = []
    for backend in _candidates(operation, device.type):
        failure = _failure(backend, device)
        if failure:
            reasons.append(f"{backend.name}: {failure}")
            continue
        if reasons:
            _announce(operation, device, backend, reasons)
        try:
            return _function(backend)(*args, **kwargs)
        except Unsupported as refusal:
            reasons.append(f"{backend.name}: {refusal}")
    raise KernelError(f"{operation} on {device}: no backend can serve this call. " + "; ".join(reasons))


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
                cost = backend.cost if reasons else ""
                choices.append(KernelChoice(operation, backend.name, "; ".join(reasons), cost))
                break
            reasons.append(f"{backend.name}: {failure}")
    return choices


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
        fitting = [b for b in BACKENDS if b.operation == operation and (b.devices is None or device_type in b.devices)]
        fitting.sort(key=lambda b: order.index(b.name) if b.name in order else len(order))
        found = _settings.lists[operation, device_type] = tuple(fitting)
    return found


def _function(backend: Backend) -> Callable[..., Any]:
    module = importlib.import_module(f"ssm_tune.kernels.{backend.module}")
    return vars(module)[backend.operation]


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
    return [vars(importlib.import_module(module))[name] for module, name in pairs]


def _describe(failure: BaseException, backend: Backend) -> str:
    """The error in its own words. Only a package that is absent itself is called not installed."""
    if isinstance(failure, ModuleNotFoundError) and failure.name == backend.package:
        return f"{backend.package} is not installed"
    words = " ".join(str(failure).split())
    return f"does not work here: {type(failure).__name__}: {words[:500]}"


def _announce(operation: str, device: torch.device, backend: Backend, reasons: Sequence[str]) -> None:
    """Say once that a fallback serves, with the reason and the cost; raise if kernels are required."""
    cost = f" ({backend.cost})" if backend.cost else ""
    message = f"{operation} on {device}: {'; '.join(reasons)}. {backend.name} serves instead{cost}."
    if _settings.required:
        raise KernelError(f"{message} But kernels.required is set: repair the kernel, or set it to false.")
    # The reasons of one call name its sizes: they would be said again for every other size.
    said = (operation, str(device), backend.name, *(reason.split(":")[0] for reason in reasons))
    if said not in _settings.said:
        _settings.said.add(said)
        logger.warning(message)
