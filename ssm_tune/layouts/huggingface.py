"""Hugging Face's layout: config.json with a model_type; safetensors or pytorch_model.bin, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ssm_tune.families import family_of
from ssm_tune.layouts.layout import (
    Layout,
    Parallel,
    Writing,
    plan_one_file,
    read_renamed,
    rename_embedding,
    transformers_weight_files,
)
from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import StoredTensor
from ssm_tune.layouts.writing import NewFiles, Outgoing
from ssm_tune.recipe import RecipeError


def recognise(source: Source) -> bool:
    """Whether config.json names a model_type."""
    config = source.read_json("config.json")
    return config is not None and "model_type" in config


def read_config(source: Source) -> PreTrainedConfig:
    """The config, of a supported family.

    Raises:
        RecipeError: a model_type outside the families, or values that its config class refuses.
    """
    path = source.require("config.json", because="it describes the model")
    values = source.read_json("config.json") or {}
    try:
        family_of(values["model_type"])
    except RecipeError as error:
        raise RecipeError(f"{source.label}: {str(error).removeprefix('model.name: ')}") from error
    with valid_config(values["model_type"], str(path)):
        # transformers reads the file itself: it knows the old spellings, and its own one of infinity.
        return AutoConfig.from_pretrained(path.parent)


@contextmanager
def valid_config(model_type: str, where: str) -> Iterator[None]:
    """Values that a config class refuses become a RecipeError that begins with `where`."""
    try:
        yield
    except (StrictDataclassError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise RecipeError(f"{where}: not a valid {model_type} config: {text}") from error


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """What config.json of any family holds."""
    return json.loads(config.to_json_string())


def _read_weights(files: list[Path], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    return read_renamed(files, rename_embedding)


# Where transformers itself writes other names into files than its models have.
_IN_FILES = {"nemotron_h": ("model.", "backbone.")}


def _plan(
    values: dict[str, Any], config: PreTrainedConfig, tensors: Mapping[str, Outgoing], parallel: Parallel
) -> NewFiles:
    old, new = _IN_FILES.get(config.model_type, ("", ""))
    named = {new + name.removeprefix(old) if old and name.startswith(old) else name: tensors[name] for name in tensors}
    return plan_one_file("config.json", values, "model.safetensors", named)


LAYOUT = Layout(
    "huggingface",
    recognise,
    read_config,
    transformers_weight_files,
    _read_weights,
    lambda name, config: name,
    Writing(express, _plan, repeats_tied_head=False),
)
