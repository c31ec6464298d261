"""Which backend is chosen: by device, by trial, never in silence."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comparison import conv_tensors, scan_tensors, ssd_tensors
from torch.utils.checkpoint import checkpoint

from ssm_tune.kernels import (
    KernelError,
    backends,
    causal_conv1d,
    kernel_report,
    reference,
    rms_norm,
    selective_scan,
    set_kernel_order,
    ssd_scan,
)
from ssm_tune.kernels.backends import Backend, Unsupported

CPU = ("cpu",)
X, WEIGHT = torch.ones(2, 8), torch.ones(8)
COST = "a snail's pace"


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_settings", backends._Settings())


class Fake:
    """Puts backends for rms_norm in place of all others; counts their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.table = [backend for backend in backends.BACKENDS if backend.operation != "rms_norm"]
        self.calls: list[str] = []

    def add(
        self,
        name: str,
        function: Callable[..., Any] | None = reference.rms_norm,
        on_import: Exception | None = None,
        **fields: Any,
    ) -> None:
        """A backend whose module has `function`, or raises `on_import`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        module = ModuleType(f"ssm_tune.kernels.fake_{name}")
        module.rms_norm = counted
        if on_import is None:
            self.monkeypatch.setitem(sys.modules, module.__name__, module)
        else:
            real = backends.importlib.import_module

            def raise_on_import(asked: str) -> ModuleType:
                if asked == module.__name__:
                    self.calls.append(f"import {name}")
                    raise on_import
                return real(asked)

            self.monkeypatch.setattr(backends.importlib, "import_module", raise_on_import)
        self.table.append(Backend("rms_norm", name, f"fake_{name}", **fields))
        self.monkeypatch.setattr(backends, "BACKENDS", tuple(self.table))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_first_that_works_is_chosen_and_nothing_is_said(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add("fast", devices=CPU)
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    assert set(fake.calls) == {"fast"}
    assert not caplog.records


def test_a_trial_happens_once(fake: Fake) -> None:
    fake.add("fast", devices=CPU)
    for _ in range(3):
        rms_norm(X, WEIGHT, 1e-5)
    assert len(fake.calls) == 1 + 3


def test_an_absent_package_is_said_once_with_the_cost(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add(
        "fast", on_import=ModuleNotFoundError("No module named 'speed'", name="speed"), devices=CPU, package="speed"
    )
    fake.add("slow", cost=COST)
    for _ in range(3):
        rms_norm(X, WEIGHT, 1e-5)
    assert warnings_of(caplog) == [
        "rms_norm on cpu: fast: speed is not installed. slow serves instead (a snail's pace)."
    ]
    assert fake.calls == ["import fast", "slow", "slow", "slow"]


@pytest.mark.parametrize(
    "failure",
    [
        ImportError("speed.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
        OSError("libcudart.so.12: cannot open shared object file"),
        ModuleNotFoundError("No module named 'einops'", name="einops"),
    ],
)
def test_a_broken_import_keeps_its_words(fake: Fake, caplog: pytest.LogCaptureFixture, failure: Exception) -> None:
    fake.add("fast", on_import=failure, devices=CPU, package="speed")
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    (said,) = warnings_of(caplog)
    assert f"does not work here: {type(failure).__name__}: {failure}" in said
    assert "not installed" not in said


def test_a_kernel_that_imports_and_fails_when_called_is_tried_once(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("selective scan was not built\n  into this wheel")

    fake.add("fast", fail, devices=CPU)
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    rms_norm(X, WEIGHT, 1e-5)
    assert fake.calls == ["fast", "slow", "slow"]
    assert "RuntimeError: selective scan was not built into this wheel" in warnings_of(caplog)[0]


def test_a_kernel_that_gives_wrong_values_is_refused(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add("fast", lambda x, weight, eps: reference.rms_norm(x, weight, eps) * 1.2, devices=CPU)
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    assert "output differs from the reference by 0.2, relative" in warnings_of(caplog)[0]


def test_a_kernel_whose_gradient_is_wrong_is_refused(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add("fast", lambda x, weight, eps: reference.rms_norm(x, weight.detach() + 0 * weight, eps), devices=CPU)
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    assert "the gradient of weight differs from the reference" in warnings_of(caplog)[0]


@pytest.mark.parametrize(
    "operation", [op for op in backends.OPERATIONS if op in ("selective_scan", "ssd_scan", "causal_conv1d")]
)
def test_a_kernel_that_drops_seq_idx_is_refused(operation: str) -> None:
    def drop(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        return getattr(reference, operation)(*args, **kwargs)

    with pytest.raises(backends.importlib.import_module("ssm_tune.kernels.trials").WrongResultError):
        backends.importlib.import_module("ssm_tune.kernels.trials").run_trial(operation, drop, torch.device("cpu"))


def test_a_kernel_for_another_device_is_never_loaded(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add("cuda_only", devices=("cuda",))
    fake.add("plain", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    assert fake.calls == ["plain"]
    assert not caplog.records  # nothing is missing on a CPU


def test_lack_of_memory_is_not_held_against_a_kernel(fake: Fake) -> None:
    def exhaust(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake.add("fast", exhaust, devices=CPU)
    fake.add("slow", cost=COST)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            rms_norm(X, WEIGHT, 1e-5)
    assert fake.calls == ["fast", "fast"]


def test_a_call_that_the_first_cannot_serve_goes_to_the_next(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    def refuse_wide(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[-1] in (8, 9):
            raise Unsupported(f"{x.shape[-1]} channels, and it takes others")
        return reference.rms_norm(x, weight, eps)

    fake.add("fast", refuse_wide, devices=CPU)
    fake.add("slow", cost=COST)
    rms_norm(X, WEIGHT, 1e-5)
    rms_norm(torch.ones(2, 9), torch.ones(9), 1e-5)
    assert warnings_of(caplog) == [
        "rms_norm on cpu: fast: 8 channels, and it takes others. slow serves instead (a snail's pace)."
    ]
    fake.calls.clear()
    rms_norm(torch.ones(2, 7), torch.ones(7), 1e-5)
    assert fake.calls == ["fast"]


def test_an_error_of_a_chosen_kernel_passes_through(fake: Fake) -> None:
    def fail_later(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if eps == 1.0:
            raise RuntimeError("later")
        return reference.rms_norm(x, weight, eps)

    fake.add("fast", fail_later, devices=CPU)
    fake.add("slow")
    with pytest.raises(RuntimeError, match="later"):
        rms_norm(X, WEIGHT, 1.0)


def test_required_turns_a_fallback_into_an_error(fake: Fake) -> None:
    fake.add(
        "fast", on_import=ModuleNotFoundError("No module named 'speed'", name="speed"), devices=CPU, package="speed"
    )
    fake.add("slow", cost=COST)
    set_kernel_order(None, required=True)
    for _ in range(2):
        with pytest.raises(KernelError, match=r"speed is not installed.*kernels\.required"):
            rms_norm(X, WEIGHT, 1e-5)
    set_kernel_order(None)
    rms_norm(X, WEIGHT, 1e-5)


def test_the_order_is_the_users(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.add("fast", devices=CPU)
    fake.add("slow", cost=COST)
    set_kernel_order(["slow"], required=True)
    rms_norm(X, WEIGHT, 1e-5)
    assert fake.calls == ["slow"]
    assert not caplog.records
    set_kernel_order(None)
    fake.calls.clear()
    rms_norm(X, WEIGHT, 1e-5)
    assert fake.calls == ["fast", "fast"]


def test_a_name_that_no_backend_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"kernels\.order: 'numbba' is not a backend\. Did you mean numba\?"):
        set_kernel_order(["numbba"])


def test_when_nothing_can_serve_all_reasons_are_given(fake: Fake) -> None:
    fake.add("fast", on_import=ImportError("undefined symbol: x"), devices=CPU)
    with pytest.raises(
        KernelError, match=r"no backend can serve this call\. fast: does not work here: .*undefined symbol"
    ):
        rms_norm(X, WEIGHT, 1e-5)


def test_the_report_has_every_operation_and_the_reasons(fake: Fake) -> None:
    fake.add("fast", on_import=ImportError("undefined symbol: x"), devices=CPU)
    fake.add("slow", cost=COST)
    found = {choice.operation: choice for choice in kernel_report("cpu")}
    assert set(found) == set(backends.OPERATIONS)
    assert found["rms_norm"].backend == "slow"
    assert found["rms_norm"].reason == "fast: does not work here: ImportError: undefined symbol: x"
    assert found["rms_norm"].cost == COST


def test_the_report_of_a_cpu() -> None:
    found = {choice.operation: choice.backend for choice in kernel_report("cpu")}
    assert {operation for operation, name in found.items() if name == "numba"} == {
        "selective_scan",
        "ssd_scan",
        "causal_conv1d",
    }
    assert all(choice.reason == "" for choice in kernel_report("cpu"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_first_call_in_any_mode_of_pytorch(mode: Callable[[], Any]) -> None:
    tensors = {name: tensor.float() for name, tensor in scan_tensors(length=3).items()}
    with mode():
        selective_scan(**tensors)
        causal_conv1d(**{name: tensor.float() for name, tensor in conv_tensors(length=3).items()})
    assert all(choice.reason == "" for choice in kernel_report("cpu"))


def test_whatever_the_defaults_of_pytorch_are() -> None:
    scan = {name: t.float().requires_grad_() for name, t in scan_tensors(length=3).items()}
    ssd = {name: t.float().requires_grad_() for name, t in ssd_tensors(length=3).items()}
    conv = {name: t.float().requires_grad_() for name, t in conv_tensors(length=3).items()}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for operation, tensors in ((selective_scan, scan), (ssd_scan, ssd), (causal_conv1d, conv)):
                y, state = operation(**tensors, return_final_state=True)
                (y.square().sum() + state.square().sum()).backward()
                assert {t.dtype for t in (y, state, tensors["x"].grad)} == {torch.float32}
                assert tensors["x"].grad.isfinite().all()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(choice.reason == "" for choice in kernel_report("cpu"))


def test_a_first_call_inside_gradient_checkpointing() -> None:
    """Its hooks count what is saved in the forward and in the second forward, in which no trial happens any more."""
    leaves = {name: tensor.float().requires_grad_() for name, tensor in scan_tensors(length=3).items()}
    checkpoint(lambda: selective_scan(**leaves), use_reentrant=False).sum().backward()
    assert leaves["x"].grad.isfinite().all()
    assert all(choice.reason == "" for choice in kernel_report("cpu"))


class CallInBackward(torch.autograd.Function):
    """The identity, whose backward pass calls an operation, as what is recomputed there does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rms_norm(dx, WEIGHT, 1e-5)


def test_a_first_call_in_a_backward_pass_is_tried_by_its_own_thread(fake: Fake) -> None:
    """Another thread's gradients on a GPU would wait for this one, which computes all of them."""
    threads = set()

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        threads.add(threading.get_ident())
        return reference.rms_norm(*args, **kwargs)

    fake.add("fast", norm, devices=CPU)
    fake.add("slow", cost=COST)
    x = X.clone().requires_grad_()
    CallInBackward.apply(x).sum().backward()
    assert fake.calls == ["fast", "fast"] and x.grad.isfinite().all()
    assert threads == {threading.get_ident()}


def test_a_trial_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    kernel_report("cpu")
    assert torch.equal(torch.rand(1), expected)


def test_float64_goes_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    tensors = scan_tensors(length=3)
    assert torch.equal(selective_scan(**tensors), reference.selective_scan(**tensors))
    assert "float64 is computed by the reference only. reference serves instead" in warnings_of(caplog)[0]


def run_python(code: str) -> str:
    """The output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_numba_is_imported_at_the_first_call_only() -> None:
    code = "import sys, ssm_tune.kernels; print('numba' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_without_numba_pytorch_serves() -> None:
    code = """
import sys, torch
sys.modules["numba"] = None
from ssm_tune.kernels import causal_conv1d, kernel_report, selective_scan, ssd_scan
one = torch.ones(1, 2, 3)
print(selective_scan(one, one, -torch.ones(3, 2), one[..., :2], one[..., :2]).shape)
print(ssd_scan(one[..., None], one, -torch.ones(3), one[:, :, None], one[:, :, None]).shape)
print(causal_conv1d(one, torch.ones(3, 4)).shape)
for choice in kernel_report("cpu"):
    if choice.reason:
        print(choice.operation, choice.backend, choice.reason)
"""
    assert run_python(code).splitlines() == [
        "torch.Size([1, 2, 3])",
        "torch.Size([1, 2, 3, 1])",
        "torch.Size([1, 2, 3])",
        "selective_scan reference numba: numba is not installed",
        "ssd_scan chunked numba: numba is not installed",
        "causal_conv1d gathered numba: numba is not installed",
    ]


def test_recipes_know_the_names_of_kernels() -> None:
    from ssm_tune.recipe import KERNELS, RecipeError, recipe_from_dict

    assert list(KERNELS) == backends.kernel_names()
    for name in KERNELS:
        set_kernel_order([name])
    with pytest.raises(RecipeError, match=r'kernels\.order cannot be "numbba"\. Did you mean numba'):
        recipe_from_dict({"kernels": {"order": ["hub", "numbba"]}}, complete=False)
