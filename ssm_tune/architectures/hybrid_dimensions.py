"""From a recipe's model section to the config of an architecture with several kinds of layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ssm_tune.architectures.auto import register_configs
from ssm_tune.architectures.configs import default_heads, default_intermediate_size
from ssm_tune.architectures.hybrid_sizes import BLUEPRINTS, HYBRIDS, JAMBA, Blueprint
from ssm_tune.architectures.patterns import ATTENTION, MIXER, MLP, allot_layers, attend_every, repeat_pattern
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from ssm_tune.recipe import ModelSection

NAMES = ("hybrid", *BLUEPRINTS)
_LAYERING = ("pattern", "attention_ratio", "mlp_ratio", "layers", "attention_every")
# Fields of every config that are not dimensions.
_COMMON = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "pattern", "num_logits_to_keep"),
}
_WHOLE = ("int", "int | None", "<class 'int'>")  # types of fields, as they are written
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
    mistakes += _dimension_mistakes(section, blueprint, given, known)
    if mistakes:
        raise RecipeError([f"{mistake}." for mistake in mistakes])
    values = _fill(blueprint, {**blueprint.defaults, **size, **given})
    if blueprint.layered:
        pattern = _layer_pattern(section, size, values)
        values = {name: value for name, value in values.items() if name not in _LAYERING}
        if pattern is not None:
            blueprint, values = _lay_out(section, blueprint, values, pattern)
    values = {blueprint.renamed.get(name, name): value for name, value in values.items()}
    try:
        return AutoConfig.for_model(
            blueprint.model_type, **values, **tokens, vocab_size=math.ceil(vocab_size / multiple) * multiple
        )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise RecipeError(f"model.dimensions: {' '.join(str(error).split())}") from error


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


def _dimension_mistakes(
    section: ModelSection, blueprint: Blueprint, given: Mapping[str, Any], known: list[str]
) -> list[str]:
    fields = dataclasses.fields(CONFIG_MAPPING[blueprint.model_type])
    whole = {field.name for field in fields if str(field.type) in _WHOLE}
    mistakes = []
    for key, value in given.items():
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
        elif blueprint.renamed.get(key, key) in whole and (not isinstance(value, int) or isinstance(value, bool)):
            mistakes.append(f"model.dimensions.{key} is {value!r}; a whole number is expected")
    return mistakes


def _layer_pattern(section: ModelSection, size: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """The layers that the section's own keys ask for, else the size's; None: the model's own way."""
    layers = section.layers or values.get("num_hidden_layers")
    asked = {key: getattr(section, key) for key in _LAYERING if getattr(section, key) is not None}
    if not set(asked) - {"layers"}:
        asked |= {key: size[key] for key in _LAYERING if key in size}
    try:
        if "pattern" in asked:
            return repeat_pattern(asked["pattern"], layers)
        if layers is None:
            raise ValueError("the number of layers is missing; give model.layers or dimensions.num_hidden_layers")
        if "attention_every" in asked:
            if asked.get("mlp_ratio") is not None:
                raise ValueError("attention_every has an MLP after each layer; it does not go with mlp_ratio")
            return attend_every(layers, asked["attention_every"])
        if "attention_ratio" in asked or "mlp_ratio" in asked:
            return allot_layers(layers, asked.get("attention_ratio") or 0.0, asked.get("mlp_ratio") or 0.0)
    except ValueError as error:
        raise RecipeError(f"model.pattern: {error}.") from error
    if section.architecture == "hybrid":
        raise RecipeError(
            "model: a hybrid needs its layers: a pattern (M*M-), attention_ratio and mlp_ratio, or attention_every."
        )
    return None


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
