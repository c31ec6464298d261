"""The original layout of state-spaces' checkpoints: config.json of mamba_ssm, and its state dict.

transformers' Mamba and Mamba-2 share its names but the embedding's, and the order of every projection. In our own
models an MLP is a layer of its own, and its gate is apart from the rest: `_Names`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ssm_tune.layouts.layout import (
    Layout,
    Parallel,
    Writing,
    original_embedding,
    plan_one_file,
    read_renamed,
    rename_embedding,
    transformers_weight_files,
)
from ssm_tune.layouts.original_config import express, map_config
from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import StoredTensor, assemble
from ssm_tune.layouts.writing import NewFiles, Outgoing, joined
from ssm_tune.recipe import RecipeError

_LAYER = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_GATED = ("up_proj.weight", "gate_proj.weight")  # the halves of mamba_ssm's fc1, in its order


def recognise(source: Source) -> bool:
    """Whether config.json has the original package's keys."""
    config = source.read_json("config.json")
    return config is not None and "model_type" not in config and "d_model" in config and "n_layer" in config


def read_config(source: Source) -> PreTrainedConfig:
    """The config that the original config.json stands for.

    Raises:
        RecipeError: every key that is missing, unknown, or has a value that no class computes.
    """
    path = source.require("config.json", because="it describes the model")
    return map_config(source.read_json("config.json") or {}, where=str(path))


@dataclass(frozen=True)
class _Names:
    """Names of our own models' tensors, whose layers count MLPs, and of mamba_ssm's, whose do not."""

    mlps: bool

    def ours(self, name: str) -> str:
        """mamba_ssm's name in our words; of fc1, the name that both of its halves share."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return rename_embedding(name)
        number, rest = int(match[1]), match[2]
        if not self.mlps:
            return name
        if rest.startswith("norm2."):
            return f"backbone.layers.{2 * number + 1}.{rest.replace('norm2', 'norm', 1)}"
        if rest.startswith("mlp."):
            return f"backbone.layers.{2 * number + 1}.mixer.{rest.removeprefix('mlp.').replace('fc2', 'down_proj')}"
        return f"backbone.layers.{2 * number}.{rest}"

    def theirs(self, name: str) -> str:
        """Our name in mamba_ssm's words."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return original_embedding(name)
        number, rest = int(match[1]), match[2]
        if not self.mlps:
            return name
        prefix = f"backbone.layers.{number // 2}."
        if number % 2 == 0:
            return prefix + rest
        if rest.startswith("norm."):
            return prefix + rest.replace("norm", "norm2", 1)
        leaf = rest.removeprefix("mixer.")
        return prefix + "mlp." + ("fc1.weight" if leaf in _GATED else leaf.replace("down_proj", "fc2"))


def _names(config: PreTrainedConfig) -> _Names:
    own = config.model_type in ("mamba2_hybrid", "mamba3")
    return _Names(mlps=own and "-" in config.pattern)


def _read_weights(files: list[Path], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    weights = {}
    for name, tensor in read_renamed(files, _names(config).ours).items():
        if not name.endswith(".mixer.fc1.weight"):
            weights[name] = tensor
            continue
        rows = tensor.shape[0] if tensor.shape else 1
        if rows % 2:
            raise RecipeError(f"{tensor.file}: {name_in_file(name, config)} has {rows} rows; it holds two of one size.")
        for half, leaf in enumerate(_GATED):
            start = half * rows // 2
            weights[name.replace("fc1.weight", leaf)] = assemble([(tensor, start, start + rows // 2)])
    return weights


def name_in_file(name: str, config: PreTrainedConfig) -> str:
    """mamba_ssm's name of a tensor of transformers' model, or of ours."""
    return _names(config).theirs(name)


def rename_tensors(tensors: Mapping[str, Outgoing], config: PreTrainedConfig) -> dict[str, Outgoing]:
    """Tensors of transformers' model, or of ours, as mamba_ssm has them."""
    renamed = {}
    for name, tensor in tensors.items():
        new = name_in_file(name, config)
        if new.endswith(".mlp.fc1.weight"):
            if name.endswith(_GATED[0]):
                renamed[new] = joined([tensor, tensors[name.replace(*_GATED)]])
        else:
            renamed[new] = tensor
    return renamed


def _plan(
    values: dict[str, Any], config: PreTrainedConfig, tensors: Mapping[str, Outgoing], parallel: Parallel
) -> NewFiles:
    # The original package looks for this one file, and for every parameter in it.
    return plan_one_file("config.json", values, "pytorch_model.bin", rename_tensors(tensors, config))


LAYOUT = Layout(
    "state-spaces",
    recognise,
    read_config,
    transformers_weight_files,
    _read_weights,
    name_in_file,
    Writing(express, _plan, repeats_tied_head=True),
    "EleutherAI/gpt-neox-20b",
)
