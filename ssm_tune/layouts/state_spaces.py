"""The original layout of state-spaces' mamba-* and mamba2-* checkpoints, mapped onto transformers' classes.

config.json holds `MambaConfig` of the mamba_ssm package; the weights are its state dict, which transformers' Mamba and
Mamba-2 share in every name but the embedding's and in the order of every projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ssm_tune.layouts.huggingface import valid_config
from ssm_tune.layouts.layout import (
    Layout,
    Writing,
    original_embedding,
    rename_embedding,
    transformers_weight_files,
)
from ssm_tune.layouts.source import Source
from ssm_tune.recipe import RecipeError

_REQUIRED = ("d_model", "n_layer", "vocab_size")
_TOP_KEYS = (
    *_REQUIRED,
    "d_intermediate",
    "ssm_cfg",
    "attn_layer_idx",
    "attn_cfg",
    "rms_norm",
    "residual_in_fp32",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "tie_embeddings",
)
# ssm_cfg key -> config field, its default in mamba_ssm. transformers' own defaults differ (Mamba-2: n_groups 8).
_SHARED_SSM = {
    "d_conv": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_init_floor": ("time_step_floor", 1e-4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
_MAMBA1_SSM = {
    **_SHARED_SSM,
    "d_state": ("state_size", 16),
    "dt_rank": ("time_step_rank", "auto"),
    "dt_init": ("time_step_init_scheme", "random"),
    "dt_scale": ("time_step_scale", 1.0),
}
_MAMBA2_SSM = {
    **_SHARED_SSM,
    "d_state": ("state_size", 128),
    "headdim": ("head_dim", 64),
    "ngroups": ("n_groups", 1),
    "chunk_size": ("chunk_size", 256),
    "dt_limit": ("time_step_limit", (0.0, math.inf)),
}
_SSM = {"mamba": _MAMBA1_SSM, "mamba2": _MAMBA2_SSM}
_EPSILON = 1e-5  # mamba_ssm has no key for it
# Which kernel runs, or how a new model begins: neither is part of a checkpoint's meaning.
_MAMBA1_IGNORED = ("layer", "use_fast_path")
_MAMBA2_IGNORED = ("layer", "use_mem_eff_path", "sequence_parallel", "conv_init", "A_init_range")
# Switches that transformers' Mamba-2 lacks, and the one value that it computes.
_MAMBA2_FIXED = {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}
_TOKENS = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 0}  # <|endoftext|> of GPT-NeoX


def recognise(source: Source) -> bool:
    """Whether config.json has the original package's keys."""
    config = source.read_json("config.json")
    return config is not None and "model_type" not in config and "d_model" in config and "n_layer" in config


def read_config(source: Source) -> PreTrainedConfig:
    """MambaConfig or Mamba2Config of the original config.json.

    Raises:
        RecipeError: every key that is missing, unknown, or has a value that transformers' classes cannot express.
    """
    path = source.require("config.json", because="it describes the model")
    return map_config(source.read_json("config.json") or {}, where=str(path), tokens=_TOKENS)


def map_config(original: dict[str, Any], *, where: str, tokens: dict[str, int]) -> PreTrainedConfig:
    """The original package's config values as a transformers config; `tokens` are the special tokens' ids."""
    ssm = original.get("ssm_cfg") or {}
    mistakes = _top_mistakes(original)
    layer = ssm.get("layer", "Mamba1") if isinstance(ssm, dict) else None
    mapping: dict[str, tuple[str, Any]] = {}
    if layer == "Mamba1":
        mapping = _MAMBA1_SSM
        mistakes += [f"ssm_cfg.{key} is not a known key" for key in ssm if key not in (*mapping, *_MAMBA1_IGNORED)]
    elif layer == "Mamba2":
        mapping = _MAMBA2_SSM
        mistakes += _mamba2_mistakes(original, ssm)
    elif layer is None:
        mistakes.append(f"ssm_cfg is a {type(ssm).__name__}; an object is expected")
    else:
        mistakes.append(f"ssm_cfg.layer is {layer}; Mamba1 and Mamba2 are supported")
    if mistakes:
        raise RecipeError([f"{where}: {mistake}." for mistake in mistakes])

    values = {field: ssm.get(key, default) for key, (field, default) in mapping.items()}
    values |= {
        "hidden_size": original["d_model"],
        "num_hidden_layers": original["n_layer"],
        "vocab_size": pad_vocabulary(original["vocab_size"], original.get("pad_vocab_size_multiple", 8)),
        "layer_norm_epsilon": _EPSILON,
        "residual_in_fp32": original.get("residual_in_fp32", True),
        "tie_word_embeddings": original.get("tie_embeddings", True),
        **tokens,
    }
    if layer == "Mamba2":
        values["num_heads"] = values["expand"] * values["hidden_size"] // values["head_dim"]
    model_type = {"Mamba1": "mamba", "Mamba2": "mamba2"}[layer]
    with valid_config(model_type, where):
        return AutoConfig.for_model(model_type, **values)


def pad_vocabulary(vocab_size: int, multiple: int) -> int:
    """The rows of the embedding: vocab_size rounded up (published: 8 for Mamba-1, 16 for Mamba-2)."""
    return math.ceil(vocab_size / multiple) * multiple


def _top_mistakes(original: dict[str, Any]) -> list[str]:
    mistakes = [f"{key} is missing" for key in _REQUIRED if key not in original]
    mistakes += [f"{key} is not a known key" for key in original if key not in _TOP_KEYS]
    refused: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
        "rms_norm": (True, lambda value: value is True, "transformers' Mamba has RMSNorm alone"),
        "d_intermediate": (0, lambda value: value == 0, "transformers' Mamba has no MLP in its blocks"),
        "attn_layer_idx": ([], lambda value: not value, "transformers' Mamba has no attention layers"),
    }
    for key, (default, accepted, reason) in refused.items():
        value = original.get(key, default)
        if not accepted(value):
            mistakes.append(f"{key} is {value}, which is not supported: {reason}")
    for key in (*_REQUIRED, "pad_vocab_size_multiple"):
        value = original.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            mistakes.append(f"{key} is {value!r}; a positive whole number is expected")
    return mistakes


def _mamba2_mistakes(original: dict[str, Any], ssm: dict[str, Any]) -> list[str]:
    known = (*_MAMBA2_SSM, *_MAMBA2_IGNORED, *_MAMBA2_FIXED, "d_ssm")
    mistakes = [f"ssm_cfg.{key} is not a known key" for key in ssm if key not in known]
    for key, fixed in _MAMBA2_FIXED.items():
        if ssm.get(key, fixed) != fixed:
            mistakes.append(f"ssm_cfg.{key} is {ssm[key]}, which is not supported: transformers' Mamba-2 has {fixed}")
    d_inner = ssm.get("expand", 2) * original.get("d_model", 0)
    if ssm.get("d_ssm") not in (None, d_inner):
        mistakes.append(
            f"ssm_cfg.d_ssm is {ssm['d_ssm']}, which is not supported: transformers' Mamba-2 applies the SSM to all "
            f"{d_inner} channels (expand * d_model)"
        )
    return mistakes


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """The original package's config of a Mamba or Mamba-2: values that are its defaults are left out of ssm_cfg.

    Special tokens have no place in it, nor have switches that only a new model's start depends on.

    Raises:
        RecipeError: another family, or every field whose value the original package cannot compute.
    """
    if config.model_type not in _SSM:
        raise RecipeError(
            f"model_type: the state-spaces layout has no {config.model_type}; it has {' and '.join(_SSM)}."
        )
    mapping, multiple = _SSM[config.model_type], {"mamba": 8, "mamba2": 16}[config.model_type]
    mistakes = [
        f"{field} is {value}, which the state-spaces layout cannot express: it has {fixed}"
        for field, value, fixed in (
            ("layer_norm_epsilon", config.layer_norm_epsilon, _EPSILON),
            ("hidden_act", {"swish": "silu"}.get(config.hidden_act, config.hidden_act), "silu"),
        )
        if value != fixed
    ]
    if mistakes:
        raise RecipeError([f"{mistake}." for mistake in mistakes])
    ssm = {"layer": "Mamba2"} if config.model_type == "mamba2" else {}
    for key, (field, default) in mapping.items():
        value = getattr(config, field)
        if field == "time_step_rank" and value == math.ceil(config.hidden_size / 16):
            continue
        if field == "time_step_limit":
            value = tuple(value)
        if value != default:
            ssm[key] = value
    return {
        "d_model": config.hidden_size,
        "d_intermediate": 0,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": multiple if config.vocab_size % multiple == 0 else 1,
        "tie_embeddings": config.tie_word_embeddings,
    }


def changed_fields(ssm: dict[str, Any]) -> list[tuple[str, Any]]:
    """The config fields behind the keys of a Mamba-2's ssm_cfg, each with the original package's default."""
    return [_MAMBA2_SSM[key] for key in ssm if key != "layer"]


LAYOUT = Layout(
    "state-spaces",
    recognise,
    read_config,
    transformers_weight_files,
    rename_embedding,
    # The original package looks for this one file, and for every parameter in it.
    Writing("config.json", "pytorch_model.bin", express, original_embedding, repeats_tied_head=True),
    "EleutherAI/gpt-neox-20b",
)
