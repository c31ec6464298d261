"""Adapters: targets found before weights are loaded, the PEFT guard, saving and strict loading, train_also."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finished import logits, stir
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import HYBRID, KINDS, PURE, assert_equal_up_to_rounding, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from ssm_tune.adapter import (
    apply_adapter,
    check_targets,
    guard_allows,
    guard_lifted,
    load_adapter,
    restore_adapter,
    save_adapter,
)
from ssm_tune.families import FAMILIES, family_of
from ssm_tune.mixers import patch_model
from ssm_tune.recipe import RecipeError
from ssm_tune.ssm_parameters import find_ssm_parameters
from ssm_tune.targets import adapter_targets, find_targets


def section(**changes: Any) -> Any:
    """An adapter section of a recipe."""
    keys = {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    return SimpleNamespace(**{**keys, "modules_to_save": None, "targets": "all", "train_also": [], **changes})


def meta_model(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind))


# -- targets -------------------------------------------------------------------------------------------------------

ALL = {
    "mamba": "in_proj x_proj dt_proj out_proj",
    "falcon_mamba": "in_proj x_proj dt_proj out_proj",
    "mamba2": "in_proj out_proj",
    "codestral": "in_proj out_proj",
    "bamba": "in_proj out_proj q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "falcon_h1": "in_proj out_proj q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "nemotron_h": "in_proj out_proj q_proj k_proj v_proj o_proj up_proj down_proj",
    "granitemoehybrid": "in_proj out_proj q_proj k_proj v_proj o_proj input_linear output_linear",
}


@pytest.mark.parametrize("kind", ALL)
def test_all_is_every_projection(kind: str) -> None:
    assert set(adapter_targets(meta_model(kind), "all")) == set(ALL[kind].split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["all", "portable"])
def test_targets_reach_every_ssm_layer_and_the_head_never(kind: str, targets: str) -> None:
    model = meta_model(kind)
    paths = find_targets(model, targets).paths
    mixer = family_of(model.config.model_type).mixer
    mixers = [name for name, module in model.named_modules() if type(module).__name__ == mixer]
    assert mixers
    assert [name for name in mixers if not any(path.startswith(name + ".") for path in paths)] == []
    assert "lm_head" not in paths


@pytest.mark.parametrize("kind", KINDS)
def test_short_names_place_adapters_exactly_where_asked(kind: str) -> None:
    """PEFT matches by the end of a name, and rewrites targets for some models; `apply_adapter` raises if it strays."""
    model = tiny_model(kind)
    wanted = set(find_targets(model, "all").paths)
    adapted = apply_adapter(model, section())
    placed = {name.partition(".lora_A")[0] for name, _ in adapted.get_base_model().named_modules() if "lora_A." in name}
    assert placed == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_portable_targets_pass_the_guard_of_unpatched_peft(kind: str) -> None:
    model = meta_model(kind)
    for target in adapter_targets(model, "portable"):
        assert guard_allows(model, target.rpartition(".")[2])


@pytest.mark.parametrize(("kind", "block"), [("zamba", "shared_transf"), ("zamba2", "shared_transformer")])
def test_shared_blocks_are_left_out_and_said(kind: str, block: str) -> None:
    found = find_targets(meta_model(kind), "all")
    assert not any(block in path for path in found.paths)
    assert any(block in name and "2 blocks" in reason for name, reason in found.left_out.items())
    with pytest.raises(RecipeError, match="one weight for 2 blocks"):
        adapter_targets(meta_model(kind), ["q_proj"])


@pytest.mark.parametrize(("kind", "name"), [("zamba", "x_proj_weight"), ("jamba", "experts.gate_up_proj")])
def test_parameters_that_are_not_linear_are_left_out_and_said(kind: str, name: str) -> None:
    left_out = find_targets(meta_model(kind), "all").left_out
    assert any(path.endswith(name) and "not a Linear" in reason for path, reason in left_out.items())


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    apply_adapter(tiny_model("zamba2"), section())
    lines = [record.message for record in caplog.records if "q_proj" in record.message]
    assert len(lines) == 1
    assert "shared_transformer" in lines[0]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["foo_proj"], "'foo_proj' is not in the model"),
        (["out_prj"], "did you mean out_proj? It has: in_proj, x_proj, dt_proj, out_proj."),
        (["conv1d"], "adapter.train_also=[conv1d]"),
        (["embeddings"], "adapter.modules_to_save=[embeddings]"),
        (["lm_head"], "never be trained"),
        (["A_log"], "adapter.train_also=[A_log]"),
        (["mixer"], "a MambaMixer, not a Linear"),
        (["all"], "write adapter.targets=all"),
        ([], "the list is empty"),
        ("al", "'al' is neither all nor portable"),
    ],
)
def test_targets_that_are_not_there_are_explained(targets: Any, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        adapter_targets(meta_model("mamba"), targets)
    assert said in str(error.value)
    assert str(error.value).startswith("adapter.targets: ")


def test_every_wrong_name_is_told_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        adapter_targets(meta_model("mamba"), ["in_proj", "foo", "bar"])
    assert len(error.value.mistakes) == 2


def test_names_may_be_the_ends_of_paths() -> None:
    assert adapter_targets(meta_model("mamba"), ["layers.1.mixer.in_proj"]) == ["backbone.layers.1.mixer.in_proj"]
    assert adapter_targets(meta_model("mamba"), ["mixer.in_proj"]) == ["in_proj"]


def test_targets_that_skip_ssm_layers_are_said(caplog: pytest.LogCaptureFixture) -> None:
    apply_adapter(tiny_model("mamba"), section(targets=["layers.1.mixer.in_proj"]))
    assert "1 state-space layers get no adapter" in caplog.text


def test_what_a_family_refuses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = dataclasses.replace(FAMILIES["mamba"], refused={"dt_proj": "its weight is read raw."})
    monkeypatch.setitem(FAMILIES, "mamba", refusing)
    with pytest.raises(RecipeError, match=r"dt_proj: its weight is read raw"):
        adapter_targets(meta_model("mamba"), ["dt_proj", "in_proj"])
    found = find_targets(meta_model("mamba"), "all")
    assert not any(path.endswith("dt_proj") for path in found.paths)
    assert set(found.left_out.values()) == {"its weight is read raw."}


# -- the guard -----------------------------------------------------------------------------------------------------


def test_guard_is_lifted_in_a_scope_and_a_thread_only() -> None:
    config = LoraConfig(target_modules=["out_proj"])
    other: list[BaseException] = []

    def inject() -> None:
        try:
            get_peft_model(tiny_model("mamba"), config)
        except ValueError as error:
            other.append(error)

    with guard_lifted():
        get_peft_model(tiny_model("mamba"), config)
        thread = threading.Thread(target=inject)
        thread.start()
        thread.join()
    assert len(other) == 1
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        get_peft_model(tiny_model("mamba"), config)


def test_guard_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), guard_lifted():
        raise KeyError
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        get_peft_model(tiny_model("mamba"), LoraConfig(target_modules=["out_proj"]))


# -- adding --------------------------------------------------------------------------------------------------------


def test_adapters_are_fp32_masters_and_the_base_is_frozen() -> None:
    model = apply_adapter(tiny_model("mamba", dtype=torch.bfloat16), section(modules_to_save=["norm_f"]))
    for name, parameter in model.named_parameters():
        ours = ".lora_" in name or ".modules_to_save." in name
        assert parameter.requires_grad == ours, name
        assert parameter.dtype == (torch.float32 if ours else torch.bfloat16), name


def test_the_seed_decides_the_adapter_and_leaves_the_random_state() -> None:
    states = []
    for _ in range(2):
        torch.rand(3)
        before = torch.get_rng_state()
        model = apply_adapter(tiny_model("mamba"), section(), seed=7)
        assert torch.equal(before, torch.get_rng_state())
        states.append({name: value for name, value in model.state_dict().items() if "lora_A" in name})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_base_name_is_what_the_user_named(tmp_path: Path) -> None:
    save_adapter(apply_adapter(tiny_model("mamba"), section(), base_name="org/some-mamba"), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/some-mamba"
    assert config["target_modules"] and set(config["target_modules"]) == set(ALL["mamba"].split())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["A_log"], "Use adapter.train_also=[A_log]"),
        (["lm_haed"], "did you mean lm_head?"),
        (["in_proj"], "also gets an adapter"),
        (["mixer"], "also gets an adapter"),
    ],
)
def test_modules_to_save_are_checked(names: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        apply_adapter(tiny_model("mamba"), section(modules_to_save=names))
    assert said in str(error.value)


def test_every_mistake_of_a_section_is_told_before_weights_are_loaded() -> None:
    wrong = section(targets=["foo"], modules_to_save=["A_log"], train_also=["A_lg"])
    with pytest.raises(RecipeError) as error:
        check_targets(meta_model("mamba"), wrong)
    assert len(error.value.mistakes) == 3
    check_targets(meta_model("mamba"), section(train_also=["D"]))


def test_train_also_names_are_checked() -> None:
    with pytest.raises(RecipeError, match="Did you mean A_log"):
        find_ssm_parameters(meta_model("mamba"), ["A_lg"])
    with pytest.raises(RecipeError, match="this lfm2 model has no A_log"):
        find_ssm_parameters(meta_model("lfm2"), ["A_log"])


@pytest.mark.parametrize(
    ("kind", "bias"), [("mamba", "dt_proj.bias"), ("mamba2", "dt_bias"), ("zamba", "dt_proj_bias")]
)
def test_train_also_finds_the_step_bias_of_every_family(kind: str, bias: str) -> None:
    names = find_ssm_parameters(meta_model(kind), ["A_log", "D", "dt_bias", "conv1d"])
    assert any(name.endswith(bias) for name in names)
    assert any(name.endswith("conv1d.weight") for name in names)
    assert set(names) <= {name for name, _ in meta_model(kind).named_parameters()}


# -- saving and loading --------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "train_also": {"train_also": ["A_log", "D", "dt_bias", "conv1d"]},
    "modules_to_save": {"modules_to_save": ["norm_f", "lm_head"]},
}


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("method", METHODS)
def test_saved_and_reloaded_logits_are_equal(kind: str, method: str, tmp_path: Path) -> None:
    model = apply_adapter(patch_model(tiny_model(kind)), section(**METHODS[method]))
    base = logits(model)
    stir(model)
    trained = logits(model)
    assert (trained - base).abs().max() > 1e-2
    save_adapter(model, tmp_path)
    assert (tmp_path / "ssm_parameters.safetensors").exists() == (method == "train_also")
    reloaded = load_adapter(patch_model(tiny_model(kind)), tmp_path)
    assert_equal_up_to_rounding(logits(reloaded), trained)
    assert not any(parameter.requires_grad for parameter in reloaded.parameters())


def test_hybrids_reload_too(tmp_path: Path) -> None:
    for kind in HYBRID:
        model = apply_adapter(tiny_model(kind), section())
        stir(model)
        save_adapter(model, tmp_path / kind)
        assert_equal_up_to_rounding(logits(load_adapter(tiny_model(kind), tmp_path / kind)), logits(model))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_training_goes_on_after_a_reload(kind: str, tmp_path: Path) -> None:
    model = apply_adapter(tiny_model(kind), section(train_also=["A_log", "conv1d"], modules_to_save=["norm_f"]))
    stir(model)
    save_adapter(model, tmp_path)
    again = load_adapter(tiny_model(kind), tmp_path, trainable=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trained
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_restoring_into_a_model_takes_everything_back(tmp_path: Path) -> None:
    model = apply_adapter(tiny_model("mamba2"), section(train_also=["A_log"]))
    stir(model)
    save_adapter(model, tmp_path)
    saved = logits(model)
    stir(model, seed=5)
    assert not torch.allclose(logits(model), saved, atol=1e-3)
    restore_adapter(model, tmp_path)
    assert torch.equal(logits(model), saved)


@pytest.mark.parametrize("kind", KINDS)
def test_portable_is_equal_in_plain_peft_on_a_stock_model(kind: str, tmp_path: Path) -> None:
    model = apply_adapter(patch_model(tiny_model(kind)), section(targets="portable"))
    stir(model)
    save_adapter(model, tmp_path)
    plain = PeftModel.from_pretrained(tiny_model(kind), tmp_path)
    assert_equal_up_to_rounding(logits(plain), logits(load_adapter(tiny_model(kind), tmp_path)))
    difference = (logits(plain) - logits(model)).abs().max()
    assert difference <= 1e-5 * logits(model).abs().max().clamp(min=1)  # the rounding of two kernels


def test_all_is_refused_by_plain_peft_and_loads_here(tmp_path: Path) -> None:
    save_adapter(apply_adapter(tiny_model("mamba"), section()), tmp_path)
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        PeftModel.from_pretrained(tiny_model("mamba"), tmp_path)
    load_adapter(tiny_model("mamba"), tmp_path)


def saved_adapter(folder: Path, **changes: Any) -> Path:
    save_adapter(apply_adapter(tiny_model("mamba"), section(**changes)), folder)
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def drop(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


def add(file: Path) -> None:
    save_file({**load_file(file), "base_model.model.backbone.extra": torch.zeros(1)}, file)


DAMAGE = {
    "no folder": ("", lambda file: [entry.unlink() for entry in file.iterdir()], "holds no adapter"),
    "no config": ("adapter_config.json", Path.unlink, "adapter_config.json is missing"),
    "broken config": ("adapter_config.json", lambda file: file.write_text("{"), "is damaged"),
    "another method": ("adapter_config.json", lambda file: file.write_text('{"peft_type": "IA3"}'), "not a LoRA"),
    "no weights": ("adapter_model.safetensors", Path.unlink, "adapter_model.safetensors is missing"),
    "cut weights": ("adapter_model.safetensors", cut, "damaged or cut off"),
    "empty weights": ("adapter_model.safetensors", lambda file: file.write_bytes(b""), "damaged or cut off"),
    "tensor missing": ("adapter_model.safetensors", drop, "missing: backbone.layers.0.mixer"),
    "tensor too many": ("adapter_model.safetensors", add, "not in the model: backbone.extra"),
    "cut SSM parameters": ("ssm_parameters.safetensors", cut, "damaged or cut off"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_adapters_are_refused(case: str, tmp_path: Path) -> None:
    name, break_file, said = DAMAGE[case]
    saved_adapter(tmp_path, train_also=["D"])
    break_file(tmp_path / name)
    with pytest.raises(RecipeError, match=said):
        load_adapter(tiny_model("mamba"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "its backbone.layers.0.mixer.* has .* this model's has"),
        ({"num_hidden_layers": 1}, "backbone.layers.1.mixer.* is not in this mamba model"),
        ({"num_hidden_layers": 3}, "missing: backbone.layers.2"),
    ],
)
def test_an_adapter_of_another_model_is_refused(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    saved_adapter(tmp_path)
    with pytest.raises(RecipeError, match=said):
        load_adapter(tiny_model("mamba", **changes), tmp_path)


def test_ssm_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    saved_adapter(tmp_path, train_also=["A_log"])
    file = tmp_path / "ssm_parameters.safetensors"
    save_file({name: tensor[:, :-1].contiguous() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(RecipeError, match=r"A_log .* has shape"):
        load_adapter(tiny_model("mamba"), tmp_path)


def test_missing_ssm_parameters_stop_a_resume(tmp_path: Path) -> None:
    model = apply_adapter(tiny_model("mamba"), section(train_also=["D"]))
    save_adapter(model, tmp_path)
    (tmp_path / "ssm_parameters.safetensors").unlink()
    with pytest.raises(RecipeError, match="not beside the adapter"):
        restore_adapter(model, tmp_path)
