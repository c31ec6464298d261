"""The table of families says what transformers' models really are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from tiny import KINDS, tiny_config, tiny_model
from torch import nn

from ssm_tune.families import FAMILIES, OWN_FAMILIES, Family, family_of, refusals
from ssm_tune.recipe import RecipeError


def test_no_torch_is_imported() -> None:
    code = "import sys, ssm_tune.families; sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_family_is_tested() -> None:
    assert {tiny_config(kind).model_type for kind in KINDS} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_the_model(kind: str) -> None:
    model = tiny_model(kind)
    family = family_of(model.config.model_type)
    classes = {type(module).__name__: module for module in model.modules()}
    assert {*family.blocks, family.mixer} <= set(classes)
    assert type(classes[family.block].get_submodule(family.mixer_path)).__name__ in {
        family.mixer,
        *other_mixers(family),
    }
    mixer = classes[family.mixer]
    assert {name for name, module in mixer.named_children() if isinstance(module, nn.Linear)} == set(family.projections)
    own = {name for name, _ in mixer.named_parameters()}
    assert set(family.ssm_parameters) <= own and set(family.weights_outside_linear) <= own
    assert all(family.is_ssm_parameter("model.layers.0.x." + name) for name in family.ssm_parameters)
    assert not family.is_ssm_parameter("model.layers.0.x.in_proj.weight") and not family.is_ssm_parameter("xD")


def other_mixers(family: Family) -> set[str]:
    """What else the attribute of the mixer holds, in families whose blocks are all of one class."""
    return {"NemotronHAttention", "NemotronHMLP"} if family.model_type == "nemotron_h" else set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_is_in_the_table(kind: str) -> None:
    """Except the head, and the low-rank terms that zamba2 has of its own."""
    model = tiny_model(kind)
    family = family_of(model.config.model_type)
    leaves = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "adapter_list" not in name
    }
    assert leaves - {"lm_head"} == {*family.projections, *family.attention, *family.mlp}
    assert set(family.portable) <= leaves


@pytest.mark.parametrize("kind", KINDS)
def test_shared_weights_are_named(kind: str) -> None:
    model = tiny_model(kind)
    family = family_of(model.config.model_type)
    seen: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".layers." in name:
            seen.setdefault(id(parameter), set()).add(name)
    repeated = {name for names in seen.values() if len(names) > 1 for name in names}
    assert {name.split(".")[3] for name in repeated} == set(family.shared)


def test_unknown_types_get_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"'mamba4'.*Did you mean mamba"):
        family_of("mamba4")
    with pytest.raises(RecipeError, match="It trains mamba, "):
        family_of("gpt2")


def test_nothing_is_refused_where_all_is_right() -> None:
    for family in FAMILIES.values():
        assert family.exact and family.kind
        targets = [*family.projections, *family.attention, *family.mlp]
        assert refusals(family, packing=True, targets=targets, attention="sdpa") == []


def test_refusals_name_family_key_and_way_out() -> None:
    leaking = dataclasses.replace(
        FAMILIES["jamba"], exact=False, refused={"packing": "its mixers drop borders.", "dt_proj": "it is read raw."}
    )
    found = refusals(leaking, packing=True, targets=["in_proj", "dt_proj"])
    assert found == [
        "training.packing: jamba: its mixers drop borders. Set training.packing=false.",
        "adapter.targets: jamba: dt_proj: it is read raw.",
    ]
    assert refusals(leaking, targets=["in_proj"]) == []


def test_attention_that_takes_no_mask_is_refused_for_packing() -> None:
    (found,) = refusals(FAMILIES["bamba"], packing=True, attention="flash_attention_2")
    assert "flash_attention_2" in found and "sdpa" in found and "training.packing=false" in found
    assert refusals(FAMILIES["bamba"], attention="flash_attention_2") == []
    assert refusals(FAMILIES["mamba"], packing=True, attention="flash_attention_2") == []


def test_every_family_names_the_operations_that_its_rows_take() -> None:
    from ssm_tune.kernels.backends import OPERATIONS

    for family in (*FAMILIES.values(), *OWN_FAMILIES.values()):
        assert set(family.operations) <= set(OPERATIONS)
        assert family.operations or family.model_type in ("h3", "llama")
