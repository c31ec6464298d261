"""Where a recipe is, and where the files that it names are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ssm_tune.recipe_checks import nearest
from ssm_tune.recipe_text import Mistakes
from ssm_tune.shipped import shipped, shipped_names

# A name with one of these endings is never a Hub name.
_FILE_SUFFIXES = (
    *(".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".jinja", ".yaml"),
    *(".gz", ".zst", ".bz2", ".xz"),
)


def locate(name_or_path: str | Path, mistakes: Mistakes) -> tuple[Path | None, str]:
    """A recipe's file and text: a path that exists, or the name of a shipped recipe; (None, "") with a mistake told."""
    path = Path(name_or_path).expanduser()
    text = str(name_or_path)
    if not path.is_file() and path.name == text and path.suffix not in (".yaml", ".yml"):
        names = shipped_names("recipes")
        if text not in names:
            listed = f" Shipped recipes: {', '.join(names)}"
            mistakes.add("", f"is neither a file nor a shipped recipe.{nearest(text, names, listed)}")
            return None, ""
        path = shipped("recipes", f"{text}.yaml")
        mistakes.where = f"recipes/{text}.yaml"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        mistakes.add("", f"does not exist.{_nearest_file(path)}")
    except IsADirectoryError:
        mistakes.add("", "is a folder; name the .yaml file in it")
    except OSError as error:
        mistakes.add("", f"cannot be read: {error.strerror}")
    else:
        return _decode(path, data, mistakes)
    return None, ""


def _decode(path: Path, data: bytes, mistakes: Mistakes) -> tuple[Path | None, str]:
    try:
        # utf-8-sig: a byte order mark, which some Windows editors write, is not part of the text.
        return path.resolve(), data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "not UTF-8"
        line = data[: error.start].count(b"\n") + 1
        mistakes.add("", f"line {line}: the file is {encoding}; save it as UTF-8")
        return None, ""


def resolve_paths(sections: dict[str, Any], source: Path | None, mistakes: Mistakes, check_files: bool) -> None:
    """Make the paths absolute, in place; a file that is not there is a mistake."""
    slots = [(sections["model"], "name", "model.name"), (sections["tokenizer"], "name", "tokenizer.name")]
    slots.append((sections["tokenizer"], "chat_template", "tokenizer.chat_template"))
    slots.append((sections["evaluation"], "perplexity", "evaluation.perplexity"))
    for key in ("train", "eval"):
        entries = sections["data"].get(key)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            slots.append((entry, "path", f"data.{key}.{index}.path"))
    for holder, key, path in slots:
        value = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(value, str) and value:
            beside = Path.cwd() if source is None or mistakes.overridden(path) else source.parent
            found = _find(value, beside)
            if found is not None:
                holder[key] = str(found)
            elif check_files and (
                key == "chat_template" or (_is_file_name(value) and not _is_replaced(path, sections))
            ):
                mistakes.add(path, f"{value} does not exist (looked in {beside}).{_nearest_file(beside / value)}")


def _is_replaced(path: str, sections: dict[str, Any]) -> bool:
    """Whether prepared tokens stand in for the file: training then needs them alone."""
    return path.startswith("data.") and bool(sections["data"].get("prepared"))


def _find(value: str, beside: Path) -> Path | None:
    path = Path(value).expanduser()
    for folder in (beside, shipped("recipes")):
        candidate = folder / path
        if candidate.exists():
            return Path(os.path.abspath(candidate))
    return None


def _is_file_name(value: str) -> bool:
    return value.startswith(("./", "../", "/", "~")) or value.lower().endswith(_FILE_SUFFIXES)


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" There is no folder {folder}"
    return nearest(path.name, [entry.name for entry in folder.iterdir()])
