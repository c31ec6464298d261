"""Which modules of a model get an adapter: by family, or by name, checked before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from ssm_tune.families import Family, family_of, refusals
from ssm_tune.recipe import RecipeError


@dataclass
class Targets:
    """Where adapters go. `paths`: full module names; `left_out`: module or parameter name -> why it gets none."""

    paths: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def adapter_targets(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """The `target_modules` for PEFT: leaf names where they are unambiguous in this model, else full module names.

    Args:
        model: a causal language model; the meta device will do, so that mistakes are found before weights load.
        targets: "all", "portable", or names: leaf names (`in_proj`) or ends of module names (`0.mixer.in_proj`).

    Raises:
        RecipeError: a name that matches no Linear of the model; every mistake is named, with what the model has.
    """
    return shorten_paths(model, find_targets(model, targets).paths)


def find_targets(model: nn.Module, targets: str | Sequence[str]) -> Targets:
    """As `adapter_targets`, but full module names, and what was left out and why."""
    linears = _linears(model)
    shared = _shared_linears(model)
    if isinstance(targets, str):
        found = _find_family_targets(model, targets, linears, shared)
    else:
        found = _find_named_targets(model, list(targets), linears, shared)
    return found


def _linears(model: nn.Module) -> list[str]:
    head = _head_name(model)
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != head]


def _head_name(model: nn.Module) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _shared_linears(model: nn.Module) -> dict[str, list[str]]:
    """Linears whose weight (or whole module) is used at several places: module name -> all the places."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            places.setdefault(id(module.weight), []).append(name)
    head = _head_name(model)
    return {name: names for names in places.values() if len(names) > 1 and head not in names for name in names}


def _find_family_targets(model: nn.Module, targets: str, linears: list[str], shared: dict[str, list[str]]) -> Targets:
    family = family_of(model.config.model_type)
    if targets == "all":
        leaves = {*family.projections, *family.attention, *family.mlp}
    elif targets == "portable":
        leaves = set(family.portable)
    else:
        raise RecipeError(
            f"adapter.targets: {targets!r} is neither all nor portable. Names are written as a list, [{targets}]."
        )
    wanted = [name for name in linears if leaf_of(name) in leaves]
    found = Targets(paths=[name for name in wanted if name not in shared and leaf_of(name) not in family.refused])
    for name in wanted:
        if name in shared:
            found.left_out[name] = (
                f"its weight is used by {len(shared[name])} blocks; an adapter for each use cannot be merged"
            )
        elif leaf_of(name) in family.refused:
            found.left_out[name] = family.refused[leaf_of(name)]
    if targets == "all":
        found.left_out.update(_parameters_beside_linears(model, leaves | set(family.weights_outside_linear)))
    if not found.paths:
        raise RecipeError(
            f"adapter.targets: {targets} matches nothing in this {family.model_type} model. It has: {_names(linears)}."
        )
    missed = _missed_blocks(model, family, found.paths)
    if missed:
        raise RecipeError(
            f"adapter.targets: {targets} does not reach every state-space layer of this {family.model_type} model: "
            f"none of {missed[0]} ({len(missed)} such layers) is a Linear. Name targets: {_names(linears)}."
        )
    return found


def _parameters_beside_linears(model: nn.Module, leaves: set[str]) -> dict[str, str]:
    """Projections that are bare parameters: MoE experts, zamba's x and dt."""
    return {
        name: "it is a parameter, not a Linear"
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and (leaf_of(name) in leaves or ".experts." in name)
    }


def _missed_blocks(model: nn.Module, family: Family, paths: Sequence[str]) -> list[str]:
    """Mixers of state-space layers in which no target lies."""
    mixers = [name for name, module in model.named_modules() if type(module).__name__ == family.mixer]
    return [mixer for mixer in mixers if not any(path.startswith(f"{mixer}.") for path in paths)]


def _find_named_targets(
    model: nn.Module, targets: list[str], linears: list[str], shared: dict[str, list[str]]
) -> Targets:
    if not targets:
        raise RecipeError(f"adapter.targets: the list is empty. Write all, portable, or names: {_names(linears)}.")
    family = family_of(model.config.model_type)
    mistakes: list[str] = []
    chosen: set[str] = set()
    left_out: dict[str, str] = {}
    for target in targets:
        matched = [name for name in linears if ends_with(name, target)]
        apart = [name for name in matched if name not in shared]
        if not matched:
            mistakes.append(_explain_unmatched(model, target, linears))
        elif not apart:
            mistakes.append(
                f"adapter.targets: {target!r} has one weight for {len(shared[matched[0]])} blocks "
                f"({', '.join(shared[matched[0]][:3])}); an adapter for each use could not be merged. Leave it out."
            )
        else:
            mistakes += refusals(family, targets={leaf_of(name) for name in apart})
        chosen.update(apart)
        left_out.update({name: "its weight is shared by several blocks" for name in matched if name in shared})
    if mistakes:
        raise RecipeError(mistakes)
    found = Targets(paths=[name for name in linears if name in chosen], left_out=left_out)
    missed = _missed_blocks(model, family, found.paths)
    if missed:
        found.notes.append(f"{len(missed)} state-space layers get no adapter from these targets: {show_names(missed)}.")
    return found


def _explain_unmatched(model: nn.Module, target: str, linears: list[str]) -> str:
    """Why a name is no target: what it is instead, or the names that it may have been meant for."""
    where = f"adapter.targets: {target!r}"
    if not isinstance(target, str):
        return f"{where} is not a name."
    head = _head_name(model)
    if head is not None and ends_with(head, target):
        return (
            f"{where} is the output head. The loss multiplies by its weight directly, so an adapter there would "
            f"never be trained. To train the head whole: adapter.modules_to_save=[{leaf_of(head)}]."
        )
    for name, module in model.named_modules():
        if name and ends_with(name, target):
            if isinstance(module, nn.Embedding):
                advice = f"an embedding. To train it whole: adapter.modules_to_save=[{leaf_of(name)}]."
            elif isinstance(module, nn.Conv1d):
                advice = f"a convolution, not a Linear. To train it whole: adapter.train_also=[{leaf_of(name)}]."
            else:
                advice = f"a {type(module).__name__}, not a Linear. Name the projections in it: {_names(linears)}."
            return f"{where} is {advice}"
    for name, _ in model.named_parameters():
        if ends_with(name, target):
            return f"{where} is a parameter, not a Linear. To train it: adapter.train_also=[{leaf_of(name)}]."
    near = get_close_matches(target, sorted({*map(leaf_of, linears), "all", "portable"}), n=1, cutoff=0.5)
    if near and near[0] in ("all", "portable"):
        return f"{where} is not a module; write adapter.targets={near[0]}, without a list."
    guess = f"; did you mean {near[0]}?" if near else "."
    return f"{where} is not in the model{guess} It has: {_names(linears)}."


def shorten_paths(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Leaf names, except for leaves that also name a module which is no target; for those full names."""
    wanted = set(paths)
    elsewhere = {leaf_of(name) for name, _ in model.named_modules(remove_duplicate=False) if name not in wanted}
    return sorted({leaf_of(path) if leaf_of(path) not in elsewhere else path for path in paths})


def leaf_of(name: str) -> str:
    return name.rpartition(".")[2]


def ends_with(name: str, end: Any) -> bool:
    return isinstance(end, str) and (name == end or name.endswith(f".{end}"))


def _names(paths: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(map(leaf_of, paths)))


def show_names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
