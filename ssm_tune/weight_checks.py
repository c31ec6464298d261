"""Whether a checkpoint's tensors are those of its model: each that is missing, unexpected or mis-shaped is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ssm_tune.layouts import Checkpoint, StoredTensor
from ssm_tune.recipe import RecipeError

_SHOWN = 8  # names in one message


def check_shapes(checkpoint: Checkpoint, weights: Mapping[str, StoredTensor], model: nn.Module) -> None:
    """Refuse mis-shaped tensors before any is read: transformers reads all first, and fails on a mis-shaped tied head.

    `model`: of the config, on the meta device. Tensors that transformers stacks or renames are left to `check_report`.

    Raises:
        RecipeError: names each tensor, with both shapes.
    """
    if hasattr(checkpoint.config, "quantization_config"):
        return  # packed shapes are not the model's
    expected = model.state_dict()
    _refuse(
        checkpoint,
        [
            _shape_mistake(checkpoint, name, tensor.shape, expected[name].shape)
            for name, tensor in weights.items()
            if name in expected and tensor.shape != tuple(expected[name].shape)
        ],
    )


def check_report(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Refuse what transformers only reports: it would go on with random weights in the place of missing ones.

    Raises:
        RecipeError: names the tensors that are missing, unexpected or mis-shaped.
    """
    mistakes = []
    if report["missing_keys"]:
        mistakes.append(f"missing: {_list(report['missing_keys'])}")
    if report["unexpected_keys"]:
        mistakes.append(f"not part of the model: {_list(report['unexpected_keys'])}")
    mistakes += [_shape_mistake(checkpoint, *mismatch) for mismatch in sorted(report["mismatched_keys"])]
    _refuse(checkpoint, mistakes)


def stacking_error(checkpoint: Checkpoint, weights: Mapping[str, StoredTensor]) -> RecipeError:
    """What to say when experts do not stack into one tensor, as transformers has them: which differ from the others."""
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
    return _error(checkpoint, mistakes or ["its experts cannot be stacked"])


def _refuse(checkpoint: Checkpoint, mistakes: list[str]) -> None:
    if mistakes:
        raise _error(checkpoint, mistakes)


def _error(checkpoint: Checkpoint, mistakes: list[str]) -> RecipeError:
    where = f"{checkpoint.source.label}: the weights do not fit the config"
    return RecipeError([f"{where}: {mistake}." for mistake in mistakes])


def _shape_mistake(checkpoint: Checkpoint, name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    rows = len(stored) == 2 and tuple(stored[1:]) == tuple(expected[1:]) and expected[0] == checkpoint.config.vocab_size
    hint = f" (vocab_size in the config should be {stored[0]})" if rows else ""
    return f"{name} is {_shape(stored)} in the file, {_shape(expected)} by the config{hint}"


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
