"""load_model: exact in every layout, SSM parameters in float32, one message for what does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layouts import forward_original, original_config, write_mistral, write_state_spaces
from safetensors.torch import load_file, save_file
from tiny import KINDS, PURE, assert_equal_up_to_rounding, save_stock, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, MambaConfig

from ssm_tune.families import family_of
from ssm_tune.mixers import is_patched, patch_model
from ssm_tune.model import load_model, meta_model, model_report, padded_token_ids, read_config, set_trainable
from ssm_tune.recipe import RecipeError

TOKENS = torch.randint(3, 290, (1, 37), generator=torch.Generator().manual_seed(3))


def logits_of(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def assert_same_weights(one: Any, other: Any) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


# -- the original layouts, against forwards that share nothing with the reader ------------------------------------


@pytest.mark.parametrize("safetensors", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba", {}),
        ("mamba", {"tie_embeddings": False}),
        ("mamba2", {}),
        ("mamba2", {"tie_embeddings": False}),
        ("codestral", {}),
    ],
)
def test_original_folder_gives_the_original_logits(
    tmp_path: Path, kind: str, changes: dict[str, Any], safetensors: bool
) -> None:
    tied = changes.get("tie_embeddings", kind != "codestral")
    source = tiny_model(kind, vocab_size=304, tie_word_embeddings=tied)
    tensors = write_state_spaces(tmp_path, source, safetensors=safetensors, **changes)
    model = load_model(tmp_path)
    assert is_patched(model)
    expected = forward_original(tensors, original_config(source)["ssm_cfg"], TOKENS[0])
    logits = logits_of(model)[0]
    assert logits.shape == (37, 304)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (model.lm_head.weight is model.backbone.embeddings.weight) == tied


def test_the_oracle_sees_a_wrong_embedding(tmp_path: Path) -> None:
    """What stock transformers does with an untied original folder: a random embedding, and no error."""
    source = tiny_model("mamba2", vocab_size=304, tie_word_embeddings=False)
    tensors = write_state_spaces(tmp_path, source, tie_embeddings=False)
    expected = forward_original(tensors, original_config(source)["ssm_cfg"], TOKENS[0])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, config=source.config)
    assert (logits_of(stock)[0] - expected).abs().max() > 0.1 * expected.abs().max()


def test_codestral_gives_the_original_logits(tmp_path: Path) -> None:
    source = tiny_model("codestral", num_heads=2, head_dim=64, n_groups=2, state_size=128, vocab_size=304)
    tensors = write_mistral(tmp_path, source)
    ssm = {"layer": "Mamba2", "d_state": 128, "headdim": 64, "ngroups": 2}
    unprefixed = {name.removeprefix("model."): value for name, value in tensors.items()}
    expected = forward_original(unprefixed, ssm, TOKENS[0])
    assert (logits_of(load_model(tmp_path))[0] - expected).abs().max() <= 2e-5 * expected.abs().max()


# -- Hugging Face's layout, all families ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_load_save_load_is_equal_to_the_bit(tmp_path: Path, kind: str) -> None:
    stock = save_stock(kind, tmp_path / "stock")
    first = load_model(tmp_path / "stock")
    assert_same_weights(stock, first)
    first.save_pretrained(tmp_path / "saved")
    assert_same_weights(first, load_model(tmp_path / "saved"))
    assert type(first).__name__ == type(stock).__name__
    assert (logits_of(first) - logits_of(stock)).abs().max() <= 1e-4 * logits_of(stock).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_ssm_parameters_stay_float32_in_a_bfloat16_model(tmp_path: Path, kind: str) -> None:
    stock = save_stock(kind, tmp_path / "stock")
    family = family_of(stock.config.model_type)
    model = load_model(tmp_path / "stock", dtype="bfloat16")
    exact = dict(stock.named_parameters())
    kept = 0
    for name, parameter in model.named_parameters():
        if family.is_ssm_parameter(name):
            kept += 1
            assert parameter.dtype == torch.float32, name
            assert torch.equal(parameter, exact[name]), f"{name} was rounded on its way"
        elif "e_score_correction_bias" not in name and "gate" not in name:
            assert torch.equal(parameter, exact[name].to(parameter.dtype)), name
            assert parameter.dtype == torch.bfloat16, name
    assert (kept > 0) == bool(family.ssm_parameters)
    assert torch.isfinite(logits_of(model)).all()
    model.save_pretrained(tmp_path / "saved")
    assert_same_weights(model, load_model(tmp_path / "saved", dtype="bfloat16"))
    stored = {name for name, value in load_file(tmp_path / "saved" / "model.safetensors").items()
              if family.is_ssm_parameter(name) and value.dtype != torch.float32}  # fmt: skip
    assert not stored
    leftover = vars(type(stock)).get("_keep_in_fp32_modules_strict") or ()
    assert not any("A_log" in pattern for pattern in leftover), "the class of every other user has changed"


@pytest.mark.parametrize("kind", [*PURE, "nemotron_h"])
def test_loading_never_rescales(tmp_path: Path, kind: str) -> None:
    """rescale_prenorm_residual divides out_proj at birth; stock does so again at every load."""
    stock = save_stock(kind, tmp_path / "a", rescale_prenorm_residual=True)
    model = load_model(tmp_path / "a")
    assert_same_weights(stock, model)
    assert model.config.rescale_prenorm_residual is True
    model.save_pretrained(tmp_path / "b")
    assert_same_weights(stock, load_model(tmp_path / "b"))


def test_a_pickle_in_hugging_faces_layout(tmp_path: Path) -> None:
    stock = tiny_model("mamba2")
    stock.config.save_pretrained(tmp_path)
    torch.save(stock.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_weights(stock, load_model(tmp_path))


def test_the_original_name_of_the_embedding_in_hugging_faces_layout(tmp_path: Path) -> None:
    """Seen in folders that were converted by hand; stock leaves the embedding random."""
    stock = save_stock("mamba2", tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_weights(stock, load_model(tmp_path))


def test_generation_settings_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    stock = tiny_model("mamba")
    stock.generation_config.eos_token_id = [2, 7]
    stock.save_pretrained(tmp_path)
    assert load_model(tmp_path).generation_config.eos_token_id == [2, 7]


def test_a_head_that_differs_from_the_embedding_it_claims_to_be_tied_to(tmp_path: Path, caplog: Any) -> None:
    stock = save_stock("mamba", tmp_path / "a", tie_word_embeddings=False)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = load_model(tmp_path / "a")
    assert "differs" in caplog.text
    assert_same_weights(stock, model)
    model.save_pretrained(tmp_path / "b")
    assert_same_weights(stock, load_model(tmp_path / "b"))


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32), (None, None)])
def test_dtype(tmp_path: Path, dtype: str | None, expected: torch.dtype | None) -> None:
    tiny_model("mamba").to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    default = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert model.backbone.norm_f.weight.dtype == (expected or default)
    assert model.config.dtype == (expected or default)


def test_a_dtype_that_is_none(tmp_path: Path) -> None:
    save_stock("mamba", tmp_path)
    with pytest.raises(RecipeError, match="Did you mean bfloat16"):
        load_model(tmp_path, dtype="bfloat")
    with pytest.raises(RecipeError, match=r"model\.dtype"):
        load_model(tmp_path, dtype=torch.int8)


@pytest.mark.parametrize("kind", ["mamba", "zamba2"])
def test_trainable(tmp_path: Path, kind: str) -> None:
    save_stock(kind, tmp_path)
    full = load_model(tmp_path, dtype="bfloat16", trainable="full")
    assert {parameter.dtype for parameter in full.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in full.parameters())
    frozen = load_model(tmp_path, dtype="bfloat16", trainable="none")
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    set_trainable(frozen, "full")
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in frozen.parameters())
    with pytest.raises(ValueError, match="trainable"):
        load_model(tmp_path, trainable="lora")


def test_attn_implementation(tmp_path: Path) -> None:
    save_stock("bamba", tmp_path)
    assert load_model(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(RecipeError, match="attn_implementation"):
        load_model(tmp_path, attn_implementation="nonsense")


# -- without weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_meta_model_without_weights(tmp_path: Path, kind: str) -> None:
    stock = save_stock(kind, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_config(tmp_path)
    assert config.model_type == stock.config.model_type
    model = meta_model(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
    assert not is_patched(model)


def test_meta_model_patched() -> None:
    assert is_patched(meta_model(tiny_model("mamba").config, patched=True))


def test_report(tmp_path: Path) -> None:
    stock = save_stock("mamba", tmp_path)
    model = load_model(tmp_path, dtype="bfloat16")
    report = model_report(model)
    total = sum(parameter.numel() for parameter in stock.parameters())
    full = sum(p.numel() for name, p in stock.named_parameters() if name.endswith(("A_log", ".D", "dt_proj.bias")))
    assert (report.total, report.trainable) == (total, total)
    assert report.dtypes == {"bfloat16": total - full, "float32": full}
    assert report.dtype == "bfloat16"
    assert report.memory == 2 * (total - full) + 4 * full
    assert (report.model_type, report.name, report.quantized) == ("mamba", str(tmp_path), False)


def test_padded_rows_are_those_without_a_token() -> None:
    tokenizer = tiny_tokenizer()
    model = patch_model(tiny_model("mamba"))
    assert padded_token_ids(model, tokenizer) == list(range(262, 300))
    with torch.no_grad():
        model.lm_head.weight[262:] *= 100  # rows that nobody trained may be anything
    prompt = {"input_ids": TOKENS[:, :5], "max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(0)
    assert (model.generate(**prompt)[0] >= 262).any()
    assert (model.generate(**prompt, suppress_tokens=padded_token_ids(model, tokenizer))[0, 5:] < 262).all()


# -- run folders ---------------------------------------------------------------------------------------------------


def test_a_run_folder_with_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_stock("mamba", tmp_path / "base")
    base = load_model(tmp_path / "base")
    torch.manual_seed(1)
    tuned = get_peft_model(base, LoraConfig(target_modules=["in_proj"], init_lora_weights=False, lora_dropout=0.5))
    tuned.eval().save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"status": "complete"}))
    loaded = load_model(tmp_path / "run")
    assert_equal_up_to_rounding(logits_of(loaded), logits_of(tuned))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert read_config(tmp_path / "run").model_type == "mamba"
    with pytest.raises(RecipeError, match="merge"):
        load_model(tmp_path / "run", trainable="full")


def test_a_moved_run_that_kept_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    run = tmp_path / "run"
    save_stock("mamba", run / "base_model")
    tuned = get_peft_model(load_model(run / "base_model"), LoraConfig(target_modules=["in_proj"]))
    tuned.save_pretrained(run)
    tuned.save_pretrained(run / "checkpoints" / "checkpoint-2")
    expected = logits_of(tuned.eval())
    run.rename(tmp_path / "moved")
    for folder in (tmp_path / "moved", tmp_path / "moved" / "checkpoints" / "checkpoint-2"):
        assert_equal_up_to_rounding(logits_of(load_model(folder)), expected)


def test_a_run_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "stopped"}))
    with pytest.raises(RecipeError, match="has not finished"):
        load_model(tmp_path)


def test_an_adapter_whose_base_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match="base_model_name_or_path"):
        load_model(tmp_path)


# -- classes that are not supported --------------------------------------------------------------------------------


def test_a_model_type_outside_the_families(tmp_path: Path) -> None:
    config = {**MambaConfig(hidden_size=8, num_hidden_layers=1).to_dict(), "model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(RecipeError, match="'gpt2'"):
        load_model(tmp_path)


def test_math_of_the_oracle() -> None:
    """One channel-free case by hand: with A = -inf the state holds one token, so logits of a repeated token repeat."""
    source = tiny_model("mamba", num_hidden_layers=1)
    tensors = {name: value.clone() for name, value in write_tensors(source).items()}
    tensors["backbone.layers.0.mixer.A_log"].fill_(math.log(1e9))
    logits = forward_original(tensors, {}, torch.full((8,), 5))
    assert torch.allclose(logits[4], logits[7])
    assert not torch.allclose(logits[0], logits[7])  # the convolution has not filled yet


def write_tensors(model: Any) -> dict[str, torch.Tensor]:
    from original_layouts import original_tensors

    return original_tensors(model)
