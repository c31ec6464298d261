"""Where a recipe leaves kernels.graphs open, they are chosen only where nothing stands in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model

from ssm_tune.kernel_settings import choose_graphs
from ssm_tune.mixers import patch_model
from ssm_tune.recipe import KernelsSection, ModelSection


def chosen(kind: str = "mamba2", device: str = "cuda", graphs: bool | None = None, **changes: Any) -> tuple[bool, int]:
    """Whether graphs are chosen, and how many lines say so."""
    sections = {"kernels": KernelsSection(graphs=graphs), "model": ModelSection(name="x", **changes.pop("model", {}))}
    arguments = SimpleNamespace(
        device=torch.device(device), activation_checkpointing=changes.pop("checkpointing", False)
    )
    settings = {"is_packed": True, "is_sharded": False} | changes
    found, said = choose_graphs(SimpleNamespace(**sections), patch_model(tiny_model(kind)), arguments, **settings)
    return found, len(said)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_packed_rows_of_pure_models_on_a_gpu(kind: str) -> None:
    assert chosen(kind) == (True, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "bamba"},
        {"device": "cpu"},
        {"is_packed": False},
        {"is_sharded": True},
        {"checkpointing": True},
        {"model": {"load_in_4bit": True}},
    ],
    ids=str,
)
def test_not_where_something_stands_in_the_way(changes: dict[str, Any]) -> None:
    assert chosen(**changes) == (False, 0)


def test_not_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert chosen() == (False, 0)


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_recipe_says_counts(asked: bool) -> None:
    assert chosen(graphs=asked) == (asked, 0)
