"""config.json of state-spaces' original package, and the transformers configs that it stands for, both ways.

The file holds `MambaConfig` of mamba_ssm. Its Mamba and Mamba-2 are transformers'; what transformers has no class for
(attention, MLPs, LayerNorm, Mamba-3) is ours, of `ssm_tune.architectures`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ssm_tune.architectures.configs import ATTENTION, MIXER, MLP
from ssm_tune.layouts.huggingface import valid_config
from ssm_tune.recipe import RecipeError

logger = logging.getLogger(__name__)

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
Fields = dict[str, tuple[str, Any]]  # a key of the file -> config field, its default in mamba_ssm
_MIXER: Fields = {
    "expand": ("expand", 2),
    "dt_min": ("time_step_min", 0.001),
    "dt_max": ("time_step_max", 0.1),
    "dt_init_floor": ("time_step_floor", 1e-4),
}
_CONVOLVED: Fields = {
    **_MIXER,
    "d_conv": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}
# transformers' own defaults differ (Mamba-2: n_groups 8).
MAMBA1: Fields = {
    **_CONVOLVED,
    "d_state": ("state_size", 16),
    "dt_rank": ("time_step_rank", "auto"),
    "dt_init": ("time_step_init_scheme", "random"),
    "dt_scale": ("time_step_scale", 1.0),
}
MAMBA2: Fields = {
    **_CONVOLVED,
    "d_state": ("state_size", 128),
    "headdim": ("head_dim", 64),
    "ngroups": ("n_groups", 1),
    "chunk_size": ("chunk_size", 256),
    "dt_limit": ("time_step_limit", (0.0, math.inf)),
}
_MAMBA2_HYBRID: Fields = {**MAMBA2, "headdim": ("mamba_head_dim", 64)}
_MAMBA3: Fields = {
    **_MIXER,
    "d_state": ("state_size", 128),
    "headdim": ("mamba_head_dim", 64),
    "ngroups": ("n_groups", 1),
    "chunk_size": ("chunk_size", 64),
    "rope_fraction": ("rope_fraction", 0.5),
    "A_floor": ("A_floor", 1e-4),
    "is_outproj_norm": ("output_norm", False),
    "A_activation": ("A_activation", "softplus"),  # ours: mamba_ssm takes and ignores unknown keys here
}
_ATTENTION: Fields = {
    "num_heads": ("num_attention_heads", None),
    "num_heads_kv": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "mlp_dim": ("attention_mlp_size", 0),
    "qkv_proj_bias": ("attention_bias", True),
    "out_proj_bias": ("attention_out_bias", True),
    "softmax_scale": ("attention_scale", None),
    "d_conv": ("attention_conv_kernel", 0),
    "rotary_emb_dim": ("rotary_dim", 0),
    "rotary_emb_base": ("rope_theta", 10000.0),
    "rotary_emb_interleaved": ("rope_interleaved", False),
}
_EPSILON = 1e-5  # mamba_ssm has no key for it
_MLP_MULTIPLE, _ATTENTION_MLP_MULTIPLE = 128, 256  # mamba_ssm rounds up to them
_TOKENS = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 0}  # <|endoftext|> of GPT-NeoX
# Switches of Mamba-2 that transformers and we lack, and the one value that is computed.
_MAMBA2_FIXED = {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}


@dataclass(frozen=True)
class _Kind:
    """One ssm_cfg.layer: its keys; those that say which kernel runs or how a new model begins; those of one value.

    `multiple`: that the published vocabularies are rounded up to.
    """

    fields: Fields
    ignored: tuple[str, ...]
    multiple: int = 16
    fixed: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_KINDS = {
    "Mamba1": _Kind(MAMBA1, ("use_fast_path",), multiple=8),
    "Mamba2": _Kind(
        MAMBA2,
        ("use_mem_eff_path", "sequence_parallel", "conv_init", "A_init_range", "d_ssm"),
        fixed=MappingProxyType(_MAMBA2_FIXED),
    ),
    "Mamba3": _Kind(_MAMBA3, ("dropout", "n_layer", "fuse_pregate_headwise_norm", "is_mimo", "mimo_rank")),
}
LAYERS = {"mamba": "Mamba1", "mamba2": "Mamba2", "mamba2_hybrid": "Mamba2", "mamba3": "Mamba3"}
_FIELDS = {"mamba": MAMBA1, "mamba2": MAMBA2, "mamba2_hybrid": _MAMBA2_HYBRID, "mamba3": _MAMBA3}


# -- reading -------------------------------------------------------------------------------------------------------


def map_config(original: dict[str, Any], *, where: str, tokens: dict[str, int] | None = None) -> PreTrainedConfig:
    """The original package's config values as a transformers config.

    Args:
        original: of config.json. where: how messages begin. tokens: the special tokens' ids (None: GPT-NeoX's).

    Raises:
        RecipeError: every key that is missing, unknown, or has a value that no class computes.
    """
    ssm = original.get("ssm_cfg") or {}
    mistakes = _top_mistakes(original)
    if not isinstance(ssm, dict):
        mistakes.append(f"ssm_cfg is a {type(ssm).__name__}; an object is expected")
        raise _error(where, mistakes)
    layer = ssm.get("layer", "Mamba1")
    if layer not in _KINDS:
        mistakes.append(f"ssm_cfg.layer is {layer}; {', '.join(_KINDS)} are supported")
        raise _error(where, mistakes)
    model_type = _model_type(original, layer)
    mistakes += _ssm_mistakes(original, ssm, _KINDS[layer]) + _hybrid_mistakes(original, model_type)
    if mistakes:
        raise _error(where, mistakes)
    values = {name: ssm.get(key, default) for key, (name, default) in _FIELDS[model_type].items()}
    values |= {
        "hidden_size": original["d_model"],
        "vocab_size": pad_vocabulary(original["vocab_size"], original.get("pad_vocab_size_multiple", 8)),
        "layer_norm_epsilon": _EPSILON,
        "residual_in_fp32": original.get("residual_in_fp32", True),
        "tie_word_embeddings": original.get("tie_embeddings", True),
        **(_TOKENS if tokens is None else tokens),
    }
    if model_type in ("mamba", "mamba2"):
        values["num_hidden_layers"] = original["n_layer"]
    else:
        values |= _own_values(original, ssm, model_type)
    if model_type == "mamba2":
        values["num_heads"] = values["expand"] * values["hidden_size"] // values["head_dim"]
    if model_type == "mamba3" and "A_activation" not in ssm:
        logger.warning(
            "%s does not say how Mamba-3's decay rates are made: read as softplus, as mamba_ssm up to 2.3.2 computes "
            'them. For a model of its later sources write "A_activation": "heavy_tail" into ssm_cfg.',
            where,
        )
    with valid_config(model_type, where):
        return AutoConfig.for_model(model_type, **values)


def pad_vocabulary(vocab_size: int, multiple: int) -> int:
    """The rows of the embedding: vocab_size rounded up (published: 8 for Mamba-1, 16 for Mamba-2)."""
    return math.ceil(vocab_size / multiple) * multiple


def _error(where: str, mistakes: list[str]) -> RecipeError:
    return RecipeError([f"{where}: {mistake}." for mistake in mistakes])


def _model_type(original: dict[str, Any], layer: str) -> str:
    if layer == "Mamba3":
        return "mamba3"
    plain = original.get("rms_norm", True) is True and not original.get("d_intermediate")
    if plain and not original.get("attn_layer_idx"):
        return {"Mamba1": "mamba", "Mamba2": "mamba2"}[layer]
    return {"Mamba1": "mamba", "Mamba2": "mamba2_hybrid"}[layer]


def _own_values(original: dict[str, Any], ssm: dict[str, Any], model_type: str) -> dict[str, Any]:
    """What is there beside mixers, as our own configs have it."""
    attention = original.get("attn_layer_idx") or []
    width = original.get("d_intermediate") or 0
    layers = (ATTENTION if index in attention else MIXER for index in range(original["n_layer"]))
    values = {
        "pattern": "".join(layer + (MLP if width else "") for layer in layers),
        "norm": "rms" if original.get("rms_norm", True) else "layer",
    }
    if width:
        values["intermediate_size"] = pad_vocabulary(width, _MLP_MULTIPLE)
    if model_type == "mamba3":
        values["mimo_rank"] = ssm.get("mimo_rank", 4) if ssm.get("is_mimo", False) else 0
    elif attention:
        given = original["attn_cfg"]
        values |= {name: given.get(key, default) for key, (name, default) in _ATTENTION.items()}
        values["attention_mlp_size"] = pad_vocabulary(values["attention_mlp_size"], _ATTENTION_MLP_MULTIPLE)
    else:
        values["attention_conv_kernel"] = 0
    return values


def _top_mistakes(original: dict[str, Any]) -> list[str]:
    mistakes = [f"{key} is missing" for key in _REQUIRED if key not in original]
    mistakes += [f"{key} is not a known key" for key in original if key not in _TOP_KEYS]
    for key in (*_REQUIRED, "pad_vocab_size_multiple"):
        value = original.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            mistakes.append(f"{key} is {value!r}; a positive whole number is expected")
    width = original.get("d_intermediate", 0)
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        mistakes.append(f"d_intermediate is {width!r}; a whole number is expected")
    if not isinstance(original.get("rms_norm", True), bool):
        mistakes.append(f"rms_norm is {original['rms_norm']!r}; true or false is expected")
    return mistakes


def _ssm_mistakes(original: dict[str, Any], ssm: dict[str, Any], kind: _Kind) -> list[str]:
    known = ("layer", *kind.fields, *kind.ignored, *kind.fixed)
    mistakes = [f"ssm_cfg.{key} is not a known key" for key in ssm if key not in known]
    for key, fixed in kind.fixed.items():
        if ssm.get(key, fixed) != fixed:
            mistakes.append(f"ssm_cfg.{key} is {ssm[key]}, which is not supported: it is {fixed} in the classes here")
    if "d_ssm" in kind.ignored and isinstance(original.get("d_model"), int):
        d_inner = ssm.get("expand", 2) * original["d_model"]
        if ssm.get("d_ssm") not in (None, d_inner):
            mistakes.append(
                f"ssm_cfg.d_ssm is {ssm['d_ssm']}, which is not supported: the SSM is applied to all {d_inner} "
                f"channels (expand * d_model)"
            )
    return mistakes


def _hybrid_mistakes(original: dict[str, Any], model_type: str) -> list[str]:
    """What no class has of attention, MLPs and LayerNorm, for this kind of mixer."""
    indices, attention = original.get("attn_layer_idx") or [], original.get("attn_cfg") or {}
    if model_type == "mamba":
        refused = {
            "rms_norm": (not original.get("rms_norm", True), "RMSNorm alone"),
            "d_intermediate": (bool(original.get("d_intermediate")), "no MLP in its blocks"),
            "attn_layer_idx": (bool(indices), "no attention layers"),
        }
        return [
            f"{key} is {original[key]}, which is not supported: transformers' Mamba has {reason}"
            for key, (wrong, reason) in refused.items()
            if wrong
        ]
    if model_type == "mamba3" and indices:
        return [f"attn_layer_idx is {indices}, which is not supported with ssm_cfg.layer Mamba3"]
    layers = original.get("n_layer", 0)
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        return [f"attn_layer_idx is {indices}; a list of layers from 0 to n_layer - 1 is expected"]
    if not indices:
        return []
    if not isinstance(attention, dict):
        return [f"attn_cfg is a {type(attention).__name__}; an object is expected"]
    mistakes = [f"attn_cfg.{key} is not a known key" for key in attention if key not in (*_ATTENTION, "causal")]
    if "num_heads" not in attention:
        mistakes.append("attn_cfg.num_heads is missing")
    if attention.get("causal", False) is not True:
        mistakes.append(
            f"attn_cfg.causal is {attention.get('causal', False)}, which is not supported: language models here are "
            "causal (true)"
        )
    return mistakes


# -- writing -------------------------------------------------------------------------------------------------------


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """The original package's config of a model: values that are its defaults are left out of ssm_cfg.

    Special tokens have no place in it, nor have switches that only a new model's start depends on.

    Raises:
        RecipeError: another family, or every field whose value the original package cannot compute.
    """
    if config.model_type not in LAYERS:
        raise RecipeError(
            f"model_type: the state-spaces layout has no {config.model_type}; it has {', '.join(LAYERS)}."
        )
    kind = _KINDS[LAYERS[config.model_type]]
    mistakes = _inexpressible(config)
    if mistakes:
        raise RecipeError([f"{mistake}." for mistake in mistakes])
    layer = LAYERS[config.model_type]
    ssm = {} if layer == "Mamba1" else {"layer": layer}
    ssm |= _changed(config, _FIELDS[config.model_type])
    own = config.model_type in ("mamba2_hybrid", "mamba3")
    sequence, width = (config.pattern.replace(MLP, ""), MLP in config.pattern) if own else ("", False)
    if layer == "Mamba3":
        ssm |= {"is_mimo": True, "mimo_rank": config.mimo_rank} if config.mimo_rank else {}
        ssm["A_activation"] = config.A_activation
    attention = [index for index, symbol in enumerate(sequence) if symbol == ATTENTION]
    return {
        "d_model": config.hidden_size,
        "d_intermediate": config.intermediate_size if width else 0,
        "n_layer": len(sequence) if own else config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm,
        "attn_layer_idx": attention,
        "attn_cfg": {"causal": True, **_changed(config, _ATTENTION)} if attention else {},
        "rms_norm": not own or config.norm == "rms",
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": kind.multiple if config.vocab_size % kind.multiple == 0 else 1,
        "tie_embeddings": config.tie_word_embeddings,
    }


def _changed(config: PreTrainedConfig, fields: Fields) -> dict[str, Any]:
    changed = {}
    for key, (name, default) in fields.items():
        value = getattr(config, name)
        if name == "time_step_rank" and value == math.ceil(config.hidden_size / 16):
            continue
        if name == "time_step_limit":
            value = tuple(value)
        if value != default:
            changed[key] = value
    return changed


def _inexpressible(config: PreTrainedConfig) -> list[str]:
    own = config.model_type in ("mamba2_hybrid", "mamba3")
    fixed: dict[str, Any] = {"layer_norm_epsilon": _EPSILON}
    if not own or MLP in config.pattern:
        fixed["hidden_act"] = "silu"
    if own and MLP in config.pattern:
        fixed |= {"mlp_gated": True, "mlp_bias": False}
    mistakes = []
    for name, expected in fixed.items():
        value = getattr(config, name)
        if {"swish": "silu"}.get(value, value) != expected:
            mistakes.append(f"{name} is {value}, which the state-spaces layout cannot express: it has {expected}")
    if not own:
        return mistakes
    alternating = "".join(symbol + MLP for symbol in config.pattern[::2].replace(MLP, ""))
    if MLP in config.pattern and config.pattern != alternating:
        mistakes.append(
            f"pattern is {config.pattern}, which the state-spaces layout cannot express: it has an MLP after each "
            "other layer, or none"
        )
    if config.model_type == "mamba3" and ATTENTION in config.pattern:
        mistakes.append(f"pattern is {config.pattern}, which the state-spaces layout cannot express with Mamba-3")
    if MLP in config.pattern and config.intermediate_size % _MLP_MULTIPLE:
        mistakes.append(
            f"intermediate_size is {config.intermediate_size}, which the state-spaces layout cannot express: it has "
            f"multiples of {_MLP_MULTIPLE}"
        )
    if config.model_type == "mamba2_hybrid" and config.attention_mlp_size % _ATTENTION_MLP_MULTIPLE:
        mistakes.append(
            f"attention_mlp_size is {config.attention_mlp_size}, which the state-spaces layout cannot express: it has "
            f"multiples of {_ATTENTION_MLP_MULTIPLE}"
        )
    if config.model_type == "mamba2_hybrid" and config.rope_theta is None and config.rotary_dim:
        mistakes.append("rope_theta is None, which the state-spaces layout cannot express with a rotary_dim")
    return mistakes


def changed_fields(ssm: dict[str, Any]) -> list[tuple[str, Any]]:
    """The config fields behind the keys of a Mamba-2's ssm_cfg, each with the original package's default."""
    return [MAMBA2[key] for key in ssm if key != "layer"]
