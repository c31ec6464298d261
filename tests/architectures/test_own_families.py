"""Our own models in the table of families: what it says of them, and that training treats them like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, IDS, make_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ssm_tune.adapter import apply_adapter
from ssm_tune.families import OWN_FAMILIES, family_of, refusals
from ssm_tune.mixers import patch_model, unpatch_model
from ssm_tune.model import load_model
from ssm_tune.recipe import AdapterSection

KINDS = ("mamba3_hybrid", "mamba_hybrid", "mamba2_mlps", "samba", "h3_hybrid")


def tiny_llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **IDS, **sizes)).eval()


def make(kind: str) -> nn.Module:
    return tiny_llama() if kind == "llama" else make_model(kind)


def test_every_one_is_tested() -> None:
    assert {make(kind).config.model_type for kind in (*KINDS, "llama")} == set(OWN_FAMILIES)
    assert {cls.model_type for cls, _ in CONFIGS.values()} < set(OWN_FAMILIES)


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_names_are_those_of_the_model(kind: str) -> None:
    model = make(kind)
    family = family_of(model.config.model_type)
    classes = {type(module).__name__: module for module in model.modules()}
    assert family.block in classes and classes[family.block] and type(model)._no_split_modules == [family.block]
    linears = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - {"lm_head"} == {*family.projections, *family.attention, *family.mlp}
    if not family.mixer:
        return
    mixer = classes[family.mixer]
    assert {name for name, child in mixer.named_children() if isinstance(child, nn.Linear)} == set(family.projections)
    own = {name for name, _ in mixer.named_parameters()}
    optional = {"mimo_x", "mimo_z", "mimo_o"}
    assert set(family.ssm_parameters) - optional <= own
    assert refusals(family, packing=True, targets=family.projections, attention="sdpa") == []


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_nothing_is_patched(kind: str) -> None:
    model = make(kind)
    classes = [type(module) for module in model.modules()]
    assert unpatch_model(patch_model(model)) is model
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_for_training_in_bfloat16_the_recurrence_stays_float32(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16")
    family = family_of(model.config.model_type)
    for name, parameter in loaded.named_parameters():
        wide = family.is_ssm_parameter(name)
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
        if wide:
            assert torch.equal(parameter, model.get_parameter(name))
    full = load_model(tmp_path, trainable="full")
    for name, parameter in full.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, model.get_parameter(name))
    ids = torch.randint(3, IDS["vocab_size"], (2, 9))
    assert loaded(ids, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_everywhere_and_merge(kind: str) -> None:
    model = apply_adapter(make_model(kind), AdapterSection(targets="all", r=4))
    ids = torch.randint(3, IDS["vocab_size"], (2, 9))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(parameter.grad.any() for parameter in trained.values())
    reached = {name.split(".lora_")[0] for name in trained}
    linears = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and n.endswith("base_layer")]
    assert reached == {name.removesuffix(".base_layer") for name in linears}
    expected = model.eval()(input_ids=ids, use_cache=False).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
