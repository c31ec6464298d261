"""A decoding step is the model's own forward: with adapters on and off, in every dtype, after weights have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finished import stir
from tiny import HYBRID, PURE, tiny_model

from ssm_tune.adapter import apply_adapter
from ssm_tune.mixers import patch_model, unpatch_model
from ssm_tune.mixers.step import DecodeStep, can_step
from ssm_tune.model import load_model
from ssm_tune.outputs.decoding.loop import read_prompts
from ssm_tune.outputs.decoding.states import BatchedStates
from ssm_tune.recipe import AdapterSection

KINDS = [*PURE, "mamba-residual-low"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def adapted(kind: str, **keys: Any) -> Any:
    kind, _, low = kind.partition("-")
    keys |= {"residual_in_fp32": False} if low else {}
    section = AdapterSection(r=4, train_also=["A_log", "D", "dt_bias", "conv1d"])
    model = apply_adapter(patch_model(tiny_model(kind, **keys)), section)
    stir(model)
    return model.eval()


def decoded(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits (rows, tokens, vocabulary) after the prompt's last token and each later one, a token at a time."""
    cache, first = read_prompts(model, ids[:, :prompt], torch.ones_like(ids[:, :prompt]))
    states = BatchedStates(model, cache)
    states.add(cache, prompt)
    later = [states.step(ids[:, place]).clone() for place in range(prompt, ids.shape[1])]
    return torch.stack([first, *later], dim=1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def whole(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits[:, prompt - 1 :].float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_forward(kind: str, device: str) -> None:
    model = adapted(kind).to(device)
    ids = torch.randint(6, 260, (3, 24)).to(device)
    tolerance = 1e-5 if device == "cpu" else 2e-3  # Triton's products in TF32
    assert can_step(model)
    on = decoded(model, ids, 7)
    assert difference(on, whole(model, ids, 7)) < tolerance
    with model.disable_adapter():
        off = decoded(model, ids, 7)
        assert difference(off, whole(model, ids, 7)) < tolerance
    assert difference(on, off) > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PURE)
def test_steps_in_16_bit_stay_near_the_forward(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind, dtype=torch.bfloat16)).to(device)
    ids = torch.randint(6, 260, (2, 16)).to(device)
    assert difference(decoded(model, ids, 5), whole(model, ids, 5)) < 0.03


@pytest.mark.parametrize("kind", PURE)
def test_states_in_16_bit_are_rounded_states(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    ids = torch.randint(6, 260, (2, 16))
    cache, _ = read_prompts(model, ids[:, :5], torch.ones_like(ids[:, :5]))
    states = BatchedStates(model, cache, torch.bfloat16)
    states.add(cache, 5)
    logits = torch.stack([states.step(ids[:, place]) for place in range(5, 16)], dim=1)
    assert {pool._rows.dtype for pool in states._pools} == {torch.float32, torch.bfloat16}
    assert 1e-4 < difference(logits, whole(model, ids, 6)) < 0.05


def test_what_was_computed_from_weights_is_refreshed() -> None:
    model = patch_model(tiny_model("mamba2"))
    ids = torch.randint(6, 260, (2, 10))
    cache, _ = read_prompts(model, ids[:, :9], torch.ones_like(ids[:, :9]))
    states = BatchedStates(model, cache)
    states.add(cache, 9)
    step = DecodeStep(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data += 0.5
    stale = DecodeStep.__call__(step, ids[:, 9], _copied(states))
    step.refresh()
    fresh = step(ids[:, 9], _copied(states))
    with torch.no_grad():
        expected = model(ids[:, 9:], cache=_copied(states), use_cache=True).logits[:, -1]
    assert difference(fresh, expected) < 1e-5 < 1e-3 < difference(stale, expected)


def _copied(states: BatchedStates) -> Any:
    import copy

    return copy.deepcopy(states._cache)


def test_mixers_are_left_as_they_were() -> None:
    model = adapted("mamba")
    before = [set(vars(module)) for module in model.modules()]
    decoded(model, torch.randint(6, 260, (1, 8)), 5)
    assert [set(vars(module)) for module in model.modules()] == before


def test_models_with_something_on_the_modules_that_are_passed_by_take_the_long_way() -> None:
    model = patch_model(tiny_model("mamba"))
    assert can_step(model)
    handle = model.backbone.layers[1].register_forward_hook(lambda *_: None)
    assert not can_step(model)
    handle.remove()
    model.backbone.norm_f.forward = model.backbone.norm_f.forward
    assert not can_step(model)
    assert not can_step(unpatch_model(tiny_model("mamba")))
    assert not any(can_step(patch_model(tiny_model(kind))) for kind in HYBRID)


def test_accelerates_hooks_change_nothing_where_all_lies_on_one_device() -> None:
    """Quantised models are loaded with them, whatever the device."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = patch_model(tiny_model("mamba2"))
    ids = torch.randint(6, 260, (2, 12))
    expected = decoded(model, ids, 5)
    for module in list(model.modules()):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert can_step(model)
    assert torch.equal(decoded(model, ids, 5), expected)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_adapters_on_packed_weights_step_too(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 128} | ({"num_heads": 8, "head_dim": 32} if kind == "mamba2" else {})
    tiny_model(kind, **wide).save_pretrained(tmp_path)
    model = apply_adapter(load_model(tmp_path, load_in_4bit=True, device="cpu"), AdapterSection(r=4))
    stir(model)
    model.eval()
    ids = torch.randint(6, 260, (2, 12))
    assert can_step(model)
    assert difference(decoded(model, ids, 5), whole(model, ids, 5)) < 0.03


def test_falcon_mambas_norms_have_their_own_epsilon() -> None:
    model = adapted("falcon_mamba", mixer_rms_eps=0.3, layer_norm_epsilon=0.1)
    ids = torch.randint(6, 260, (2, 16))
    assert difference(decoded(model, ids, 5), whole(model, ids, 5)) < 1e-5
