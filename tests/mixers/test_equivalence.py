"""What is trained is what is evaluated, and documents do not see each other: every exact family, on the kernels really
used.

The truth is the stock model in evaluation mode with each document alone, on the CPU. The same file runs on the CPU
and, with `-m gpu`, on a GPU (set TRITON_F32_DEFAULT=ieee there: Triton's float32 matrix products run in TF32
otherwise). Most of the widths here are not multiples of eight, which stock's kernels refuse and ours go round.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows import (
    LAYOUTS,
    LENGTHS,
    Layout,
    alone,
    alone_logits,
    in_pytorch,
    make_documents,
    order_of,
    packed,
    run,
    worst,
    worst_gradient,
)
from tiny import EIGHT_HEADS, KINDS, tiny_config, tiny_model
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from ssm_tune.adapter import guard_lifted
from ssm_tune.families import family_of
from ssm_tune.mixers import patch_model

_MULTIPLIERS = {
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.05],
    "lm_head_multiplier": 0.5,
}
EXACT = [kind for kind in KINDS if family_of(tiny_config(kind).model_type).exact]
# Switches of a config that change what is computed.
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba": {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False},
    "falcon_mamba": {"use_bias": True, "tie_word_embeddings": False},
    "mamba2": {"use_bias": True, "time_step_limit": (0.002, 0.02)},
    "jamba": {"num_experts": 1, "mamba_proj_bias": True},
    "zamba": {"n_mamba_heads": 4, "mamba_proj_bias": True},
    "zamba2": {"mamba_ngroups": 2, "num_mem_blocks": 2, "use_mem_rope": False, "add_bias_linear": True},
    "bamba": {"mamba_n_groups": 2, "time_step_limit": (0.002, 0.02)},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2, **_MULTIPLIERS},
    "falcon_h1, gate first": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    "nemotron_h": {"n_groups": 2, "use_bias": True, "time_step_min": 0.01},
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    "lfm2": {"conv_bias": True, "conv_L_cache": 4},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-5
# Of a gradient that is a sum over all tokens which nearly cancel (D's, a bias's), in another order: on a processor with
# other vector instructions (1.04e-5 on one), on a GPU.
IN_ANOTHER_ORDER = {"cpu": 2e-5, "cuda": 4e-5}
TOKENS = sum(length - 1 for length in LENGTHS)
METHODS = ["full", "lora", "lora, checkpointing", "full, checkpointing"]
TRAINED = ("plain", "packed", "packed rows", "left pads", "right pads")


def gradients(model: Any, layouts: list[Layout], tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss summed over layouts and every trainable parameter's gradient."""
    model.zero_grad()
    total = 0.0
    for layout in layouts:
        loss = run(model, layout, tokens).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@cache
def stock_gradients(kind: str, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The truth for full training: stock in evaluation mode, each document alone; computed once."""
    if device != "cpu":
        loss, found = stock_gradients(kind, "cpu")
        return loss, {name: gradient.to(device) for name, gradient in found.items()}
    return gradients(tiny_model(kind), singles(device), TOKENS)


def singles(device: str) -> list[Layout]:
    """The documents that have labels, each alone."""
    return [layout.to(device) for layout in alone(make_documents()) if layout.labels.numel() > 1]


def laid_out(name: str, device: str) -> list[Layout]:
    """The documents in a layout of that name; plain: each that has labels in a batch of its own."""
    return singles(device) if name == "plain" else [LAYOUTS[name](make_documents()).to(device)]


def in_training(model: Any, method: str, device: str) -> Any:
    """The model patched, on the device, in training mode, with gradient checkpointing if the method says so."""
    patch_model(model).to(device).train()
    if "checkpointing" in method:
        model.gradient_checkpointing_enable()
        if method.startswith("lora"):
            model.enable_input_require_grads()
    return model


def with_adapters(model: Any) -> Any:
    """LoRA on every projection of the mixers, neither half zero."""
    family = family_of(model.config.model_type)
    with guard_lifted():
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=list(family.projections), lora_dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.mark.parametrize("kind", ["mamba2", "lfm2"])
def test_the_truth_on_a_cpu_uses_no_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where causal_conv1d is installed: transformers' decorator binds its function, which fails for a CPU."""

    def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise RuntimeError("Expected x.is_cuda() to be true")

    truth, model, layout = alone_logits(kind), tiny_model(kind), next(alone(make_documents()))
    package = ModuleType("causal_conv1d")
    package.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    stock = sys.modules[type(model).__module__]
    decorate = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
    monkeypatch.setattr(stock, "causal_conv1d_fn", decorate(in_pytorch(stock.causal_conv1d_fn)))
    with pytest.raises(RuntimeError, match="is_cuda"):
        model(**layout.inputs)
    assert torch.equal(run(model, layout).logits[0], truth[0])
    with pytest.raises(RuntimeError, match="is_cuda"):
        model(**layout.inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", EXACT)
def test_logits_are_those_of_each_document_alone(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind)).to(device)
    truth = alone_logits(kind, device)
    for name, lay_out in LAYOUTS.items():
        layout = lay_out(make_documents()).to(device)
        wanted = [truth[n] for n in order_of(layout)]
        for training in (False, True):
            model.train(training)
            with torch.no_grad():
                got = layout.cut(run(model, layout).logits)
            assert worst(got, wanted) < TOLERANCE, f"{name}, {'train' if training else 'eval'}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", EXACT)
def test_gradients_are_those_of_each_document_alone(kind: str, method: str, device: str) -> None:
    """Stock in evaluation mode is the truth; it reads dt_proj raw, so adapters are compared with ours, each alone."""
    model = tiny_model(kind)
    if method.startswith("lora"):
        model = with_adapters(model)
        truth = patch_model(copy.deepcopy(model)).to(device).eval()
        wanted_loss, wanted = gradients(truth, singles(device), TOKENS)
    else:
        wanted_loss, wanted = stock_gradients(kind, device)
    in_training(model, method, device)
    for name in TRAINED if method != "full, checkpointing" else ("packed", "left pads"):
        loss, got = gradients(model, laid_out(name, device), TOKENS)
        assert loss == pytest.approx(wanted_loss, rel=TOLERANCE), name
        assert [parameter for parameter, gradient in got.items() if not gradient.any()] == []
        error, parameter = worst_gradient(got, wanted)
        assert error < TOLERANCE, f"{name}: {parameter}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_switches_of_the_config(variant: str, device: str) -> None:
    """Logits and gradients in training, packed, and padded on the left, against each document alone in stock."""
    model = tiny_model(variant.split(",")[0], **VARIANTS[variant])
    with torch.no_grad():
        wanted_logits = [run(model, layout).logits[0].to(device) for layout in alone(make_documents())]
    wanted_loss, wanted = gradients(model, singles("cpu"), TOKENS)
    wanted = {name: gradient.to(device) for name, gradient in wanted.items()}
    patch_model(model).to(device).train()
    for name in ("packed", "left pads"):
        layout = LAYOUTS[name](make_documents()).to(device)
        with torch.no_grad():
            assert worst(layout.cut(run(model, layout).logits), wanted_logits) < TOLERANCE, name
        loss, got = gradients(model, [layout], TOKENS)
        assert loss == pytest.approx(wanted_loss, rel=TOLERANCE), name
        error, parameter = worst_gradient(got, wanted)
        assert error < IN_ANOTHER_ORDER[device], f"{name}: {parameter}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", EXACT)
def test_accumulated_rows_give_the_gradient_of_one(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind)).to(device).train()
    documents = make_documents()
    halves = [packed(documents[:3]).to(device), packed(documents[3:]).to(device)]
    wanted_loss, wanted = gradients(model, [packed(documents).to(device)], TOKENS)
    loss, got = gradients(model, halves, TOKENS)
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
    error, parameter = worst_gradient(got, wanted)
    assert error < TOLERANCE, parameter


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
@pytest.mark.parametrize("kind", EXACT)
def test_bfloat16_is_no_worse_than_stock(kind: str, device: str) -> None:
    """bf16 weights with float32 SSM parameters, or float32 weights under autocast: within twice stock's own bf16
    noise.
    """
    changes = EIGHT_HEADS.get(kind, {})
    truth = alone_logits(kind, device, **changes)
    low = tiny_model(kind, **changes).bfloat16().to(device)
    with torch.no_grad():
        noise = worst([run(low, layout.to(device)).logits[0] for layout in alone(make_documents())], truth)
    mixed = tiny_model(kind, **changes).to(device)
    family = family_of(mixed.config.model_type)
    for name, parameter in mixed.named_parameters():
        if not family.is_ssm_parameter(name):
            parameter.data = parameter.data.bfloat16()
    for model, autocast in ((mixed, False), (tiny_model(kind, **changes).to(device), True)):
        patch_model(model)
        for training in (False, True):
            model.train(training)
            for name in ("packed", "left pads"):
                layout = LAYOUTS[name](make_documents()).to(device)
                with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
                    got = layout.cut(run(model, layout).logits)
                assert worst(got, truth) < 2 * noise, f"{name}, autocast {autocast}, training {training}"


def model_for_bfloat16(kind: str, adapted: bool) -> Any:
    """Float32 still; the same weights for the same arguments."""
    model = tiny_model(kind, **EIGHT_HEADS.get(kind, {}))
    torch.manual_seed(0)
    return with_adapters(model) if adapted else model


@cache
def gradients_and_noise(kind: str, adapted: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients in float32, and the worst relative error that stock makes in bf16, with each document alone.

    Of an adapter that stock passes by (dt_proj's) there is no noise to go by: the worst of the others counts.
    """
    wanted = gradients(patch_model(model_for_bfloat16(kind, adapted)), singles("cpu"), TOKENS)[1]
    stock = model_for_bfloat16(kind, adapted).bfloat16()
    for single in singles("cpu"):
        run(stock, single, TOKENS).loss.backward()
    rough = {name: p.grad.float() for name, p in stock.named_parameters() if p.grad is not None}
    return wanted, worst_gradient(rough, {name: wanted[name] for name in rough})[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["full", "lora", "lora, checkpointing"])
@pytest.mark.parametrize("kind", EXACT)
def test_bfloat16_gradients_are_no_worse_than_stock(kind: str, method: str, device: str) -> None:
    """bf16 weights with float32 SSM parameters and adapters: within twice stock's own bf16 noise."""
    adapted = method.startswith("lora")
    wanted, noise = gradients_and_noise(kind, adapted)
    model = model_for_bfloat16(kind, adapted)
    family = family_of(model.config.model_type)
    for name, parameter in model.named_parameters():
        if not family.is_ssm_parameter(name) and ".lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    in_training(model, method, device)
    for name in ("plain", "packed", "left pads", "right pads"):
        got = gradients(model, laid_out(name, device), TOKENS)[1]
        error, parameter = worst_gradient({key: value.float().cpu() for key, value in got.items()}, wanted)
        assert error < 2 * noise, f"{name}: {parameter}"
