"""From a recipe's `architecture`, `size` and `dimensions` to a config of transformers' classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ssm_tune.architectures.values import dimension_values, reason
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from ssm_tune.recipe import ModelSection

# mamba_ssm's initializer_range, which there is the embedding's alone; transformers' 0.1 starts a model far above ln V.
EMBEDDING_STD = 0.02

_COMMON = (
    "hidden_size",
    "num_hidden_layers",
    "state_size",
    "expand",
    "conv_kernel",
    "use_bias",
    "use_conv_bias",
    "layer_norm_epsilon",
    "residual_in_fp32",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "initializer_range",
    "tie_word_embeddings",
)
_MAMBA1 = (*_COMMON, "time_step_rank", "time_step_scale", "time_step_init_scheme")
# mamba_ssm's names, which users of the original package know.
_ORIGINAL_NAMES = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "dt_rank": "time_step_rank",
    "tie_embeddings": "tie_word_embeddings",
}
# Keys of the model section that belong to other architectures than those here.
_HYBRID_KEYS = ("pattern", "attention_ratio", "mlp_ratio", "layers", "attention_every", "mixer")


@dataclass(frozen=True)
class Architecture:
    """A family that can be built from dimensions.

    Args:
        model_type: of transformers' config class.
        dimensions: the config fields that a recipe may set.
        defaults: values of the published models where transformers' config class has others.
        sizes: the published ones, as dimensions.
        vocabulary_multiple: the vocabulary is rounded up to it.
    """

    model_type: str
    dimensions: tuple[str, ...]
    defaults: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]]
    vocabulary_multiple: int


def _widths(hidden_size: int, num_hidden_layers: int, **others: Any) -> dict[str, Any]:
    return {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers, **others}


ARCHITECTURES: dict[str, Architecture] = {
    # Mamba (Gu and Dao, 2023), table 12, and the configs of the state-spaces/mamba-* models.
    "mamba": Architecture(
        "mamba",
        _MAMBA1,
        {"state_size": 16, "tie_word_embeddings": True},
        {
            "130m": _widths(768, 24),
            "370m": _widths(1024, 48),
            "790m": _widths(1536, 48),
            "1.4b": _widths(2048, 48),
            "2.8b": _widths(2560, 64),
        },
        8,
    ),
    # Transformers are SSMs (Dao and Gu, 2024), and the configs of the state-spaces/mamba2-* models.
    "mamba2": Architecture(
        "mamba2",
        (*_COMMON, "head_dim", "n_groups", "chunk_size", "time_step_limit"),
        {"state_size": 128, "head_dim": 64, "n_groups": 1, "chunk_size": 256, "tie_word_embeddings": True},
        {
            "130m": _widths(768, 24),
            "370m": _widths(1024, 48),
            "780m": _widths(1536, 48),
            "1.3b": _widths(2048, 48),
            "2.7b": _widths(2560, 64),
            # Mamba-Codestral-7B-v0.1's params.json; the Mamba-2 of Waleffe et al. (2024), table 6.
            "7b": _widths(4096, 64, n_groups=8, tie_word_embeddings=False),
            "8b": _widths(4096, 56, n_groups=8, tie_word_embeddings=False),
        },
        16,
    ),
    # Falcon Mamba (Zuo et al., 2024): Mamba with an RMS norm on dt, B and C.
    "falcon_mamba": Architecture(
        "falcon_mamba",
        (*_MAMBA1, "mixer_rms_eps"),
        {"state_size": 16, "tie_word_embeddings": False},
        {"7b": _widths(4096, 64)},
        8,
    ),
}
ALIASES = {"mamba1": "mamba", "falcon-mamba": "falcon_mamba"}


def plan_config(section: ModelSection, vocab_size: int, tokens: Mapping[str, int | None]) -> PreTrainedConfig:
    """The config that a model section describes.

    Args:
        section: `architecture` with a `size`, `dimensions`, or both (a dimension then overrides the size's).
        vocab_size: the tokenizer's.
        tokens: pad_token_id, bos_token_id, eos_token_id.

    Raises:
        RecipeError: every mistake in the section: an unknown architecture, size, dimension or value, or a key that the
            architecture has no use for.
    """
    architecture = _find_architecture(section)
    given = dict(section.dimensions or {})
    mistakes = [
        f"model.{key} has no meaning for architecture {section.architecture}, which has one kind of layer. Remove it, "
        "or write architecture: hybrid"
        for key in _HYBRID_KEYS
        if getattr(section, key) is not None
    ]
    size: Mapping[str, Any] = {}
    if section.size is not None:
        if section.size in architecture.sizes:
            size = architecture.sizes[section.size]
        else:
            mistakes.append(
                f"model.size: {section.architecture} has no published size {section.size!r}. It has "
                f"{', '.join(architecture.sizes)}; for others give model.dimensions"
            )
    else:
        mistakes += [
            f"model.dimensions.{key} is missing (or give model.size: {', '.join(architecture.sizes)})"
            for key in ("hidden_size", "num_hidden_layers")
            if key not in given and key not in _renamed(given)
        ]
    multiple = given.pop("pad_vocab_size_multiple", architecture.vocabulary_multiple)
    if not _is_whole(multiple):
        mistakes.append(
            f"model.dimensions.pad_vocab_size_multiple is {multiple!r}; a positive whole number is expected"
        )
    mistakes += _dimension_mistakes(section, architecture, given)
    known = {name: value for name, value in given.items() if name in architecture.dimensions}
    given, wrong = dimension_values(CONFIG_MAPPING[architecture.model_type], known, {})
    mistakes += wrong
    if mistakes:
        raise RecipeError([f"{mistake}." for mistake in mistakes])
    values = {"initializer_range": EMBEDDING_STD, **architecture.defaults, **size, **given}
    return _build(architecture, values, math.ceil(vocab_size / multiple) * multiple, tokens)


def _find_architecture(section: ModelSection) -> Architecture:
    if section.architecture is None:
        raise RecipeError(f"model.architecture is missing. It is one of {', '.join(ARCHITECTURES)}.")
    name = ALIASES.get(section.architecture, section.architecture)
    if name not in ARCHITECTURES:
        near = get_close_matches(name, ARCHITECTURES, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(
            f"model.architecture: {section.architecture!r} cannot be built from scratch.{guess} "
            f"Supported: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


def _renamed(given: Mapping[str, Any]) -> set[str]:
    return {_ORIGINAL_NAMES[key] for key in given if key in _ORIGINAL_NAMES}


def _dimension_mistakes(section: ModelSection, architecture: Architecture, given: Mapping[str, Any]) -> list[str]:
    mistakes = []
    for key in given:
        if key == "vocab_size":
            mistakes.append("model.dimensions.vocab_size follows the tokenizer (tokenizer.vocab_size). Remove it")
        elif key == "num_heads" and "head_dim" in architecture.dimensions:
            mistakes.append("model.dimensions.num_heads follows from expand * hidden_size / head_dim; set head_dim")
        elif key not in architecture.dimensions:
            near = get_close_matches(key, architecture.dimensions, n=1)
            name = _ORIGINAL_NAMES.get(key, near[0] if near else None)
            guess = f". Did you mean {name}?" if name in architecture.dimensions else ""
            mistakes.append(
                f"model.dimensions.{key} is not a dimension of {section.architecture}{guess} It has "
                f"{', '.join(architecture.dimensions)}, pad_vocab_size_multiple"
            )
    return mistakes


def _build(
    architecture: Architecture, values: dict[str, Any], vocab_size: int, tokens: Mapping[str, int | None]
) -> PreTrainedConfig:
    if architecture.model_type == "mamba2":
        inner = values.get("expand", 2) * values["hidden_size"]
        heads, rest = divmod(inner, values["head_dim"])
        if rest:
            raise RecipeError(
                f"model.dimensions: expand * hidden_size is {inner}, which is not a multiple of head_dim "
                f"{values['head_dim']}."
            )
        if heads % values["n_groups"]:
            raise RecipeError(
                f"model.dimensions: there are {heads} heads (expand * hidden_size / head_dim), which is not a multiple "
                f"of n_groups {values['n_groups']}."
            )
        values = {**values, "num_heads": heads}
    try:
        return AutoConfig.for_model(
            architecture.model_type,
            **values,
            **tokens,
            vocab_size=vocab_size,
        )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise RecipeError(f"model.dimensions: {reason(error)}") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
