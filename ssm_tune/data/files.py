"""Local files, read strictly: JSON lines, JSON, CSV, Parquet and plain text.

The readers of `datasets` guess: they turn the answer "42" of a CSV file into a number, the word "None" into nothing,
and report broken JSON without its line. Here each row comes with its line, and what is wrong is said with both.
Everything but Parquet and .zst needs the standard library only, so that `ssm-tune validate` can look into files at
once. All but Parquet may be compressed (`ssm_tune.data.compressed`).
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ssm_tune.data.compressed import COMPRESSED, kind_of, open_file
from ssm_tune.recipe import RecipeError

NumberedRow = tuple[int, Any]  # the line (or item) number, from 1, and the row
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")

_BOM = b"\xef\xbb\xbf"
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "test": {"test", "testing"},
    "eval": {"eval", "evaluation", "valid", "validation", "dev"},
}


def list_files(path: Path, split: str = "train") -> list[Path]:
    """The data files that `path` stands for: itself, or a folder's files in the order of their names.

    A folder whose files carry split words (train.jsonl, rows-test-00.parquet) gives those of `split`; one without
    such words is all training data. Raises RecipeError if there is nothing to read.
    """
    if path.is_file():
        if not is_read(path):
            raise RecipeError(
                f"{path}: not a kind of file that is read. These are: {', '.join(SUFFIXES)}, and all but .parquet "
                f"compressed as {', '.join(COMPRESSED)} (rows.jsonl.gz)."
            )
        if split != "train":
            raise RecipeError(f"{path}: one file has no split {split!r}. Leave split out, or name the other file.")
        return [path]
    if not path.is_dir():
        raise RecipeError(f"{path}: no such file or folder.")
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    data = [file for file in files if is_read(file)]
    if not data:
        seen = ", ".join(file.name for file in files[:5]) or "nothing"
        raise RecipeError(f"{path}: this folder holds no {', '.join(SUFFIXES)} file, but {seen}.")
    named = {file: _split_of(file.relative_to(path)) for file in data}
    if set(named.values()) == {None} and split == "train":
        return data
    wanted = next((kind for kind, words in _SPLIT_WORDS.items() if split in words), split)
    chosen = [file for file, kind in named.items() if kind == wanted]
    if not chosen:
        raise RecipeError(
            f"{path}: no file of this folder has {split!r} in its name: {', '.join(file.name for file in data[:5])}."
        )
    return chosen


def is_read(path: Path) -> bool:
    """Whether a file of this name is one that can be read, compressed or not."""
    return kind_of(path) in SUFFIXES and (kind_of(path) != ".parquet" or path.suffix.lower() == ".parquet")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> str | None:
    words = set(re.split(r"[^a-z]+", str(path.with_suffix("")).lower()))
    return next((kind for kind, names in _SPLIT_WORDS.items() if words & names), None)


def read_file(path: Path) -> Iterator[NumberedRow]:
    """The rows of one file with their numbers: lines of .jsonl and .csv, items of .json, rows of .parquet from 1.

    A .txt file is one row, {"text": everything in it}. Rows of JSON need not be objects: that is for the caller.
    Raises RecipeError naming file and line for what cannot be read, RecipeError too if there is no row at all.
    """
    reader = _READERS[kind_of(path)]
    count = 0
    try:
        for numbered in reader(path):
            count += 1
            yield numbered
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if not count:
        raise RecipeError(f"{path}: the file is empty.")


def unit_of(path: Path) -> str:
    """What the numbers of `read_file` count, for messages."""
    return {".json": "item", ".parquet": "row", ".txt": ""}.get(kind_of(path), "line")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_file(path) as file:
        for number, raw in enumerate(file, 1):
            yield number, _decode(raw.removeprefix(_BOM) if number == 1 else raw, path, number)


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if line == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise RecipeError(f"{path}: this is UTF-16 text. Save it as UTF-8.") from error
        line += raw.count(b"\n", 0, error.start)
        raise RecipeError(
            f"{path}, line {line}: not valid UTF-8 (byte 0x{raw[error.start]:02x}). Save the file as UTF-8."
        ) from error


def _read_json_lines(path: Path) -> Iterator[NumberedRow]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
            hint = ""
            if number == 1 and line.strip() in ("[", "{"):
                hint = " A .jsonl file has one whole object on each line; a list of objects goes into a .json file."
            raise RecipeError(f"{path}, line {number}: not valid JSON: {reason}.{hint}") from error


def _read_json(path: Path) -> Iterator[NumberedRow]:
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        return
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and not text.lstrip().startswith("["):
            yield from _read_json_lines(path)  # JSON lines under the name .json are common
            return
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise RecipeError(f"{path}, line {line}: not valid JSON: {reason}.") from error
    if isinstance(found, dict) and len(found) == 1 and isinstance(found.get("data"), list):
        found = found["data"]
    yield from enumerate(found if isinstance(found, list) else [found], 1)


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    lines = (line for _, line in _lines(path))
    header = next(lines, "")
    if not header.strip():
        return
    delimiter = next((mark for mark in ",;\t" if mark in header), ",")
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses cells over 128 KiB
    reader = csv.reader(_chain(header, lines), delimiter=delimiter, strict=True)
    try:
        names = next(reader)
        if len(set(names)) < len(names):
            raise RecipeError(f"{path}, line 1: two columns have the same name: {', '.join(names)}.")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise RecipeError(f"{path}, line {start}: {len(cells)} cells where the header has {len(names)}.")
            if cells:
                yield start, dict(zip(names, cells, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise RecipeError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from error


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _read_text(path: Path) -> Iterator[NumberedRow]:
    with open_file(path) as file:
        text = _decode(file.read().removeprefix(_BOM), path, 1).replace("\r\n", "\n")
    if text.strip():
        yield 1, {"text": text}


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with path.open("rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(f"{path}: not a readable Parquet file (after {number} rows): {reason}") from error


_READERS = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
