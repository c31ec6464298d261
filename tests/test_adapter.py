"""Adapters: the PEFT guard, saving and strict loading, train_also. Targets: `test_adapter_targets.py`."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_sections import meta_model, section
from finished import logits, stir
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import HYBRID, KINDS, PURE, assert_equal_up_to_rounding, tiny_model

from ssm_tune.adapter import (
    apply_adapter,
    check_targets,
    guard_lifted,
    load_adapter,
    restore_adapter,
    save_adapter,
)
from ssm_tune.mixers import patch_model
from ssm_tune.recipe import RecipeError
from ssm_tune.ssm_parameters import find_ssm_parameters

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


def test_an_adapter_is_put_on_without_a_warning_that_nobody_can_heed(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_adapter(apply_adapter(tiny_model("mamba"), section()), tmp_path)
        base = load_adapter(tiny_model("mamba"), tmp_path).get_base_model()
        assert not [warning for warning in caught if "is_gradient_checkpointing" in str(warning.message)]
        base.is_gradient_checkpointing  # noqa: B018 - whoever asks so himself is told
    assert [warning for warning in caught if "is_gradient_checkpointing" in str(warning.message)]


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
    assert config["target_modules"] and set(config["target_modules"]) == {"in_proj", "x_proj", "dt_proj", "out_proj"}


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
