"""Mistral's layout of Codestral: params.json and consolidated.safetensors, a state-spaces Mamba-2 under `model.`.

The keys of params.json are `MambaArgs` of mistral-inference, which builds state-spaces' MambaLMHeadModel from them with
Mamba-2's default widths (state 128, expand 2, head 64), so this module maps onto that layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ssm_tune.layouts import original_config
from ssm_tune.layouts.layout import (
    Layout,
    Parallel,
    Writing,
    original_embedding,
    plan_one_file,
    read_renamed,
    rename_embedding,
    single_file,
)
from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import StoredTensor
from ssm_tune.layouts.writing import NewFiles, Outgoing
from ssm_tune.recipe import RecipeError

_PREFIX = "model."
_ARGUMENTS = {  # MambaArgs -> state-spaces' config.json
    "dim": "d_model",
    "n_layers": "n_layer",
    "vocab_size": "vocab_size",
    "rms_norm": "rms_norm",
    "residual_in_fp32": "residual_in_fp32",
    "fused_add_norm": "fused_add_norm",
    "pad_vocab_size_multiple": "pad_vocab_size_multiple",
    "tie_embeddings": "tie_embeddings",
}
# How many tokens are computed at once, and how a new model begins: no part of what a checkpoint computes.
_NO_MATTER = ("chunk_size", "time_step_min", "time_step_max", "time_step_floor")
# transformers' conversion of Codestral leaves Mamba2Config's own defaults, which are these.
_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def recognise(source: Source) -> bool:
    """Whether params.json is of a Mamba (Mistral's transformers have a params.json too)."""
    params = source.read_json("params.json")
    return params is not None and params.get("model_type") == "mamba"


def read_config(source: Source) -> PreTrainedConfig:
    """Mamba2Config of params.json; RecipeError for a key that is missing, unknown or not expressible."""
    path = source.require("params.json", because="it describes the model")
    params = dict(source.read_json("params.json") or {})
    params.pop("model_type")
    mistakes = [f"{path}: {key} is missing" for key in (*_ARGUMENTS, "n_groups") if key not in params]
    mistakes += [f"{path}: {key} is not a known key" for key in params if key not in (*_ARGUMENTS, "n_groups")]
    if params.get("rms_norm") is False:
        mistakes.append(f"{path}: rms_norm is False, which is not supported: transformers' Mamba-2 has RMSNorm alone.")
    if mistakes:
        raise RecipeError(mistakes)
    original = {ours: params[theirs] for theirs, ours in _ARGUMENTS.items()}
    original["ssm_cfg"] = {"layer": "Mamba2", "ngroups": params["n_groups"]}
    return original_config.map_config(original, where=str(path), tokens=_TOKENS)


def weight_files(source: Source) -> list[Path]:
    """consolidated.safetensors."""
    return single_file(source, "consolidated.safetensors")


def _rename(name: str) -> str:
    """Without the prefix `model.`, then as state-spaces; a name without it stays, to be reported as unexpected."""
    return rename_embedding(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else name


def _read_weights(files: list[Path], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    return read_renamed(files, _rename)


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """params.json of a Mamba-2; RecipeError names the fields that it has no keys for."""
    if config.model_type != "mamba2":
        raise RecipeError("model_type: Mistral's layout has Mamba-2 alone.")
    original = original_config.express(config)
    mistakes = [
        f"{field} is {getattr(config, field)}, which Mistral's params.json cannot express: it has {default}."
        for field, default in original_config.changed_fields(original["ssm_cfg"])
        if field not in ("n_groups", *_NO_MATTER)
    ]
    if mistakes:
        raise RecipeError(mistakes)
    params = {theirs: original[ours] for theirs, ours in _ARGUMENTS.items()}
    return {**params, "n_groups": config.n_groups, "model_type": "mamba"}


def name_in_file(name: str, config: PreTrainedConfig) -> str:
    """A tensor's name in Mistral's file."""
    return _PREFIX + original_embedding(name)


def _plan(
    values: dict[str, Any], config: PreTrainedConfig, tensors: Mapping[str, Outgoing], parallel: Parallel
) -> NewFiles:
    renamed = {name_in_file(name, config): tensor for name, tensor in tensors.items()}
    return plan_one_file("params.json", values, "consolidated.safetensors", renamed)


LAYOUT = Layout(
    "mistral",
    recognise,
    read_config,
    weight_files,
    _read_weights,
    name_in_file,
    Writing(express, _plan, repeats_tied_head=True),
    "mistralai/Mamba-Codestral-7B-v0.1",
)
