"""From a recipe's model section to the config of an architecture with several kinds of layers."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ssm_tune.architectures.auto import register_configs
from ssm_tune.architectures.configs import default_heads, default_intermediate_size
from ssm_tune.architectures.hybrid_sizes import BLUEPRINTS, HYBRIDS, JAMBA, MAMBA2_ALONE, Blueprint
from ssm_tune.architectures.patterns import ATTENTION, MIXER, MLP, allot_layers, attend_every, repeat_pattern
from ssm_tune.architectures.values import dimension_values, reason
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from ssm_tune.recipe import ModelSection

logger = logging.getLogger(__name__)

NAMES = ("hybrid", *BLUEPRINTS)
_LAYERING = ("pattern", "attention_ratio", "mlp_ratio", "layers", "attention_every")
_SHARES = ("attention_ratio", "mlp_ratio")
# Fields of every config that are not dimensions.
_COMMON = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "pattern", "num_logits_to_keep"),
}
_NEMOTRON_LAYERS = {MIXER: "linear_attention", ATTENTION: "full_attention", MLP: "mlp"}


def plan_hybrid(section: ModelSection, vocab_size: int, tokens: Mapping[str, int | None]) -> PreTrainedConfig:
    """The config that a model section describes; as `dimensions.plan_config`, for the architectures in NAMES.

    Raises:
        RecipeError: every mistake in the section.
    """
    register_configs()
    mistakes: list[str] = []
    blueprint = _find_blueprint(section, mistakes)
    given = dict(section.dimensions or {})
    size = _find_size(section, blueprint, given, mistakes)
    multiple = given.pop("pad_vocab_size_multiple", blueprint.multiple)
    if not isinstance(multiple, int) or multiple < 1:
        mistakes.append(
            f"model.dimensions.pad_vocab_size_multiple is {multiple!r}; a positive whole number is expected"
        )
    known = _dimensions_of(blueprint)
    mistakes += _dimension_mistakes(section, given, known)
    used = {name: value for name, value in given.items() if name in known}
    given, wrong = dimension_values(CONFIG_MAPPING[blueprint.model_type], used, blueprint.renamed)
    mistakes += wrong
    if mistakes:
        raise RecipeError([f"{mistake}." for mistake in mistakes])
    values = _fill(blueprint, {**blueprint.defaults, **size, **given})
    if blueprint.layered:
        pattern = _layer_pattern(section, size, values)
        values = {name: value for name, value in values.items() if name not in _LAYERING}
        if pattern is not None:
            blueprint, values = _lay_out(section, blueprint, values, pattern)
    values = {blueprint.renamed.get(name, name): value for name, value in values.items()}
    if blueprint.model_type == "zamba2" and "layers_block_type" not in values:
        values["layers_block_type"] = _zamba2_layers(values["num_hidden_layers"])
    try:
        config = AutoConfig.for_model(
            blueprint.model_type, **values, **tokens, vocab_size=math.ceil(vocab_size / multiple) * multiple
        )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise RecipeError(f"model.dimensions: {reason(error)}") from error
    _check_config(config, section.architecture)
    return config


def _fill(blueprint: Blueprint, values: dict[str, Any]) -> dict[str, Any]:
    """Attention and MLPs in proportion to the width, where the config class has the numbers of one large model."""
    hidden_size = values["hidden_size"]
    if not blueprint.in_proportion or not isinstance(hidden_size, int):
        return values
    gated = blueprint.model_type != "nemotron_h"
    heads = values.get("num_attention_heads", default_heads(hidden_size))
    filled = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": default_intermediate_size(hidden_size, gated),
    }
    return {name: value for name, value in filled.items() if name in _dimensions_of(blueprint)} | values


def _find_blueprint(section: ModelSection, mistakes: list[str]) -> Blueprint:
    name = section.architecture
    if name == "hybrid":
        mixer = section.mixer or "mamba2"
        if mixer not in HYBRIDS:
            near = get_close_matches(mixer, HYBRIDS, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise RecipeError(
                f"model.mixer: {mixer!r} is not a mixer of hybrids.{guess} It is one of {', '.join(HYBRIDS)}."
            )
        return HYBRIDS[mixer]
    assert name is not None
    if section.mixer is not None:
        mistakes.append(f"model.mixer belongs to architecture hybrid; {name} has its own. Remove it")
    blueprint = BLUEPRINTS[name]
    if not blueprint.layered:
        mistakes += [
            f"model.{key} has no meaning for architecture {name}, whose order of layers is its own. Remove it, or "
            "write architecture: hybrid"
            for key in _LAYERING
            if getattr(section, key) is not None
        ]
    return blueprint


def _find_size(
    section: ModelSection, blueprint: Blueprint, given: Mapping[str, Any], mistakes: list[str]
) -> Mapping[str, Any]:
    if section.size is not None:
        if section.size in blueprint.sizes:
            return blueprint.sizes[section.size]
        sizes = f"It has {', '.join(blueprint.sizes)}; for others" if blueprint.sizes else "Instead"
        mistakes.append(
            f"model.size: {section.architecture} has no size {section.size!r}. {sizes} give model.dimensions"
        )
        return {}
    sizes = f" (or give model.size: {', '.join(blueprint.sizes)})" if blueprint.sizes else ""
    needed = ["hidden_size"]
    if not blueprint.layered or not (section.pattern or section.layers):
        needed.append("layers_block_type" if section.architecture == "nemotron_h" else "num_hidden_layers")
    mistakes += [f"model.dimensions.{key} is missing{sizes}" for key in needed if key not in given]
    return {}


def _dimensions_of(blueprint: Blueprint) -> list[str]:
    """What a recipe may set."""
    config = CONFIG_MAPPING[blueprint.model_type]
    fields = {field.name for field in dataclasses.fields(config)} - _COMMON - set(blueprint.hidden)
    names = (fields - set(blueprint.renamed.values())) | set(blueprint.renamed) | {"num_hidden_layers"}
    if blueprint.model_type == "nemotron_h":
        names = names | {"expand"} if blueprint.layered else names - {"num_hidden_layers"}
    return sorted(names)


def _dimension_mistakes(section: ModelSection, given: Mapping[str, Any], known: list[str]) -> list[str]:
    mistakes = []
    for key in given:
        if key == "vocab_size":
            mistakes.append("model.dimensions.vocab_size follows the tokenizer (tokenizer.vocab_size). Remove it")
        elif key in _LAYERING:
            mistakes.append(f"model.dimensions.{key} is not a dimension: write model.{key}")
        elif key not in known:
            near = get_close_matches(key, known, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            mistakes.append(
                f"model.dimensions.{key} is not a dimension of {section.architecture}.{guess} It has "
                f"{', '.join(known)}, pad_vocab_size_multiple"
            )
    return mistakes


def _layer_pattern(section: ModelSection, size: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """The layers that the section's own keys ask for, else the size's; None: the model's own way."""
    layers = section.layers or values.get("num_hidden_layers")
    given = (section.dimensions or {}).get("num_hidden_layers", layers)
    if given != layers:
        raise RecipeError(f"model.layers is {layers}, model.dimensions.num_hidden_layers {given}. Keep one.")
    asked = {key: getattr(section, key) for key in _LAYERING if getattr(section, key) is not None}
    if set(asked) <= {"layers", *_SHARES}:  # what is not asked for is as the size has it
        asked = {key: size[key] for key in _LAYERING if key in size} | asked
    key = next((key for key in ("pattern", "attention_every", *_SHARES) if key in asked), None)
    if layers is None and key not in (None, "pattern"):
        raise RecipeError(f"model.layers is missing, the number of layers that model.{key} is of.")
    try:
        if key == "pattern":
            return repeat_pattern(asked[key], layers)
        if key == "attention_every":
            if "mlp_ratio" in asked:
                raise ValueError("there is an MLP after each layer, so it does not go with mlp_ratio")
            return attend_every(layers, asked[key])
        if key is not None:
            return _allotted(layers, *(asked.get(share) or 0.0 for share in _SHARES))
    except ValueError as error:
        raise RecipeError(f"model.{key}: {error}.") from error
    if section.architecture == "hybrid":
        raise RecipeError(
            "model: a hybrid needs its layers: a pattern (M*M-), attention_ratio and mlp_ratio, or attention_every."
        )
    return None


def _allotted(layers: int, attention: float, mlp: float) -> str:
    pattern = allot_layers(layers, attention, mlp)
    for name, share, symbol in zip(_SHARES, (attention, mlp), (ATTENTION, MLP), strict=True):
        if share and symbol not in pattern:
            logger.warning("model.%s: %s of %d layers is none at all.", name, share, layers)
    return pattern


def _lay_out(
    section: ModelSection, blueprint: Blueprint, values: dict[str, Any], pattern: str
) -> tuple[Blueprint, dict[str, Any]]:
    """The pattern as the config class of the blueprint says it, or of Jamba's where Jamba can."""
    values = {name: value for name, value in values.items() if name != "num_hidden_layers"}
    if blueprint.model_type == "mamba_hybrid":
        places = _jamba_places(pattern)
        if places is not None and set(values) <= set(_dimensions_of(JAMBA)):
            period, offset = places
            names = {"attn_layer_period": period, "attn_layer_offset": offset, "num_hidden_layers": len(pattern) // 2}
            return JAMBA, {**JAMBA.defaults, **values, **names}
    if blueprint.model_type == "nemotron_h" and ATTENTION not in pattern:
        return _without_attention(values, pattern)
    if blueprint.model_type != "nemotron_h":
        return blueprint, {**values, "pattern": pattern}
    inner = values.pop("expand", 2) * values["hidden_size"]
    head_dim = values.setdefault("mamba_head_dim", 64)
    if inner % head_dim:
        raise RecipeError(
            f"model.dimensions: expand * hidden_size is {inner}, not a multiple of mamba_head_dim {head_dim}."
        )
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return blueprint, {
        **values,
        "mamba_num_heads": inner // head_dim,
        "layers_block_type": [_NEMOTRON_LAYERS[symbol] for symbol in pattern],
    }


def _zamba2_layers(layers: int) -> list[str]:
    """Every sixth layer shares the transformer block, as in Zamba2-1.2B; of fewer the last one."""
    shared = range(5, layers, 6) or (layers - 1,)
    return ["hybrid" if index in shared else "linear_attention" for index in range(layers)]


def _without_attention(values: dict[str, Any], pattern: str) -> tuple[Blueprint, dict[str, Any]]:
    """Mamba-2 and MLPs alone: the class that mamba_ssm's hybrids are, since Nemotron-H's fails without attention."""
    unknown = sorted(set(values) - set(_dimensions_of(MAMBA2_ALONE)))
    if unknown:
        raise RecipeError(
            [f"model.dimensions.{name} has no meaning for a hybrid without attention layers." for name in unknown]
        )
    return MAMBA2_ALONE, {**MAMBA2_ALONE.defaults, **values, "pattern": pattern}


# Where the classes of transformers whose order of layers is their own say which layer is attention.
_PLACES = {
    "jamba": "attn_layer_period and attn_layer_offset",
    "bamba": "attn_layer_indices",
    "granitemoehybrid": "layer_types",
    "nemotron_h": "layers_block_type",
    "zamba2": "layers_block_type",
}


def _check_config(config: PreTrainedConfig, architecture: str | None) -> None:
    """Raises RecipeError for what the class itself passes over: attention that cannot be, or is nowhere where it cannot
    do without, and a tied head that it does not tie."""
    if config.tie_word_embeddings and config.model_type == "nemotron_h":
        raise RecipeError(
            f"model.dimensions.tie_word_embeddings: the head of this {architecture} cannot be the embedding; "
            "transformers' Nemotron-H, which it is built on, ties none. Leave it out."
        )
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        raise RecipeError(
            f"model.dimensions: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}."
        )
    if config.model_type in _PLACES and not {"full_attention", "hybrid"}.intersection(config.layer_types):
        raise RecipeError(
            f"model.dimensions: no layer of this {architecture} of {config.num_hidden_layers} layers is attention, "
            f"which it cannot be without. Set {_PLACES[config.model_type]}."
        )


def _jamba_places(pattern: str) -> tuple[int, int] | None:
    """Period and offset of Jamba's attention layers; None where a layer lacks its MLP, or they are not even."""
    sequence, mlps = pattern[::2], pattern[1::2]
    if MLP in sequence or set(mlps) != {MLP} or len(pattern) % 2:
        return None
    attention = [index for index, symbol in enumerate(sequence) if symbol == ATTENTION]
    if not attention:
        return None
    period = attention[1] - attention[0] if len(attention) > 1 else len(sequence)
    offset = attention[0] % period
    even = [index for index in range(len(sequence)) if index % period == offset]
    return (period, offset) if even == attention else None
