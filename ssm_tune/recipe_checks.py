"""Whether a recipe's values are what its dataclasses and SFTConfig's fields ask for. Collects; never raises."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ssm_tune.recipe_text import Mistakes, kind_of
from ssm_tune.training_fields import OWNED_ELSEWHERE, RANGES, RENAMED, TrainingField, training_fields

_SCALARS = {"str": str, "int": int, "float": (int, float), "bool": bool}
_WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "dict": "a mapping"}


class Rule(NamedTuple):
    """What one key takes: an annotation, and optionally the values or the interval ("(0, 1]") it is limited to.

    keys: of a mapping, the keys that it may have.
    """

    annotation: str
    choices: tuple[str, ...] = ()
    interval: str = ""
    keys: tuple[str, ...] = ()


def rules_of(section: type) -> dict[str, Rule]:
    """A section's rules, from field metadata: choices, interval, keys; annotation where OmegaConf has none."""
    return {
        field.name: Rule(
            field.metadata.get("annotation", field.type),
            field.metadata.get("choices", ()),
            field.metadata.get("interval", ""),
            field.metadata.get("keys", ()),
        )
        for field in dataclasses.fields(section)
    }


def nearest(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The words "Did you mean X?", after a space, if a name is near; else the text given for that case."""
    by_fold = {known.lower(): known for known in names}
    found = difflib.get_close_matches(str(name).lower().replace("-", "_"), by_fold, n=1, cutoff=0.6)
    return f" Did you mean {by_fold[found[0]]}?" if found else otherwise


def check_keys(
    values: Mapping[str, Any], path: str, rules: Mapping[str, Rule], homes: Mapping[str, str], mistakes: Mistakes
) -> list[str]:
    """The keys that are settings; for the others, what was meant. `homes` says which section owns a key."""
    known = []
    for key in values:
        if not isinstance(key, str):
            continue
        if key in rules:
            known.append(key)
            continue
        where = f"{path}.{key}" if path else key
        home = homes.get(key)
        if home is not None and home != path:
            mistakes.add(where, f"is not a setting. It belongs to {home}: write {home}.{key}")
        else:
            listed = f" {path} takes: {', '.join(rules)}" if path and len(rules) < 20 else ""
            mistakes.add(where, "is not a setting." + nearest(key, rules, listed))
    return known


def check_section(
    values: dict[str, Any], path: str, rules: Mapping[str, Rule], homes: Mapping[str, str], mistakes: Mistakes
) -> None:
    """Check a mapping's keys and values in place (`no`, which YAML reads as false, becomes the choice "no")."""
    for key in check_keys(values, path, rules, homes, mistakes):
        values[key] = check_value(values[key], f"{path}.{key}", rules[key], mistakes)


def check_training(values: dict[str, Any], homes: Mapping[str, str], mistakes: Mistakes) -> None:
    """Check the training section against SFTConfig's fields."""
    fields = training_fields()
    rules = {name: _training_rule(name, field) for name, field in fields.items() if name not in OWNED_ELSEWHERE}
    rest = {}
    for key, value in values.items():
        if key in OWNED_ELSEWHERE:
            mistakes.add(f"training.{key}", f"is not a setting of a recipe: {OWNED_ELSEWHERE[key]}")
        elif key in RENAMED and key not in fields:
            mistakes.add(f"training.{key}", f"is not a setting: {RENAMED[key]}")
        else:
            rest[key] = value
    check_section(rest, "training", rules, homes, mistakes)
    values.update(rest)
    if values.get("max_steps") in (0, None) and "max_steps" in values:
        mistakes.add("training.max_steps", "must be at least 1; leave it out to train for num_train_epochs")
    elif _is_number(values.get("max_steps")) and values["max_steps"] < -1:
        mistakes.add("training.max_steps", f"must be at least 1, not {values['max_steps']}")


def _training_rule(name: str, field: TrainingField) -> Rule:
    return Rule(field.annotation, field.choices, RANGES.get(name, ""))


def check_value(value: Any, path: str, rule: Rule, mistakes: Mistakes) -> Any:
    """The value, checked; a mistake is told once."""
    if mistakes.told(path):
        return value
    if value is False and "no" in rule.choices:
        return "no"
    alternatives = _alternatives(rule.annotation)
    problem = _mismatch(value, alternatives)
    if problem:
        mistakes.add(path, problem)
    elif rule.choices:
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None and entry not in rule.choices:
                otherwise = f" It is one of: {', '.join(rule.choices)}"
                mistakes.add(path, f"cannot be {show(entry)}.{nearest(str(entry), rule.choices, otherwise)}")
    elif rule.keys and isinstance(value, dict):
        for key in value:
            if key not in rule.keys:
                otherwise = f" It is one of: {', '.join(rule.keys)}"
                mistakes.add(f"{path}.{key}", f"is not a setting.{nearest(key, rule.keys, otherwise)}")
    elif rule.interval and _is_number(value) and not _inside(value, rule.interval):
        mistakes.add(path, f"must be {_describe(rule.interval)}, not {value}")
    return value


def show(value: Any) -> str:
    """A value as it would stand in a recipe, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f'"{text}"' if isinstance(value, str) else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alternatives(annotation: str) -> list[tuple[str, str]]:
    """Of "list[str] | None": [("list", "str"), ("None", "")]."""
    found = []

    def walk(node: ast.expr) -> None:
        if isinstance(node, ast.BinOp):
            walk(node.left)
            walk(node.right)
        elif isinstance(node, ast.Subscript):
            found.append((ast.unparse(node.value), ast.unparse(node.slice)))
        else:
            found.append((ast.unparse(node), ""))

    walk(ast.parse(annotation, mode="eval").body)
    return found


def _mismatch(value: Any, alternatives: list[tuple[str, str]]) -> str:
    """What is wrong with a value, or "" if one alternative takes it."""
    problems = [_mismatch_with(value, name, inner) for name, inner in alternatives]
    if "" in problems:
        return ""
    nested = [problem for problem in problems if problem and not problem.startswith("?")]
    if nested:
        return nested[0]
    wanted = [_wording(name, inner) for name, inner in alternatives if name != "None"]
    return f"must be {' or '.join(dict.fromkeys(wanted))}, not {_given(value, [name for name, _ in alternatives])}"


def _mismatch_with(value: Any, name: str, inner: str) -> str:
    """Empty if it fits, "?" if it is another kind of thing, a sentence if only something inside it is wrong."""
    if name == "Any":
        return ""
    if name == "None":
        return "" if value is None else "?"
    if name == "Literal":
        return "" if value in ast.literal_eval(f"[{inner}]") else "?"
    if name == "list":
        if not isinstance(value, list):
            return "?"
        return _first_entry(((str(index), entry) for index, entry in enumerate(value)), inner or "Any")
    if name == "dict":
        if not isinstance(value, dict):
            return "?"
        return _first_entry(value.items(), inner.strip("()").partition(",")[2].strip() or "Any")
    kind = _SCALARS.get(name, str if name.endswith(("Type", "Names", "Strategy", "Option")) else ())
    fits = isinstance(value, kind) and (name == "bool" or not isinstance(value, bool))
    return "" if fits else "?"


def _first_entry(entries: Iterable[tuple[str, Any]], annotation: str) -> str:
    for key, entry in entries:
        if _mismatch(entry, _alternatives(annotation)):
            wanted = " or ".join(dict.fromkeys(_wording(*alternative) for alternative in _alternatives(annotation)))
            return f"has {show(entry)} at {key}, which must be {wanted}"
    return ""


def _wording(name: str, inner: str) -> str:
    if name == "list":
        entries = "text" if "str" in inner else "entries"
        return f"a list of {entries}"
    if name == "Literal":
        return json.dumps(ast.literal_eval(f"[{inner}]")[0])
    return _WORDS.get(name, "text")


def _given(value: Any, wanted: list[str]) -> str:
    """The value and, where one slip explains it, how to write it instead."""
    if value is None:
        return "null"
    if isinstance(value, bool) and "str" in wanted:
        return f"{json.dumps(value)} (YAML reads yes, no, on and off so). Put it in quotes"
    if _is_number(value) and "str" in wanted:
        return f"the number {value}. Put it in quotes"
    if isinstance(value, float) and value.is_integer() and "int" in wanted:
        return f"{value}. Write {int(value)}"
    if isinstance(value, str):
        numeric = value.replace("_", "").replace("-", "").replace("+", "").replace(".", "").lower()
        if {"int", "float"} & set(wanted) and numeric.replace("e", "", 1).isdecimal():
            return f"the text {show(value)}. Write it without quotes or leading zeros"
        if "list" in wanted:
            return f"the text {show(value)}. Write [{value}]"
        return show(value)
    return f"{kind_of(value)}: {show(value)}"


def _inside(value: float, interval: str) -> bool:
    low, high = (float(part) for part in interval[1:-1].split(","))
    above = value > low or (interval[0] == "[" and value == low)
    return above and (value < high or (interval[-1] == "]" and value == high))


def _describe(interval: str) -> str:
    low, high = (part.strip() for part in interval[1:-1].split(","))
    lower = f"at least {low}" if interval[0] == "[" else f"greater than {low}"
    if high == "inf":
        return lower
    return f"{lower} and {'at most' if interval[-1] == ']' else 'less than'} {high}"
