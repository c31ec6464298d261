"""Merging: equal logits in plain transformers, checked before writing; tied heads; whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import logits, stir, write_facts
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from tiny import HYBRID, PURE, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssm_tune.adapter import apply_adapter, guard_lifted
from ssm_tune.mixers import patch_model, unpatch_model
from ssm_tune.outputs import merge
from ssm_tune.outputs.merge import merge_adapter, merge_run
from ssm_tune.recipe import AdapterSection, RecipeError
from ssm_tune.run_folder import RunFolder

MakeRun = Callable[..., tuple[Path, Any]]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "train_also": {"train_also": ["A_log", "D", "dt_bias", "conv1d"]},
    "embeddings": {"modules_to_save": ["embeddings"]},
    "head": {"modules_to_save": ["lm_head", "norm_f"]},
}


EVERY_KIND = ("lora", "dora", "train_also")


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for method in METHODS for kind in (PURE if method in EVERY_KIND else ("mamba", "codestral"))],
)
def test_merged_is_the_adapter_in_plain_transformers(kind: str, method: str, make_run: MakeRun) -> None:
    folder, trained = make_run(kind, **METHODS[method])
    target = merge_run(folder)
    assert target == folder / "merged"
    plain = AutoModelForCausalLM.from_pretrained(target)
    assert (logits(plain) - logits(trained)).abs().max() <= 1e-5
    assert type(plain).__module__.startswith("transformers.")


@pytest.mark.parametrize("kind", HYBRID)
def test_hybrids_merge_too(kind: str, tmp_path: Path) -> None:
    model = apply_adapter(patch_model(tiny_model(kind)), AdapterSection(r=4, lora_alpha=8))
    stir(model)
    before = logits(model.eval())
    unpatch_model(merge_adapter(model)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (logits(plain) - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_head_stays_tied_where_it_can(kind: str, tied: bool, make_run: MakeRun) -> None:
    folder, trained = make_run(kind, model={"tie_word_embeddings": tied})
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder))
    assert plain.config.tie_word_embeddings == tied
    assert (plain.lm_head.weight is plain.backbone.embeddings.weight) == tied
    assert (logits(plain) - logits(trained)).abs().max() <= 1e-5


@pytest.mark.parametrize("module", ["lm_head", "embeddings"])
def test_tied_head_is_parted_where_one_side_is_trained(
    module: str, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder, trained = make_run("mamba", modules_to_save=[module])
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder))
    assert plain.config.tie_word_embeddings is False
    assert (logits(plain) - logits(trained)).abs().max() <= 1e-5
    assert "stored apart" in caplog.text


@pytest.mark.parametrize("target", ["lm_head", "embeddings"])
def test_lora_on_a_tied_head_changes_that_side_only(target: str) -> None:
    """Such adapters come from elsewhere; PEFT's own merge would change head and embedding both."""
    with guard_lifted():
        model = get_peft_model(patch_model(tiny_model("mamba")), LoraConfig(target_modules=[target, "in_proj"], r=4))
    stir(model)
    before = logits(model.eval())
    embedding = model.get_input_embeddings().weight.clone()
    merged = merge_adapter(model)
    assert (logits(merged) - before).abs().max() <= 1e-5
    assert torch.equal(merged.get_input_embeddings().weight, embedding) == (target == "lm_head")
    assert merged.config.tie_word_embeddings is False


def test_adapters_on_a_shared_weight_are_not_merged() -> None:
    """zamba2 uses one block several times; PEFT adapts each use and would add all of them to the one weight."""
    model = get_peft_model(tiny_model("zamba2"), LoraConfig(target_modules=["q_proj"], r=4))
    stir(model)
    with pytest.raises(RecipeError, match="logits differ"):
        merge_adapter(model)


def test_nothing_is_written_when_the_logits_differ(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_run("mamba")
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(merge, "_TOLERANCE", 0.0)
    with pytest.raises(RecipeError, match="Nothing was written"):
        merge_run(folder)
    assert sorted(folder.rglob("*")) == before


def test_nothing_is_left_when_writing_fails(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make_run("mamba")
    before = sorted(folder.rglob("*"))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge, "write_merged_card", fail)
    with pytest.raises(RecipeError, match="No space left"):
        merge_run(folder)
    assert sorted(folder.rglob("*")) == before


def test_an_existing_path_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    folder, _ = make_run("mamba")
    (tmp_path / "there").mkdir()
    with pytest.raises(RecipeError, match="exists already"):
        merge_run(folder, tmp_path / "there")


def test_dtype_is_as_asked_and_ssm_parameters_stay_float32(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    folder, trained = make_run("mamba")
    target = merge_run(folder, dtype="bfloat16")
    with safe_open(target / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            kept = name.endswith(("A_log", ".D", "dt_proj.bias"))
            assert tensors.get_tensor(name).dtype == (torch.float32 if kept else torch.bfloat16), name
    assert "rounding the merged weights to bfloat16" in caplog.text
    plain = AutoModelForCausalLM.from_pretrained(target)
    assert plain.dtype == torch.bfloat16
    assert (logits(plain) - logits(trained)).norm() / logits(trained).norm() < 0.05


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize("kind", ["mamba", "codestral"])
def test_a_quantised_base_is_dequantised(
    bits: str, kind: str, make_run: MakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bitsandbytes")
    folder, trained = make_run(kind, keys={bits: True})
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder, tmp_path / "exact", dtype="float32"))
    # in 8 bits activations are rounded too, which a plain model does not do
    bound = 1e-5 if bits == "load_in_4bit" else 0.1
    assert (logits(plain) - logits(trained)).abs().max() <= bound * logits(trained).abs().max()
    assert "the base is quantised" in caplog.text
    with safe_open(merge_run(folder) / "model.safetensors", framework="pt") as tensors:
        assert tensors.get_tensor("backbone.layers.0.mixer.in_proj.weight").dtype == torch.bfloat16


def test_a_quantised_base_whose_embedding_is_trained(make_run: MakeRun) -> None:
    """The norms of a packed model are held in float32; a merged one in 16 bits computes in its own dtype again."""
    pytest.importorskip("bitsandbytes")
    folder, _ = make_run("bamba", keys={"load_in_4bit": True}, modules_to_save=["embed_tokens"])
    assert logits(AutoModelForCausalLM.from_pretrained(merge_run(folder))).isfinite().all()


def test_a_run_trained_in_16_bit_is_merged_from_what_it_was_trained_on(make_run: MakeRun, tmp_path: Path) -> None:
    """Its frozen weights were rounded when it was trained on a GPU: merging into others would be another model."""
    folder, trained = make_run("mamba", keys={"dtype": "bfloat16"})
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder, tmp_path / "exact", dtype="float32"))
    exact = trained.float()
    assert (logits(plain) - logits(exact)).abs().max() <= 1e-5
    write_facts(folder, str(tmp_path / "base"))  # no dtype in the recipe: by the device
    (folder / "environment.json").write_text('{"device_type": "cuda"}')
    with safe_open(merge_run(folder) / "model.safetensors", framework="pt") as tensors:
        assert tensors.get_tensor("backbone.embeddings.weight").dtype == torch.bfloat16


def test_full_runs_are_copied_and_said(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    folder, trained = make_run("mamba2", full=True)
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder))
    assert (logits(plain) - logits(trained)).abs().max() <= 1e-5
    assert "has no adapter" in caplog.text


def test_the_merged_folder_is_ready_for_use(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    target = merge_run(folder)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.padding_side == "left"
    assert not (target / "adapter_config.json").exists()
    card = (target / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert "Plain PEFT" not in card
    assert list(folder.glob(".*partial")) == []


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_merged_files_are_as_open_as_the_users_other_files(umask: int, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    before = os.umask(umask)
    try:
        files = [file for file in merge_run(folder).rglob("*") if file.is_file()]
    finally:
        os.umask(before)
    assert any(file.suffix == ".safetensors" for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_no_bars_of_transformers_reach_the_terminal(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_run("mamba")
    capfd.readouterr()
    merge_run(folder)
    printed = capfd.readouterr()
    assert "Loading weights" not in printed.err + printed.out
    assert "Writing model" not in printed.err + printed.out


def test_a_checkpoint_of_a_run_can_be_merged(make_run: MakeRun, tmp_path: Path) -> None:
    folder, trained = make_run("mamba")
    for name in ("run.json", "recipe.resolved.yaml"):
        (folder / name).unlink()
    plain = AutoModelForCausalLM.from_pretrained(merge_run(folder, tmp_path / "out"))
    assert (logits(plain) - logits(trained)).abs().max() <= 1e-5


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_an_unfinished_run_is_refused_with_the_way_to_resume(status: str, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    RunFolder(folder).write_state(status)
    with pytest.raises(RecipeError, match="--resume"):
        merge_run(folder)
