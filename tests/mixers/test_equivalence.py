"""What is trained is what is evaluated, and documents do not see each other: every exact family, on the kernels really
used.

The truth is the stock model in evaluation mode with each document alone. The same file runs on the CPU and, with `-m
gpu`, on a GPU (set TRITON_F32_DEFAULT=ieee there: Triton's float32 matrix products run in TF32 otherwise).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraModel
from rows import LAYOUTS, Layout, alone, make_documents, packed, relative_error, run
from tiny import KINDS, tiny_config, tiny_model

from ssm_tune.families import family_of
from ssm_tune.mixers import patch_model

EXACT = [kind for kind in KINDS if family_of(tiny_config(kind).model_type).exact]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-5


def stock_logits(model: Any, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [run(model, layout).logits[0] for layout in alone(documents)]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(relative_error(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))


def gradients(model: Any, layouts: list[Layout], tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss summed over layouts and every trainable parameter's gradient."""
    model.zero_grad()
    total = 0.0
    for layout in layouts:
        loss = run(model, layout, tokens).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def lay_out(name: str, documents: list[torch.Tensor]) -> tuple[Layout, list[torch.Tensor]]:
    """A layout, and the documents in its order."""
    layout = LAYOUTS[name](documents)
    return layout, layout.cut(layout.inputs["input_ids"])


def with_adapters(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """LoRA on every projection of the mixers, neither half zero; PEFT's guard, which refuses out_proj, is stepped
    round.
    """
    monkeypatch.setattr(LoraModel, "_check_target_module_compatiblity", lambda *_: None)
    family = family_of(model.config.model_type)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=list(family.projections), lora_dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", EXACT)
def test_logits_are_those_of_each_document_alone(kind: str, name: str, training: bool, device: str) -> None:
    model = tiny_model(kind).to(device)
    layout, documents = lay_out(name, make_documents())
    wanted = stock_logits(model, [document.to(device) for document in documents])
    patch_model(model).train(training)
    with torch.no_grad():
        got = layout.cut(run(model, layout.to(device)).logits)
    assert worst(got, wanted) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["full", "lora", "lora, checkpointing", "full, checkpointing"])
@pytest.mark.parametrize("name", ["packed", "packed rows", "left pads", "right pads"])
@pytest.mark.parametrize("kind", EXACT)
def test_gradients_are_those_of_each_document_alone(
    kind: str, name: str, method: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind)
    if method.startswith("lora"):
        model = with_adapters(model, monkeypatch)
    model = model.to(device)
    layout, documents = lay_out(name, make_documents())
    tokens = sum(len(document) - 1 for document in documents)
    # The truth is stock in evaluation mode; stock reads dt_proj raw, so adapters are compared with ours, each alone.
    truth = copy.deepcopy(model).eval()
    if method.startswith("lora"):
        patch_model(truth)
    singles = [single.to(device) for single in alone(documents) if single.labels.numel() > 1]
    wanted_loss, wanted = gradients(truth, singles, tokens)
    patch_model(model).train()
    if "checkpointing" in method:
        model.gradient_checkpointing_enable()
        if method.startswith("lora"):
            model.enable_input_require_grads()
    loss, got = gradients(model, [layout.to(device)], tokens)
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
    for parameter, gradient in got.items():
        assert gradient.abs().max() > 0, f"{parameter} has no gradient"
        assert relative_error(gradient, wanted[parameter]) < 2 * TOLERANCE, parameter


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", EXACT)
def test_accumulated_rows_give_the_gradient_of_one(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind)).to(device).train()
    documents = make_documents()
    tokens = sum(len(document) - 1 for document in documents)
    halves = [packed(documents[:3]).to(device), packed(documents[3:]).to(device)]
    wanted_loss, wanted = gradients(model, [packed(documents).to(device)], tokens)
    loss, got = gradients(model, halves, tokens)
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
    for parameter, gradient in got.items():
        assert relative_error(gradient, wanted[parameter]) < 2 * TOLERANCE, parameter


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", EXACT)
def test_changing_one_document_moves_nothing_in_the_others(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind)).to(device).train()
    documents = make_documents()
    with torch.no_grad():
        before = packed(documents).cut(run(model, packed(documents).to(device)).logits)
        documents[2] = documents[2].flip(0)
        after = packed(documents).cut(run(model, packed(documents).to(device)).logits)
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [True, True, False, True, True, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("name", ["packed", "left pads"])
@pytest.mark.parametrize("kind", EXACT)
def test_bfloat16_is_no_worse_than_stock(kind: str, name: str, autocast: bool, device: str) -> None:
    """bf16 weights with float32 SSM parameters, or float32 weights under autocast: within twice stock's own bf16
    noise.
    """
    model = tiny_model(kind).to(device)
    layout, documents = lay_out(name, make_documents())
    documents = [document.to(device) for document in documents]
    truth = stock_logits(model, documents)
    noise = worst(stock_logits(copy.deepcopy(model).bfloat16(), documents), truth)
    family = family_of(model.config.model_type)
    if not autocast:
        for parameter_name, parameter in model.named_parameters():
            if not family.is_ssm_parameter(parameter_name):
                parameter.data = parameter.data.bfloat16()
    patch_model(model)
    for training in (False, True):
        model.train(training)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
            got = layout.cut(run(model, layout.to(device)).logits)
        assert worst(got, truth) < 2 * noise
