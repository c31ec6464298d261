"""The arguments that Megatron keeps in a checkpoint, and the transformers configs that they stand for, both ways.

A stack of Mamba-2 layers alone is transformers' Mamba-2. With attention and MLPs it is Nemotron-H, and where that has
no words for it (positions, gated MLPs, a tied head) our own Mamba-2 hybrid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ssm_tune.architectures.configs import ATTENTION, MIXER, MLP, SYMBOLS
from ssm_tune.architectures.patterns import allot_layers
from ssm_tune.layouts.huggingface import valid_config
from ssm_tune.layouts.megatron.geometry import geometry_of
from ssm_tune.recipe import RecipeError

logger = logging.getLogger(__name__)

_EPSILON = 1e-5  # of the norm inside Megatron's mixer, which has no argument
_KERNEL = 4  # of its convolution, the same
_DIVISIBLE = 128  # --make-vocab-size-divisible-by
OURS = "ssm_tune"  # an argument of ours, for what Megatron has no words for
_ACTIVATIONS = {"relu2": "squared_relu", "gelu_pytorch_tanh": "openai_gelu", "gelu": None}  # config -> argument
# Arguments that must be off, since no class here has what they switch on.
_OFF = (
    *("add_bias_linear", "add_qkv_bias", "apply_layernorm_1p", "qk_layernorm", "qk_l2_norm", "multi_latent_attention"),
    *("attention_output_gate", "num_experts", "mtp_num_layers", "window_size", "quick_geglu", "use_rope_scaling"),
    *("rotary_seq_len_interpolation_factor", "experimental_attention_variant", "heterogeneous_layers_config_path"),
    *("heterogeneous_layers_config_encoded_json", "virtual_pipeline_model_parallel_size", "use_mup"),
)
_WHOLE = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "max_position_embeddings"),
)
# Fields of a config that change nothing that is computed here, or that Megatron has no argument for.
_KEPT = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "chunk_size", "initializer_range", "rescale_prenorm_residual"),
    *("time_step_min", "time_step_max", "time_step_floor", "use_cache", "num_logits_to_keep", "mamba_ssm_cache_dtype"),
)
# Nemotron-H keeps step sizes above time_step_min, Megatron does not: one that is as good as none.
_NO_LEAST_STEP = 1e-30


# -- reading -------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Mapping[str, Any], rows: int, *, where: str) -> PreTrainedConfig:
    """The config of a checkpoint.

    Args:
        arguments: of training. rows: of the whole embedding, in the file. where: how messages begin.

    Raises:
        RecipeError: every argument that is missing, or that no class here computes.
    """
    mistakes = [f"{name} is {arguments[name]}" for name in _OFF if arguments.get(name)]
    for name, expected in {"normalization": "RMSNorm", "norm_epsilon": _EPSILON, "layernorm_epsilon": _EPSILON}.items():
        if arguments.get(name, expected) != expected:
            mistakes.append(f"{name} is {arguments[name]} (it must be {expected})")
    for name in _WHOLE:
        value = arguments.get(name)
        if value is not None and (type(value) is not int or value < 1):
            mistakes.append(f"{name} is {value!r} (a positive whole number is expected)")
    pattern = _pattern(arguments)
    positions = arguments.get("position_embedding_type", "none")
    if positions not in ("none", "rope") and (ATTENTION in pattern or positions == "learned_absolute"):
        mistakes.append(f"position_embedding_type is {positions} (none and rope are supported)")
    foreign = sorted(set(pattern) - set(SYMBOLS))
    if foreign:
        mistakes.append(f"the layer pattern {pattern} has {', '.join(foreign)} (M, * and - are supported)")
    if mistakes:
        raise RecipeError([f"{where}: the argument {mistake}, which no model here computes." for mistake in mistakes])
    missing = [name for name in ("hidden_size", "num_attention_heads") if type(arguments.get(name)) is not int]
    if missing or not pattern:
        raise RecipeError(f"{where}: the arguments do not say {' and '.join(missing or ['the layers'])}.")
    model_type, values = _values(arguments, pattern, positions)
    kept = _kept(arguments)
    defaults = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | {"chunk_size": 128}
    if model_type == "nemotron_h":
        defaults["time_step_min"] = _NO_LEAST_STEP
    config_class = type(AutoConfig.for_model(model_type))
    fields = {name: kept[name] for name in _KEPT if name in kept and hasattr(config_class, name)}
    values = {**defaults, **fields, **values, "vocab_size": kept.get("vocab_size", rows)}
    with valid_config(model_type, where):
        return AutoConfig.for_model(model_type, **values)


def _kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    kept = arguments.get(OURS)
    return kept if isinstance(kept, dict) else {}


def _pattern(arguments: Mapping[str, Any]) -> str:
    """A symbol for each layer; without the bars between stages."""
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.replace("|", "")
    layers = arguments.get("num_layers")
    shares = [arguments.get(name) or 0.0 for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio")]
    try:
        return allot_layers(layers, *shares)
    except (TypeError, ValueError):
        return ""


def _values(arguments: Mapping[str, Any], pattern: str, positions: str) -> tuple[str, dict[str, Any]]:
    """The class that fits, and what the arguments say in its words."""
    hidden_size = arguments["hidden_size"]
    head_dim = arguments.get("mamba_head_dim") or 64
    heads = arguments.get("mamba_num_heads") or 2 * hidden_size // head_dim
    tied = not arguments.get("untie_embeddings_and_output_weights", False)
    gated, turned = bool(arguments.get("swiglu")), positions == "rope" and ATTENTION in pattern
    common = {
        "hidden_size": hidden_size,
        "n_groups": arguments.get("mamba_num_groups") or 8,
        "conv_kernel": _KERNEL,
        "layer_norm_epsilon": _EPSILON,
        "residual_in_fp32": bool(arguments.get("fp32_residual_connection")),
        "tie_word_embeddings": tied,
    }
    state = arguments.get("mamba_state_dim") or 128
    expand, rest = divmod(heads * head_dim, hidden_size)
    if set(pattern) == {MIXER} and not rest:
        own = {"num_hidden_layers": len(pattern), "num_heads": heads, "head_dim": head_dim, "expand": expand}
        return "mamba2", {**common, **own, "state_size": state}
    queries = arguments["num_attention_heads"]
    common |= {
        "num_attention_heads": queries,
        "num_key_value_heads": (arguments.get("group_query_attention") and arguments.get("num_query_groups"))
        or queries,
        "head_dim": arguments.get("kv_channels") or hidden_size // queries,
        "intermediate_size": arguments.get("ffn_hidden_size") or 4 * hidden_size,
        "mamba_head_dim": head_dim,
        "attention_dropout": arguments.get("attention_dropout") or 0.0,
    }
    activation = next((ours for ours, theirs in _ACTIVATIONS.items() if theirs and arguments.get(theirs)), "gelu")
    if not (tied or gated or turned):
        kinds = {MIXER: "linear_attention", ATTENTION: "full_attention", MLP: "mlp"}
        return "nemotron_h", {
            **common,
            "layers_block_type": [kinds[symbol] for symbol in pattern],
            "mamba_num_heads": heads,
            "ssm_state_size": state,
            "mlp_hidden_act": activation,
            "max_position_embeddings": arguments.get("max_position_embeddings") or 4096,
        }
    if rest:
        raise RecipeError(
            f"the argument mamba_num_heads is {heads}, which no model here computes together with a tied head, swiglu "
            f"or rope: {heads} * {head_dim} is no multiple of hidden_size {hidden_size}."
        )
    return "mamba2_hybrid", {
        **common,
        "pattern": pattern,
        "expand": expand,
        "state_size": state,
        "mlp_gated": gated,
        "hidden_act": "silu" if gated else activation,
        "attention_conv_kernel": 0,
        "rotary_dim": int(common["head_dim"] * (arguments.get("rotary_percent") or 1.0)) if turned else 0,
        "rope_theta": float(arguments.get("rotary_base") or 10000),
        "rope_interleaved": bool(arguments.get("rotary_interleaved")),
    }


# -- writing -------------------------------------------------------------------------------------------------------


def express(config: PreTrainedConfig) -> dict[str, Any]:
    """Megatron's arguments of a model, without those that say how it is spread.

    Raises:
        RecipeError: another family, or every field whose value Megatron has no argument for.
    """
    if config.model_type not in ("mamba2", "nemotron_h", "mamba2_hybrid"):
        raise RecipeError(
            f"model_type: the megatron layout has no {config.model_type}; it has mamba2, nemotron_h, mamba2_hybrid."
        )
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        raise RecipeError("layers_block_type has moe, which the megatron layout cannot express: experts are not read.")
    mistakes = [
        f"{name} is {value}, which the megatron layout cannot express: it has {expected}."
        for name, value, expected in _fixed(config)
        if value != expected
    ]
    if mistakes:
        raise RecipeError(mistakes)
    if config.model_type == "nemotron_h" and config.time_step_min > _NO_LEAST_STEP:
        logger.warning(
            "convert: transformers keeps step sizes of %s above time_step_min %s, Megatron does not bound them: where "
            "they are smaller the two compute slightly different logits. The weights are the same.",
            config.model_type,
            config.time_step_min,
        )
    geometry = geometry_of(config)
    hybrid = config.model_type != "mamba2"
    mixer_head = geometry.inner // geometry.heads
    turned = config.rotary_dim if config.model_type == "mamba2_hybrid" and ATTENTION in config.pattern else 0
    values: dict[str, Any] = {
        "num_layers": geometry.layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": geometry.ffn if hybrid else 4 * config.hidden_size,
        "num_attention_heads": geometry.query_heads if hybrid else geometry.heads,
        "group_query_attention": geometry.key_heads != geometry.query_heads,
        "num_query_groups": geometry.key_heads,
        "kv_channels": geometry.head_dim if hybrid else mixer_head,
        "attention_dropout": config.attention_dropout if hybrid else 0.0,
        "hybrid_override_pattern": geometry.pattern,
        "mamba_state_dim": geometry.state,
        "mamba_head_dim": mixer_head,
        "mamba_num_groups": geometry.groups,
        "mamba_num_heads": geometry.heads,
        "untie_embeddings_and_output_weights": not _tied(config),
        "fp32_residual_connection": bool(config.residual_in_fp32),
        "norm_epsilon": _EPSILON,
        "swiglu": geometry.gated,
        "position_embedding_type": "rope" if turned else "none",
        "rotary_percent": _share(turned, geometry.head_dim) if turned else 1.0,
        "rotary_base": int(config.rope_theta) if turned else 10000,
        "rotary_interleaved": bool(turned and config.rope_interleaved),
        "max_position_embeddings": config.max_position_embeddings if config.model_type == "nemotron_h" else 4096,
        "make_vocab_size_divisible_by": _DIVISIBLE,
        **_always(),
        "params_dtype": config.dtype,
        "bf16": config.dtype == torch.bfloat16,
        "fp16": config.dtype == torch.float16,
    }
    activation = _ACTIVATIONS.get(_activation(config))
    values |= {name: name == activation for name in _ACTIVATIONS.values() if name}
    values["seq_length"] = values["max_position_embeddings"]
    kept = {name: vars(config)[name] for name in _KEPT if name in vars(config)}
    return {**values, OURS: {**kept, "vocab_size": config.vocab_size}}


def padded_rows(vocabulary: int, tensor_parallel: int) -> int:
    """The embedding's rows as Megatron pads them, a multiple of make-vocab-size-divisible-by on every rank."""
    multiple = _DIVISIBLE * tensor_parallel
    return -(-vocabulary // multiple) * multiple


def _share(part: int, whole: int) -> float:
    """A share of which Megatron, which rounds down, makes this part again."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2.0)


def _tied(config: PreTrainedConfig) -> bool:
    return bool(config.tie_word_embeddings) and config.model_type != "nemotron_h"  # which has no tied head


def _activation(config: PreTrainedConfig) -> str:
    if config.model_type == "mamba2":
        return "gelu"
    return config.mlp_hidden_act if config.model_type == "nemotron_h" else config.hidden_act


def _fixed(config: PreTrainedConfig) -> list[tuple[str, Any, Any]]:
    """Field, its value, and the one that Megatron computes."""
    fixed = [
        ("layer_norm_epsilon", config.layer_norm_epsilon, _EPSILON),
        ("conv_kernel", config.conv_kernel, _KERNEL),
        ("use_conv_bias", config.use_conv_bias, True),
        ("use_bias", config.use_bias, False),
    ]
    if config.model_type == "mamba2":
        return [*fixed, ("hidden_act", _plain(config.hidden_act), "silu"), _limit(config)]
    if MLP in geometry_of(config).pattern:
        field = "mlp_hidden_act" if config.model_type == "nemotron_h" else "hidden_act"
        act, gated = _plain(_activation(config)), config.model_type == "mamba2_hybrid" and config.mlp_gated
        fixed.append(("mlp_bias", config.mlp_bias, False))
        if gated or act not in _ACTIVATIONS:
            fixed.append((field, act, "silu" if gated else " or ".join(_ACTIVATIONS)))
    if config.model_type == "nemotron_h":
        fixed.append(("mamba_hidden_act", _plain(config.mamba_hidden_act), "silu"))
        return [*fixed, ("sliding_window", config.sliding_window, None)]
    fixed += [("norm", config.norm, "rms"), _limit(config)]
    if config.has_attention:
        fixed += [
            ("attention_conv_kernel", config.attention_conv_kernel, 0),
            ("attention_mlp_size", config.attention_mlp_size, 0),
            ("attention_scale", config.attention_scale, None),
            ("attention_bias", config.attention_bias, False),
            ("attention_out_bias", config.attention_out_bias, False),
        ]
    if config.has_attention and config.rotary_dim:
        fixed.append(("rope_theta", config.rope_theta, float(int(config.rope_theta or 0))))
    return fixed


def _plain(activation: str) -> str:
    return {"swish": "silu"}.get(activation, activation)


def _limit(config: PreTrainedConfig) -> tuple[str, Any, Any]:
    return ("time_step_limit", tuple(config.time_step_limit), (0.0, float("inf")))


def _always() -> dict[str, Any]:
    """What is the same in every checkpoint that is written here, for the programs that look for it."""
    return {
        **dict.fromkeys(("add_bias_linear", "add_qkv_bias", "apply_layernorm_1p", "add_position_embedding"), False),
        **dict.fromkeys(("apply_query_key_layer_scaling", "sequence_parallel", "use_dist_ckpt"), False),
        "data_parallel_random_init": False,
        **dict.fromkeys(("iteration", "train_iters", "train_samples"), 0),
        **dict.fromkeys(("consumed_train_samples", "consumed_valid_samples"), 0),
        **dict.fromkeys(("num_experts", "mtp_num_layers", "virtual_pipeline_model_parallel_size", "tokenizer_type")),
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "is_hybrid_model": True,
        "use_mcore_models": True,
        "transformer_impl": "transformer_engine",
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "ckpt_format": "torch",
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
