"""Which parameters adapters are placed on: every projection, nothing in silence, and clear mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from adapter_sections import meta_model, section
from tiny import KINDS, tiny_model

from ssm_tune.adapter import (
    apply_adapter,
    guard_allows,
)
from ssm_tune.families import FAMILIES, family_of
from ssm_tune.recipe import RecipeError
from ssm_tune.targets import adapter_targets, find_targets

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
