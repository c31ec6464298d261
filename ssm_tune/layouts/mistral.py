"""Mistral's layout of Codestral: params.json and consolidated.safetensors, a state-spaces Mamba-2 under `model.`.

The keys of params.json are `MambaArgs` of mistral-inference, which builds state-spaces' MambaLMHeadModel from them with
Mamba-2's default widths (state 128, expand 2, head 64), so this module maps onto that layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ssm_tune.layouts import state_spaces
from ssm_tune.layouts.layout import Layout, Writing, original_embedding, rename_embedding, single_file
from ssm_tune.layouts.source import Source
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
_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}  # as transformers converts Codestral


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
    if mistakes:
        raise RecipeError(mistakes)
    original = {ours: params[theirs] for theirs, ours in _ARGUMENTS.items()}
    original["ssm_cfg"] = {"layer": "Mamba2", "ngroups": params["n_groups"]}
    return state_spaces.map_config(original, where=str(path), tokens=_TOKENS)


def weight_files(source: Source) -> list[Path]:
    """consolidated.safetensors."""
    return single_file(source, "consolidated.safetensors")


def rename(name: str) -> str:
    """Without the prefix `model.`, then as state-spaces; a name without it stays, to be reported as unexpected."""
    return rename_embedding(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else name


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """params.json of a Mamba-2; RecipeError names the fields that it has no keys for."""
    original = state_spaces.express(config)
    ssm = original["ssm_cfg"]
    mistakes = [] if ssm.get("layer") == "Mamba2" else ["model_type: Mistral's layout has Mamba-2 alone."]
    mistakes += [
        f"{field} is {getattr(config, field)}, which Mistral's params.json cannot express: it has {default}."
        for field, default in state_spaces.changed_fields(ssm)
        if field != "n_groups"
    ]
    if mistakes:
        raise RecipeError(mistakes)
    params = {theirs: original[ours] for theirs, ours in _ARGUMENTS.items()}
    return {**params, "n_groups": config.n_groups, "model_type": "mamba"}


def rename_back(name: str) -> str:
    """The way back from `rename`."""
    return _PREFIX + original_embedding(name)


LAYOUT = Layout(
    "mistral",
    recognise,
    read_config,
    weight_files,
    rename,
    Writing("params.json", "consolidated.safetensors", express, rename_back, repeats_tied_head=True),
    "mistralai/Mamba-Codestral-7B-v0.1",
)
