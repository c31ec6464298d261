"""Whether the dimensions that a recipe gives can be values of a config class, which itself checks few of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# Whole numbers that may be 0: counts of what a model can be without, and places among layers.
_MAY_BE_ZERO = frozenset(
    {
        *("mimo_rank", "attention_mlp_size", "attention_conv_kernel", "rotary_dim"),
        *("attn_layer_offset", "expert_layer_offset", "num_nextn_predict_layers"),
        *("num_experts_per_tok", "num_local_experts", "n_shared_experts", "shared_intermediate_size"),
    }
)
_ABOVE_ZERO = re.compile(r"time_step_(min|max|floor|scale)|.*(epsilon|eps)|rope_theta|initializer_range")
_CHOICES = {"norm": ("rms", "layer"), "time_step_init_scheme": ("random", "constant")}


def dimension_values(
    config_class: type[PreTrainedConfig], given: Mapping[str, Any], renamed: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The given dimensions, whole numbers made floats where the class wants those; and what is wrong with them.

    Args:
        given: by the recipe's names. renamed: what the class calls some of them.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    values, mistakes = dict(given), []
    for name, value in given.items():
        field = fields.get(renamed.get(name, name))
        kinds = set() if field is None else _kinds(field.type)
        wanted = _expected(name, value, kinds)
        if wanted:
            mistakes.append(f"model.dimensions.{name} is {value!r}; {wanted} is expected")
        elif "float" in kinds and isinstance(value, int) and not isinstance(value, bool):
            values[name] = float(value)
    if not mistakes:
        mistakes = _step_mistakes(fields, values)
    return values, mistakes


def reason(error: Exception) -> str:
    """What a config class says of its values, without the names of its own checks."""
    text = " ".join(str(error).split())
    return re.sub(r"^(Class v|V)alidation error for (validator|field) '\w+': \w+: ", "", text)


def _kinds(annotation: Any) -> set[str]:
    """The plain types of an annotation, or none if there are others; "None" among them."""
    text = annotation if isinstance(annotation, str) else str(annotation)
    text = annotation.__name__ if isinstance(annotation, type) else text
    kinds = {part.strip() for part in text.split("|")}
    return {kind.replace("NoneType", "None") for kind in kinds} if kinds <= _PLAIN else set()


_PLAIN = {"int", "float", "bool", "str", "None", "NoneType"}


def _expected(name: str, value: Any, kinds: set[str]) -> str:
    """What should stand in the place of a value, or "" if it is right."""
    if not kinds or (value is None and "None" in kinds):
        return ""
    if isinstance(value, bool) or kinds <= {"bool", "None"}:
        if isinstance(value, bool) and "bool" in kinds:
            return ""
        return "true or false" if "bool" in kinds else _number(name, kinds)
    if isinstance(value, str) and "str" in kinds:
        return _text(name, value)
    if isinstance(value, int) and "float" not in kinds:
        return "" if value >= (name not in _MAY_BE_ZERO) else _number(name, kinds)
    if isinstance(value, int | float) and "float" in kinds:
        if "dropout" in name:
            return "" if 0 <= value < 1 else "a share from 0 to less than 1"
        return "" if value > 0 or not _ABOVE_ZERO.fullmatch(name) else _number(name, kinds)
    return _number(name, kinds)


def _number(name: str, kinds: set[str]) -> str:
    if "float" in kinds:
        return "a number above 0" if _ABOVE_ZERO.fullmatch(name) else "a number"
    if "int" in kinds:
        return "a whole number from 0" if name in _MAY_BE_ZERO else "a positive whole number"
    return "text"


def _text(name: str, value: str) -> str:
    if name.endswith("hidden_act") and value not in ACT2FN:
        near = get_close_matches(value, ACT2FN, n=1)
        return f"an activation such as {near[0] if near else 'silu'}"
    if value not in _CHOICES.get(name, (value,)):
        return " or ".join(_CHOICES[name])
    return "" if name != "time_step_rank" or value == "auto" else "a positive whole number, or auto,"


def _step_mistakes(fields: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    ends = ("time_step_min", "time_step_max")
    if not set(ends) & set(values):
        return []
    low, high = (values.get(name, fields[name].default) for name in ends)
    if low <= high:
        return []
    return [f"model.dimensions.time_step_min is {low}, which is more than time_step_max {high}"]
