"""Whether a checkpoint's tensors are those of its model: each that is missing, unexpected or mis-shaped is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ssm_tune.layouts import Checkpoint, StoredTensor
from ssm_tune.recipe import RecipeError

_SHOWN = 8  # names in one message


def check_weights(checkpoint: Checkpoint, weights: Mapping[str, StoredTensor]) -> PreTrainedModel:
    """Go through the motions of loading with shapes alone, which costs no memory, and return the model without values.

    transformers itself would read everything first, and then go on with random weights in the place of missing ones.

    Raises:
        RecipeError: names the tensors that are missing, unexpected or mis-shaped.
    """
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.items()}
    return read_strictly(checkpoint, shapes, checkpoint.config, {"device_map": {"": "meta"}}, stored=weights)


def read_strictly(
    checkpoint: Checkpoint,
    weights: Mapping[str, Any],
    config: PreTrainedConfig,
    options: Mapping[str, Any],
    *,
    stored: Mapping[str, StoredTensor],
) -> PreTrainedModel:
    """transformers' model with these weights, all of them and no others.

    Args:
        weights: tensors, or stored ones, by transformers' names.
        config: the checkpoint's, or a changed copy.
        options: for from_pretrained.
        stored: where they are from, for messages.

    Raises:
        RecipeError: names the tensors that do not fit, or says what transformers says of the options.
    """
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    try:
        with _quiet_transformers():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                ignore_mismatched_sizes=True,  # so that all of them are reported, not the first
                output_loading_info=True,
                **options,
            )
    except (ImportError, ValueError) as error:
        raise RecipeError(f"{checkpoint.source.label}: {error}") from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise _error(checkpoint, _unlike_siblings(weights) or [str(error)]) from error
    mistakes = []
    if report["missing_keys"]:
        mistakes.append(f"missing: {_list(map(checkpoint.name_in_file, report['missing_keys']))}")
    if report["unexpected_keys"]:
        names = (stored[name].name if name in stored else name for name in report["unexpected_keys"])
        mistakes.append(f"not part of the model: {_list(names)}")
    mistakes += [_shape_mistake(checkpoint, *mismatch) for mismatch in sorted(report["mismatched_keys"])]
    if mistakes:
        raise _error(checkpoint, mistakes)
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its report of a bad checkpoint is a table of warnings; ours is one error that names the tensors."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with without_bars():
            yield
    finally:
        transformers_logging.set_verbosity(level)


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers' progress bars, one for every file read or written, would stand among a command's own lines."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _unlike_siblings(weights: Mapping[str, Any]) -> list[str]:
    """Which experts do not stack into one tensor, as transformers has them: those shaped unlike most of their layer."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        if ".experts." in name:
            layers.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", name), []).append(name)
    mistakes = []
    for names in layers.values():
        usual, _ = Counter(weights[name].shape for name in names).most_common(1)[0]
        for name in names:
            if weights[name].shape != usual:
                shape = _shape(weights[name].shape)
                mistakes.append(f"{name} is {shape}, the other experts of its layer are {_shape(usual)}")
    return mistakes


def _error(checkpoint: Checkpoint, mistakes: list[str]) -> RecipeError:
    where = f"{checkpoint.source.label}: the weights do not fit the config"
    return RecipeError([f"{where}: {mistake}." for mistake in mistakes])


def _shape_mistake(checkpoint: Checkpoint, name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    rows = len(stored) == 2 and tuple(stored[1:]) == tuple(expected[1:]) and expected[0] == checkpoint.config.vocab_size
    hint = f" (vocab_size in the config should be {stored[0]})" if rows else ""
    name = checkpoint.name_in_file(name)
    return f"{name} is {_shape(stored)} in the file, {_shape(expected)} by the config{hint}"


def _list(names: Iterable[str]) -> str:
    ordered = sorted(set(names))
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
