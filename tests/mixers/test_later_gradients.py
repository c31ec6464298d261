"""The gradient of out_proj that waits for the scan's backward pass: the same numbers, and no second forward scan."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from operations.cuda_on_cpu import Compiler
from peft import LoraConfig, get_peft_model
from rows import LAYOUTS, make_documents, run, worst_gradient
from storages import Storages
from tiny import tiny_model

from ssm_tune.adapter import guard_lifted
from ssm_tune.kernels import backends, cuda_scan, recompute
from ssm_tune.lora_layers import cast_adapters_only
from ssm_tune.mixers import later_gradients, patch_model

TARGETS = ["in_proj", "x_proj", "dt_proj", "out_proj"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return Compiler(tmp_path_factory.mktemp("later"))


@pytest.fixture(autouse=True)
def scan_of_a_gpu(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    """The CUDA C++ scan, compiled for the CPU, and recomputation, as on a GPU."""
    monkeypatch.setattr(cuda_scan, "compiled", compiler)
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    call = backends.call

    def scan_or_call(operation: str, *tensors: Any, **settings: Any) -> Any:
        if operation == "selective_scan":
            return cuda_scan.selective_scan(*tensors, **settings)
        return call(operation, *tensors, **settings)

    monkeypatch.setattr(backends, "call", scan_or_call)


def gradients(model: Any, times: int = 1) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(model, LAYOUTS["packed rows, left"](make_documents()), 100).loss
    for last in reversed(range(times)):
        loss.backward(retain_graph=bool(last))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def make_model(kind: str, method: str) -> Any:
    model = patch_model(tiny_model(kind)).train()
    if method == "full":
        return model
    with guard_lifted():
        adapted = get_peft_model(model.bfloat16(), LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    return cast_adapters_only(adapted).train()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_the_same_gradients_and_no_second_scan(
    kind: str, method: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, again = make_model(kind, method), []
    real = cuda_scan._outputs_again
    monkeypatch.setattr(cuda_scan, "_outputs_again", lambda *a: (again.append(1), real(*a))[1])
    got = gradients(model, times)
    assert again == []
    monkeypatch.setattr("ssm_tune.mixers.mamba.later_gradient", lambda *_: None)
    wanted = gradients(model, times)
    assert len(again) == model.config.num_hidden_layers * times
    assert got.keys() == wanted.keys()
    assert all(gradient.any() for gradient in got.values())
    assert any("out_proj" in name for name in got)
    error, name = worst_gradient(got, wanted)
    assert error < 1e-2, name


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_a_layer_kept_is_free_when_backward_has_passed_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the rest of the graph, and what hangs on its nodes, is still there."""

    def left(model: Any) -> int:
        model.zero_grad()
        with Storages() as storages, torch.autocast("cpu", torch.bfloat16):
            loss = run(model, LAYOUTS["packed rows, left"](make_documents()), 100).loss
            loss.backward()
        return storages.alive(loss, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None))

    model = make_model("mamba", method)
    waiting = left(model)
    monkeypatch.setattr("ssm_tune.mixers.mamba.later_gradient", lambda *_: None)
    assert waiting <= left(model)


def test_a_layer_that_is_watched_or_drops_does_not_wait() -> None:
    model = make_model("mamba", "lora")
    out_proj = next(module for name, module in model.named_modules() if name.endswith("out_proj"))
    x = torch.zeros(1, 2, out_proj.in_features, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), recompute.recomputed(x):
        assert later_gradients.later_gradient(out_proj, x) is not None
        assert later_gradients.later_gradient(out_proj, x.detach()) is None
        handle = out_proj.register_forward_hook(lambda *_: None)
        assert later_gradients.later_gradient(out_proj, x) is None
        handle.remove()
        out_proj.lora_dropout["default"] = torch.nn.Dropout(0.5)
        assert later_gradients.later_gradient(out_proj, x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert later_gradients.later_gradient(out_proj.eval(), x) is None, "nothing is recomputed here"
