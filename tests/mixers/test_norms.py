"""The norms of what Falcon-Mamba's x_proj gives, in one call and by the modules."""

from __future__ import annotations

import pytest
import torch
from rows import LAYOUTS, make_documents, run, worst_gradient
from tiny import tiny_model

from ssm_tune.kernels import backends
from ssm_tune.mixers import norms, patch_model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    call = backends.call
    monkeypatch.setattr(backends, "call", lambda name, *a, **k: (found.append(name), call(name, *a, **k))[1])
    return found


def gradients(kind: str) -> dict[str, torch.Tensor]:
    model = patch_model(tiny_model(kind)).train()
    run(model, LAYOUTS["packed"](make_documents()), 100).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# Jamba's have weights.
@pytest.mark.parametrize(("kind", "joined"), [("falcon_mamba", True), ("jamba", False)])
def test_one_call_gives_what_three_give(
    kind: str, joined: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = gradients(kind)
    assert "rms_norm_parts" not in calls
    monkeypatch.setattr(norms, "DEVICES", ("cpu",))
    error, name = worst_gradient(gradients(kind), apart)
    assert error < 1e-5, name
    assert ("rms_norm_parts" in calls) == joined


def test_a_norm_that_is_watched_is_called(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "DEVICES", ("cpu",))
    mixer = patch_model(tiny_model("falcon_mamba")).backbone.layers[0].mixer
    seen: list[int] = []
    mixer.b_layernorm.register_forward_hook(lambda *a: seen.append(1))
    mixer(torch.randn(1, 5, mixer.hidden_size))
    assert seen == [1] and "rms_norm_parts" not in calls
