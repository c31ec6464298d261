"""New models of any architecture: the config that a recipe's model section describes, and the first values."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from ssm_tune.architectures import dimensions, hybrid_dimensions, initialization
from ssm_tune.architectures.hybrid_initialization import initialize_hybrid
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from ssm_tune.recipe import ModelSection


def plan_config(section: ModelSection, vocab_size: int, tokens: Mapping[str, int | None]) -> PreTrainedConfig:
    """The config that a model section describes.

    Args:
        section: `architecture` with a `size`, `dimensions`, or both (a dimension then overrides the size's), and for
            hybrids which layers there are.
        vocab_size: the tokenizer's.
        tokens: pad_token_id, bos_token_id, eos_token_id.

    Raises:
        RecipeError: every mistake in the section.
    """
    name = section.architecture
    if name in hybrid_dimensions.NAMES:
        return hybrid_dimensions.plan_hybrid(section, vocab_size, tokens)
    known = (*dimensions.ARCHITECTURES, *hybrid_dimensions.NAMES)
    if name is not None and name not in (*known, *dimensions.ALIASES):
        near = get_close_matches(name, known, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(
            f"model.architecture: {name!r} cannot be built from scratch.{guess} Supported: {', '.join(known)}."
        )
    return dimensions.plan_config(section, vocab_size, tokens)


def initialize(model: Any, seed: int) -> None:
    """Give every parameter of a new model its first value, in place, as its paper says.

    Args:
        model: on the CPU; its values do not matter. A tied head is left tied.
        seed: of every number drawn; torch's own random state is neither used nor moved.
    """
    if model.config.model_type in dimensions.ARCHITECTURES:
        initialization.initialize(model, seed)
    else:
        initialize_hybrid(model, seed)
