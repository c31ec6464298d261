"""4-bit and 8-bit base weights on the CPU: what is packed, what it computes, that it trains, and refusals."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from original_layouts import write_state_spaces
from tiny import KINDS, PURE, tiny_model
from transformers import DynamicCache

from ssm_tune.adapter import apply_adapter
from ssm_tune.families import family_of
from ssm_tune.mixers import unpatch_model
from ssm_tune.model import load_model, model_report
from ssm_tune.recipe import AdapterSection, RecipeError
from ssm_tune.self_check import TOLERANCE, check_model

TOKENS = torch.randint(3, 290, (2, 24), generator=torch.Generator().manual_seed(3))
PACKED = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


def wide_enough(kind: str) -> dict[str, Any]:
    """Rows of 64, which bitsandbytes packs on a CPU."""
    return {"hidden_size": 64, "num_heads": 8} if kind in ("mamba2", "codestral") else {"hidden_size": 64}


def packed_layers(model: Any) -> dict[str, Any]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, PACKED)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", PURE)
def test_packed_model_computes_and_trains(tmp_path: Path, kind: str, bits: int, dtype: str) -> None:
    stock = tiny_model(kind, **wide_enough(kind))
    stock.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype, **{f"load_in_{bits}bit": True})
    packed = packed_layers(model)
    assert {name.rsplit(".", 1)[1] for name in packed} == {"in_proj", "out_proj"}
    exact = dict(stock.named_modules())
    for name, module in packed.items():
        x = torch.randn(9, module.in_features)
        error = (module(x) - exact[name](x)).norm() / exact[name](x).norm()
        assert error < (0.13 if bits == 4 else 0.02), name  # rounding to 4 bits is 9 %
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", ".D", "dt_bias", "dt_proj.bias")):
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, stock.get_parameter(name))

    embeds = model.get_input_embeddings()(TOKENS).detach().requires_grad_(True)
    model.train()(inputs_embeds=embeds, labels=TOKENS, use_cache=False).loss.backward()
    assert embeds.grad.abs().min(dim=-1).values.max() > 0


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_shared_weights_in_8_bits_are_not_packed(tmp_path: Path, kind: str) -> None:
    """Stock packs them, and from the second use on computes with weights 400 times too large."""
    stock = tiny_model(kind)
    stock.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_in_8bit=True)
    exact = dict(stock.named_modules(remove_duplicate=False))
    packed = packed_layers(model)
    assert packed and not any("shared_transf" in name for name in packed)
    for name, module in packed.items():
        x = torch.randn(9, module.in_features)
        assert (module(x) - exact[name](x)).norm() < 0.02 * exact[name](x).norm(), name
    difference = (logits_of(model) - logits_of(stock)).abs().max()
    assert difference < 0.25 * logits_of(stock).abs().max()


def test_narrow_rows_in_4_bits_are_not_packed_on_a_cpu(tmp_path: Path, caplog: Any) -> None:
    tiny_model("mamba").save_pretrained(tmp_path)  # in_proj has rows of 32, out_proj of 64
    model = load_model(tmp_path, load_in_4bit=True, device="cpu")
    assert {name.rsplit(".", 1)[1] for name in packed_layers(model)} == {"out_proj"}
    assert "in_proj" in caplog.text and "multiple of 64" in caplog.text


def test_eval_mode_does_not_repack_4_bit_weights(tmp_path: Path) -> None:
    """bitsandbytes' AVX512-BF16 path changes the weights at the first forward, after which merging makes garbage."""
    tiny_model("mamba2", hidden_size=64, num_heads=8).save_pretrained(tmp_path)
    model = load_model(tmp_path, load_in_4bit=True, dtype="bfloat16", device="cpu")
    before = {name: module.weight.clone() for name, module in packed_layers(model).items()}
    logits_of(model.eval())
    for name, module in packed_layers(model).items():
        assert torch.equal(module.weight, before[name]), name
        assert module.support_avx512bf16_for_cpu is False
    plain = unpatch_model(model).dequantize(dtype=torch.float32)
    assert not packed_layers(plain)


def test_rescaling_switch_leaves_packed_weights_alone(tmp_path: Path) -> None:
    stock = tiny_model("mamba", hidden_size=64, rescale_prenorm_residual=True)
    stock.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_in_4bit=True, device="cpu")
    x = torch.randn(9, 128)
    exact = stock.backbone.layers[0].mixer.out_proj(x)
    assert (model.backbone.layers[0].mixer.out_proj(x) - exact).norm() < 0.13 * exact.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_report_counts_packed_weights_in_full(tmp_path: Path, bits: int) -> None:
    stock = tiny_model("mamba", hidden_size=64)
    stock.save_pretrained(tmp_path)
    report = model_report(load_model(tmp_path, device="cpu", **{f"load_in_{bits}bit": True}))
    plain = model_report(stock)
    assert report.total == plain.total
    assert report.quantized and not plain.quantized
    packed = 2 * (64 * 256 + 128 * 64)
    assert report.dtypes["4-bit" if bits == 4 else "int8"] == packed
    assert report.memory < plain.memory - 2 * packed


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_that_is_quantised_already(tmp_path: Path, bits: int) -> None:
    tiny_model("mamba2", hidden_size=64, num_heads=8).save_pretrained(tmp_path / "a")
    first = load_model(tmp_path / "a", device="cpu", **{f"load_in_{bits}bit": True})
    first.save_pretrained(tmp_path / "b")
    again = load_model(tmp_path / "b", device="cpu")
    assert packed_layers(again).keys() == packed_layers(first).keys()
    assert (logits_of(again) - logits_of(first)).abs().max() < 1e-5
    with pytest.raises(RecipeError, match="quantised already"):
        load_model(tmp_path / "b", load_in_4bit=True)
    with pytest.raises(RecipeError, match="only adapters"):
        load_model(tmp_path / "b", trainable="full")


def test_an_original_folder_in_4_bits(tmp_path: Path) -> None:
    source = tiny_model("mamba2", hidden_size=64, num_heads=8, vocab_size=304)
    write_state_spaces(tmp_path / "original", source)
    source.save_pretrained(tmp_path / "hf")
    models = [load_model(tmp_path / name, device="cpu", load_in_4bit=True) for name in ("original", "hf")]
    assert len(packed_layers(models[0])) == 4
    assert torch.equal(logits_of(models[0]), logits_of(models[1]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_the_recurrence_are_raised_and_nothing_else(tmp_path: Path, kind: str, bits: int) -> None:
    """PEFT's preparation would raise the embeddings, the head and the convolutions too."""
    tiny_model(kind, **(wide_enough(kind) if kind in PURE else {})).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device="cpu", **{f"load_in_{bits}bit": True})
    family = family_of(model.config.model_type)
    assert packed_layers(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            raised = "norm" in name or family.is_ssm_parameter(name)
            assert parameter.dtype == (torch.float32 if raised else torch.bfloat16), name
    assert model.train()(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.isfinite()
    whole = logits_of(model.eval())
    cache = DynamicCache(config=model.config)
    keyword = "cache" if kind in PURE else "past_key_values"
    with torch.no_grad():
        parts = [
            model(input_ids=part, use_cache=True, **{keyword: cache}).logits.float()
            for part in TOKENS.split([20, 1, 1, 1, 1], dim=1)
        ]
    difference = (torch.cat(parts, dim=1) - whole).norm() / whole.norm()
    assert difference < (1e-3 if bits == 4 else 0.05)  # in 8 bits a row's inputs are rounded by its largest


def test_what_was_raised_follows_the_model_to_another_dtype(tmp_path: Path) -> None:
    tiny_model("nemotron_h").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device="cpu", load_in_4bit=True)
    logits_of(unpatch_model(model).dequantize(dtype=torch.float32).float())


def test_rounding_in_8_bits_passes_the_self_check(tmp_path: Path) -> None:
    """On a CPU bitsandbytes rounds activations in evaluation and not in training: no reason to refuse a run."""
    tiny_model("zamba").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", load_in_8bit=True)
    found = check_model(model, nullcontext, isolate=True)
    assert max(found.values()) > TOLERANCE[torch.float32]


def test_dora_in_8_bits_is_refused_on_a_cpu(tmp_path: Path) -> None:
    """PEFT loses the scales there after the first step: an AttributeError in the middle of a run."""
    tiny_model("mamba").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", load_in_8bit=True)
    with pytest.raises(RecipeError, match="DoRA cannot be had on weights in 8 bits"):
        apply_adapter(model, AdapterSection(use_dora=True))
    apply_adapter(model, AdapterSection())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "Choose one"),
        ({"load_in_4bit": True, "trainable": "full"}, "model.load_in_4bit: quantised weights cannot be trained"),
        ({"load_in_8bit": True, "trainable": "full"}, "model.load_in_8bit: quantised weights cannot be trained"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    tiny_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=said):
        load_model(tmp_path, **options)


def test_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("mamba").save_pretrained(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="needs bitsandbytes"):
        load_model(tmp_path, load_in_4bit=True)
