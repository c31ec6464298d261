"""Weights that do not fit their model: every tensor is named, all at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layouts import write_mistral, write_state_spaces
from safetensors.torch import load_file, save_file
from tiny import save_stock, tiny_model

from ssm_tune.model import load_model
from ssm_tune.recipe import RecipeError


def break_weights(folder: Path, change: Any) -> str:
    """Save a tiny untied Mamba-2, let `change` spoil its tensors, and return the message."""
    save_stock("mamba2", folder, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError) as caught:
        load_model(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["lm_head.weight", "backbone.embeddings.weight", "backbone.layers.1.mixer.A_log"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    assert name in break_weights(tmp_path, lambda tensors: tensors.pop(name))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    extra = "backbone.layers.2.mixer.D"
    assert extra in break_weights(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))


def test_a_mis_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    message = break_weights(
        tmp_path, lambda tensors: tensors.update({"backbone.layers.0.mixer.in_proj.weight": torch.ones(3, 32)})
    )
    assert "backbone.layers.0.mixer.in_proj.weight is 3 x 32 in the file, 164 x 32 by the config" in message


def test_every_tensor_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["extra"] = torch.ones(1)
        del tensors["backbone.norm_f.weight"]

    message = break_weights(tmp_path, change)
    assert all(name in message for name in ("lm_head.weight", "extra", "backbone.norm_f.weight"))


def test_every_mis_shaped_tensor_is_said_at_once(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.ones(3, 3)
        tensors["backbone.norm_f.weight"] = torch.ones(3)

    message = break_weights(tmp_path, change)
    assert "lm_head.weight" in message and "backbone.norm_f.weight" in message


def test_mis_shaped_experts_that_transformers_stacks(tmp_path: Path) -> None:
    save_stock("jamba", tmp_path, num_experts=4)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    tensors[name] = torch.ones(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=re.escape(name)):
        load_model(tmp_path)


def test_a_vocabulary_that_was_not_padded(tmp_path: Path) -> None:
    """transformers#33864: 50277 in the config, 50280 rows in the weights."""
    save_stock("mamba", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 297}))
    with pytest.raises(RecipeError, match="vocab_size in the config should be 300"):
        load_model(tmp_path)


@pytest.mark.parametrize("multiple", [1, 8])
def test_an_original_vocabulary_padded_to_another_multiple(tmp_path: Path, multiple: int) -> None:
    source = tiny_model("mamba2", vocab_size=304)
    write_state_spaces(tmp_path, source, vocab_size=290, pad_vocab_size_multiple=multiple)
    with pytest.raises(RecipeError, match=r"backbone\.embedding\.weight is 304 x 32 in the file"):
        load_model(tmp_path)


def test_codestral_without_its_prefix(tmp_path: Path) -> None:
    source = tiny_model("codestral", num_heads=2, head_dim=64, n_groups=2, state_size=128, vocab_size=304)
    tensors = write_mistral(tmp_path, source)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(bare, tmp_path / "consolidated.safetensors")
    with pytest.raises(RecipeError, match=r"backbone\.embedding\."):
        load_model(tmp_path)
