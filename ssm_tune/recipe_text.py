"""From YAML text and overrides to plain values. Knows YAML and OmegaConf, and nothing of what the keys mean."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

# A number with an exponent needs no dot (PyYAML reads 1e-4 as text), and 010 or 12:30 are not numbers at all.
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F]+$")


class Mistakes:
    """Collects a recipe's mistakes, each with where it was written: the file, or the override."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[str] = []
        self._overridden: dict[str, str] = {}
        self._told: set[str] = set()

    def mark(self, path: str, override: str) -> None:
        """Say that what stands at `path`, and below, came from this override."""
        self._overridden[path] = override

    def overridden(self, path: str) -> bool:
        return self._origin(path) is not None

    def told(self, path: str) -> bool:
        """Whether something is wrong with this very key already; what follows from that is not told too."""
        return path in self._told

    def add(self, path: str, message: str) -> None:
        """`path` is the dotted key, "" for the whole text. Messages read on from it: "training.seed must be ..."."""
        self._told.add(path)
        origin = self._origin(path)
        where = self.where if origin is None else f"override {origin}"
        line = f"{where}: {path} {message}" if path else f"{where}: {message}"
        if line not in self.found:
            self.found.append(line)

    def _origin(self, path: str) -> str | None:
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            origin = self._overridden.get(".".join(parts[:count]))
            if origin is not None:
                return origin
        return None


class _Loader(yaml.SafeLoader):
    """YAML as a person means it: 1e-4 is a number, a date is text, a key given twice is a mistake."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            problem = "tags (a word after !) have no meaning in a recipe"
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in first:
                    self.twice.append(f"line {line}: {key.value} is given twice, first on line {first[key.value]}")
                first.setdefault(key.value, line)
        # deep: a mapping that holds itself is then found by PyYAML, where otherwise our walks would not end.
        return super().construct_mapping(node, deep=True)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "bool", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def read_yaml(text: str, mistakes: Mistakes) -> dict[str, Any]:
    """The mapping that a recipe's text holds; what is wrong with the text goes to `mistakes`."""
    loader = None
    try:
        loader = _Loader(text)
        values = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mistakes.add("", _describe(error))
        return {}
    except (yaml.reader.ReaderError, ValueError) as error:
        mistakes.add("", f"is not YAML: {' '.join(str(error).split())}")
        return {}
    finally:
        if loader is not None:
            loader.dispose()
    for line in loader.twice:
        mistakes.add("", line)
    if values is None:
        mistakes.add("", "is empty. A recipe has at least the sections model and data; see `ssm-tune recipes ls`")
        return {}
    if not isinstance(values, dict):
        mistakes.add("", f"holds {kind_of(values)} where a recipe is sections of `key: value` lines")
        return {}
    return values


def _describe(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not readable"
    if "'\\t'" in problem:
        problem = "a tab; YAML is indented with spaces"
    elif "expected a single document" in (error.context or ""):
        problem = "a second document begins here (---); a recipe is one"
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{line}not valid YAML: {problem}"


def read_value(text: str) -> Any:
    """An override's value. Brackets, braces and quotes are YAML; anything else is one number, word or text, whole.

    Raises:
        ValueError: it begins as YAML and is not.
    """
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        loader = _Loader(text)
        try:
            value = loader.get_single_data()
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
        finally:
            loader.dispose()
        if loader.twice:
            raise ValueError(loader.twice[0].partition(": ")[2])
        return value
    loader = _Loader("")
    try:
        # As if the text stood alone on its line: no comments, no aliases, so a path may hold "#", "*" or ": ".
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag if tag in loader.yaml_constructors else _STR, text))
    finally:
        loader.dispose()


_STR = "tag:yaml.org,2002:str"


def apply_overrides(values: dict[str, Any], overrides: Sequence[str], mistakes: Mistakes) -> None:
    """Set `section.key=value` in place, also `data.train.0.path=...`; a list's next index adds an entry."""
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        mistakes.mark(path, override)
        if not equals or not path or "" in path.split("."):
            mistakes.found.append(
                f"override {override}: is not key=value; write for example training.learning_rate=5e-5"
            )
            continue
        try:
            value = read_value(text)
        except ValueError as error:
            mistakes.add(path, f"has a value that is not valid YAML: {error}")
            continue
        _set(values, path, value, override, mistakes)


def _set(values: dict[str, Any], path: str, value: Any, override: str, mistakes: Mistakes) -> None:
    parts = path.split(".")
    node: Any = values
    for depth, part in enumerate(parts):
        parent = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        fresh: Any = value if last else ([] if parts[depth + 1].isdecimal() else {})
        if isinstance(node, list):
            if not part.isdecimal():
                mistakes.add(path, f"cannot be set: {parent} is a list; name an entry, {parent}.0")
                return
            index = int(part)
            if index > len(node):
                mistakes.add(
                    path, f"cannot be set: {parent} has {len(node)} entries; the next one is {parent}.{len(node)}"
                )
                return
            if index == len(node):
                node.append(fresh)
                mistakes.mark(".".join(parts[: depth + 1]), override)
            elif last or node[index] is None:
                node[index] = fresh
            node = node[index]
        elif isinstance(node, dict):
            if last or node.get(part) is None:
                node[part] = fresh
                mistakes.mark(".".join(parts[: depth + 1]), override)
            node = node[part]
        else:
            mistakes.add(path, f"cannot be set: {parent} holds {kind_of(node)}")
            return


def resolve_interpolations(values: dict[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Replace OmegaConf's ${section.key} and ${oc.env:NAME}; what cannot be replaced is told, key by key."""
    written = {path: leaf for path, leaf in leaves(values) if isinstance(leaf, str) and ("${" in leaf or leaf == "???")}
    if not written:
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    before = len(mistakes.found)

    def attempt(path: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OmegaConfBaseException as error:
            reason = f"cannot be read: {str(error).splitlines()[0]}"
            mistakes.add(path, "still needs a value (???)" if written.get(path) == "???" else reason)

    for path, leaf in written.items():
        attempt(path, lambda leaf=leaf: OmegaConf.create({"alone": leaf}))  # else the whole could not be made
    if len(mistakes.found) > before:
        return values
    config = OmegaConf.create(values)
    for path in written:
        attempt(path, lambda path=path: OmegaConf.select(config, path, throw_on_missing=True))
    if len(mistakes.found) > before:
        return values
    resolved: list[Any] = []
    attempt("", lambda: resolved.append(OmegaConf.to_container(config, resolve=True)))
    return resolved[0] if resolved else values


def escape_interpolations(value: Any) -> Any:
    """The value with every ${ written so that OmegaConf reads it back as text."""
    if isinstance(value, dict):
        return {key: escape_interpolations(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def check_leaves(values: Any, mistakes: Mistakes, path: str = "") -> bool:
    """Whether every key is text and every value one that can be written again; else what is not is told."""
    before = len(mistakes.found)
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not isinstance(key, str):
                mistakes.add(path, f"has a key that is {kind_of(key)}, not text: {key}. Put it in quotes")
            else:
                check_leaves(value, mistakes, f"{path}.{key}" if path else key)
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            check_leaves(value, mistakes, f"{path}.{index}")
    elif isinstance(values, float) and not math.isfinite(values):
        mistakes.add(path, f"must be a finite number, not {values}")
    elif isinstance(values, str) and not values.isprintable() and re.search("[\ud800-\udfff\0]", values):
        mistakes.add(path, f"holds characters that cannot be written as text: {values!r}")
    elif not isinstance(values, str | int | float | None):
        mistakes.add(path, f"holds {kind_of(values)}, which a recipe cannot hold")
    return len(mistakes.found) == before


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar with its dotted path."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{path}.{index}")
    else:
        yield path, value


def kind_of(value: Any) -> str:
    """What a value is, in a reader's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a mapping (key: value)"
    if isinstance(value, list | tuple):
        return "a list"
    return f"the Python type {type(value).__name__}"
