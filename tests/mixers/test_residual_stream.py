"""The residual stream's addition and norm as one operation: equal to the separate ones, where nobody watches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows import make_documents, packed, relative_error, run, worst_gradient
from tiny import PURE, tiny_model
from torch import Tensor, nn

from ssm_tune import kernels
from ssm_tune.mixers import norms, patch_model

TESTS = Path(__file__).parents[1]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Fused:
    """The norms of every device fused; counts the calls and notes the dtypes that the norms were asked for in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[torch.dtype] = []
        self.monkeypatch = monkeypatch
        operation = kernels.residual_rms_norm

        def counted(*arguments: Any) -> Any:
            self.calls.append(arguments[-1])
            return operation(*arguments)

        monkeypatch.setattr(kernels, "residual_rms_norm", counted)
        self.switch(True)

    def switch(self, on: bool) -> None:
        self.monkeypatch.setattr(norms, "DEVICES", ("cpu", "cuda") if on else ())
        self.calls.clear()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    return Fused(monkeypatch)


def model_of(kind: str, device: str = "cpu", **changes: Any) -> Any:
    return patch_model(tiny_model(kind, **changes)).to(device).train()


def results(model: nn.Module, device: str = "cpu") -> dict[str, Tensor]:
    """The logits of a packed row, and all gradients."""
    model.zero_grad(set_to_none=True)
    output = run(model, packed(make_documents()).to(device), tokens=60)
    output.loss.backward()
    return {"logits": output.logits.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error, see `worst_gradient`."""
    found, expected = ({name: t.float() for name, t in one.items()} for one in (found, expected))
    logits = relative_error(found.pop("logits"), expected.pop("logits"))
    return max(logits, worst_gradient(found, expected)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [True, False], ids=["float32 stream", "narrow stream"])
@pytest.mark.parametrize("kind", PURE)
def test_equal_to_addition_and_norm_apart(fused: Fused, kind: str, wide: bool, device: str) -> None:
    model = model_of(kind, device, residual_in_fp32=wide)
    found = results(model, device)
    assert fused.calls == [torch.float32] * (len(model.backbone.layers) + 1)
    fused.switch(False)
    assert furthest(found, results(model, device)) < (2e-6 if device == "cpu" else 4e-5)
    assert not fused.calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PURE)
def test_in_bfloat16_the_norm_is_written_as_it_is_read(fused: Fused, kind: str, device: str) -> None:
    """Under autocast, and in a model of that dtype; no nearer to float32 without it."""
    exact = results(model_of(kind, device), device)
    for autocast in (True, False):
        model = model_of(kind, device).to(torch.float32 if autocast else torch.bfloat16)
        seen: list[torch.dtype] = []
        for block in model.backbone.layers:
            block.mixer.in_proj.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].dtype))
        errors = []
        for on in (True, False):
            fused.switch(on)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                errors.append(furthest(results(model, device), exact))
            if on:
                layers = len(model.backbone.layers)
                assert fused.calls[:-1] == [torch.bfloat16] * layers and seen == fused.calls[:-1]
                assert fused.calls[-1] == torch.float32  # as the last norm gives it unfused
        assert errors[0] < 1.5 * errors[1] + 1e-3, (autocast, errors)


@pytest.mark.parametrize("kind", PURE)
def test_blocks_are_called_where_that_is_seen(fused: Fused, kind: str) -> None:
    """Each then adds by itself, with the norm still one operation; nothing else changes."""
    model = model_of(kind)
    expected, calls = results(model), len(fused.calls)
    seen: list[int] = []
    handle = model.backbone.layers[1].register_forward_hook(lambda *_: seen.append(1))
    fused.switch(True)
    assert furthest(results(model), expected) < 2e-6 and seen == [1] and len(fused.calls) == calls
    handle.remove()
    model.gradient_checkpointing_enable()
    fused.switch(True)
    assert furthest(results(model), expected) < 2e-6
    assert len(fused.calls) == calls + len(model.backbone.layers)  # once more each, in backward
    model.gradient_checkpointing_disable()
    with torch.no_grad():
        states = model(**packed(make_documents()).inputs, use_cache=False, output_hidden_states=True).hidden_states
    assert len(states) == len(model.backbone.layers) + 1


def test_norms_are_called_where_that_is_seen(fused: Fused) -> None:
    """A norm with a hook, with a forward of its own, or that an adapter trains; not one that is only raised."""
    model = model_of("mamba")
    expected, calls = results(model), len(fused.calls)
    norm, seen = model.backbone.layers[1].norm, []
    handle = norm.register_forward_hook(lambda *_: seen.append(1))
    fused.switch(True)
    assert furthest(results(model), expected) < 2e-6 and seen == [1] and len(fused.calls) == calls - 1
    handle.remove()
    forward = norm.forward
    norm.forward = lambda x: seen.append(2) or forward(x)
    fused.switch(True)
    assert furthest(results(model), expected) < 2e-6 and seen == [1, 2] and len(fused.calls) == calls - 1
    del norm.forward

    def raise_it(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(3)

    raise_it.only_float32 = True  # as quantization.prepare_packed marks its own
    norm.register_forward_pre_hook(raise_it)
    fused.switch(True)
    assert furthest(results(model), expected) < 2e-6 and seen == [1, 2] and len(fused.calls) == calls
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["norm_f"]))
    fused.switch(True)
    assert "base_model.model.backbone.norm_f.modules_to_save.default.weight" in results(adapted)
    assert len(fused.calls) == calls - 1


_INTERPRETED = """
import test_residual_stream as tests
from ssm_tune import kernels
from ssm_tune.kernels import residual_norm_triton
from ssm_tune.mixers import norms
from rows import alone, make_documents
kernels.residual_rms_norm = residual_norm_triton.residual_rms_norm
tests.packed = lambda documents: next(alone(documents))
tests.make_documents = lambda: make_documents((9,))
for kind in tests.PURE:
    for checkpointing in (False, True):
        model = tests.model_of(kind)
        if checkpointing:
            model.gradient_checkpointing_enable()
        found = []
        for norms.DEVICES in (("cpu",), ()):
            found.append(tests.results(model))
        error = tests.furthest(*found)
        assert error < 5e-6, (kind, checkpointing, error)
"""


def test_the_triton_kernel_in_models() -> None:
    """Interpreted, in a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    paths = [str(path) for path in (TESTS / "mixers", TESTS, TESTS.parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
