"""Where rows come from: a file, a folder, the Hub, the demo corpus, rows in memory. All of them as numbered rows.

`open_sources` only finds what a recipe names; a source is read when it is iterated, once, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssm_tune.data import demo, package_docs
from ssm_tune.data.compressed import COMPRESSED
from ssm_tune.data.files import SUFFIXES, NumberedRow, list_files, read_file, unit_of
from ssm_tune.data.formatting import Example, Formatter, check_columns
from ssm_tune.recipe import DataSource, RecipeError

if TYPE_CHECKING:
    pass

_SPLIT = re.compile(r"^([\w.-]+)(\[-?\d*%?:-?\d*%?\])?$")
_MISTAKES_SHOWN = 5


@dataclass
class Source:
    """One stream of rows. `where` is its place in the recipe, `name` and `unit` name a row: "rows.jsonl, line 3"."""

    where: str
    name: str
    unit: str
    read: Callable[[], Iterator[NumberedRow]]
    columns: dict[str, str] | None = None
    group: int = 0  # the number of the recipe's entry: the files of a folder share one
    remote: bool = False  # reading needs the Hub or its cache
    numbers: list[int] = field(default_factory=list)  # of the rows read, in the order read
    notes: list[str] = field(default_factory=list)  # what was left out while reading

    def place(self, number: int) -> str:
        """The name of a row by its own number (line, item or row of the source)."""
        return f"{self.name}, {self.unit} {number}" if self.unit else self.name


def open_sources(sources: Sequence[DataSource], where: str = "data.train") -> list[Source]:
    """The streams that a recipe's list of sources names. Raises RecipeError, with all mistakes of the list at once."""
    found: list[Source] = []
    mistakes: list[str] = []
    for index, source in enumerate(sources):
        try:
            for opened in _open(source, f"{where}.{index}"):
                opened.group = index
                found.append(opened)
        except RecipeError as error:
            mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)
    return found


def open_rows(dataset: Any, name: str = "dataset") -> list[Source]:
    """The stream of rows that Python's `tune` was given: a list of dicts, a datasets.Dataset, or a path or Hub name.

    Raises RecipeError for what has no fixed number of rows (an IterableDataset), a DatasetDict, or something else.
    """
    if isinstance(dataset, str | Path):
        return open_sources([DataSource(path=str(dataset))], name)
    rows: Any = dataset
    kind = type(dataset).__name__
    if kind == "IterableDataset":
        raise RecipeError(
            f"{name}: an IterableDataset has no fixed rows to split, pack and resume. "
            "Take some of it into memory: list(dataset.take(10_000)). Or pretrain by a recipe: data.streaming: true."
        )
    if isinstance(dataset, Mapping):
        keys = ", ".join(map(str, dataset))
        raise RecipeError(f"{name}: {kind} holds several sets or columns ({keys}); pass one, or a list of row objects.")
    if hasattr(rows, "column_names"):  # a datasets.Dataset: as Python objects, whatever format was set on it
        rows = rows.with_format(None)
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")  # a pandas DataFrame
    if not isinstance(rows, Iterable):
        raise RecipeError(f"{name}: rows must be a list of dicts or a datasets.Dataset, not {kind}.")
    if not isinstance(rows, Sequence) and not hasattr(rows, "column_names"):
        rows = list(rows)
    return [Source(name, name, "row", lambda: enumerate(rows))]


def read_examples(sources: Iterable[Source], task: str) -> Iterator[tuple[Source, Example]]:
    """Every usable row as an Example, in order; `source.numbers` grows by each row's own number.

    Raises RecipeError after the first few rows that are wrong, naming each, or if there is no row at all.
    """
    mistakes: list[str] = []
    count, where = 0, "data"
    for source in sources:
        formatter = Formatter(source.columns, task=task)
        source.numbers.clear()
        for number, example in _examples(source, formatter, mistakes):
            source.numbers.append(number)
            count += 1
            yield source, example
        source.notes = [f"{source.name}: {note}" for note in formatter.notes()]
        where = source.where
    if mistakes:
        raise RecipeError(mistakes)
    if not count:
        raise RecipeError(f"{where}: there is no usable row.")


def _examples(source: Source, formatter: Formatter, mistakes: list[str]) -> Iterator[tuple[int, Example]]:
    for number, row in source.read():
        try:
            yield number, formatter.format(row, source.place(number))
        except RecipeError as error:
            mistakes += error.mistakes
            if len(mistakes) >= _MISTAKES_SHOWN:
                raise RecipeError([*mistakes, "Stopped reading here: there may be more."]) from None


def _open(source: DataSource, where: str) -> Iterator[Source]:
    check_columns(source.columns, where)
    if not source.path:
        raise RecipeError(f"{where}.path is missing: a file, a folder, a Hub name or {demo.QUESTIONS}.")
    split = _SPLIT.match(source.split)
    if not split:
        raise RecipeError(f"{where}.split: {source.split!r} is not a split such as train or train[:1000].")
    name, part = split.group(1), split.group(2) or ""
    path = Path(source.path).expanduser()
    if source.path in (*demo.NAMES, package_docs.TEXT) and not path.exists():
        yield _cut(Source(where, source.path, "row", lambda: _read_demo(source.path, name)), name, part)
        return
    columns = dict(source.columns) if source.columns else None
    if path.exists() or is_a_path(source.path):
        try:
            files = list_files(path, name)
        except OSError as error:
            raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}.") from error
        if part and len(files) > 1:
            raise RecipeError(f"{where}.split: {part} takes a part of one file; {path} has {len(files)}.")
        for file in files:
            yield _cut(Source(where, str(file), unit_of(file), _reader(file), columns), name, part)
        return
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source.path):
        raise RecipeError(f"{where}.path: {source.path!r} is neither a file here nor a Hub name (owner/name).")
    yield Source(where, f"{source.path} {source.split}", "row", lambda: _read_hub(source, where), columns, remote=True)


def _read_demo(name: str, split: str) -> Iterator[NumberedRow]:
    rows = package_docs.read_package_docs(split) if name == package_docs.TEXT else demo.read_demo(name, split)
    for number, row in enumerate(rows):
        yield number, {column: value for column, value in row.items() if column != "topic"}


def is_a_path(path: str) -> bool:
    return path.startswith(("./", "../", "/", "~")) or path.lower().endswith((*SUFFIXES, *COMPRESSED))


def bounded_part(split: str, where: str) -> tuple[str, int, int | None]:
    """The name of a split and which of its rows: "validation[:100]" is ("validation", 0, 100); for streams.

    Raises RecipeError for shares ([:1%]) and for places counted from the end, which a stream does not know.
    """
    found = re.fullmatch(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", split)
    if not found:
        raise RecipeError(
            f"{where}.split: {split!r} of a stream is a name, or a part in rows such as validation[:1000]."
        )
    return found[1], int(found[2] or 0), int(found[3]) if found[3] else None


def _reader(file: Path) -> Callable[[], Iterator[NumberedRow]]:
    return lambda: read_file(file)


def _cut(source: Source, split: str, part: str) -> Source:
    """The source reduced to a part such as [:1000] or [10%:], with the meaning that `datasets` gives to it."""
    if part:
        whole = source.read

        def read() -> Iterator[NumberedRow]:
            from datasets import ReadInstruction

            rows = list(whole())
            wanted = ReadInstruction.from_spec(f"{split}{part}").to_absolute({split: len(rows)})
            for piece in wanted:
                yield from rows[piece.from_ : piece.to]

        source.read = read
    return source


def _read_hub(source: DataSource, where: str) -> Iterator[NumberedRow]:
    """Rows of a Hub data set, numbered from 0. Downloads, or reads from the cache that all processes share safely."""
    dataset = load_hub(source, where)
    number = 0
    for batch in dataset.iter(batch_size=1000):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield number, dict(zip(names, values, strict=True))
            number += 1


def load_hub(source: DataSource, where: str, *, streaming: bool = False) -> Any:
    """A data set of the Hub: a datasets.Dataset, or with `streaming` an IterableDataset. Raises RecipeError."""
    from datasets import get_dataset_config_names, load_dataset

    name, _, subset = source.path.partition(":")
    options = {"split": source.split, **({"streaming": True} if streaming else {})}
    with hub_errors(source.path, source.split, where):
        try:
            return load_dataset(name, subset or None, **options)
        except ValueError as error:
            if subset or "Config name is missing" not in str(error):
                raise
        subsets = get_dataset_config_names(name)
        usual = [subset for subset in ("default", "main") if subset in subsets]
        if not usual:
            raise RecipeError(f"{where}.path: {name} has several subsets; write {name}:{subsets[0]}, one of {subsets}.")
        return load_dataset(name, usual[0], **options)


@contextmanager
def hub_errors(path: str, split: str, where: str) -> Iterator[None]:
    """While inside, what `datasets` raises becomes a RecipeError that names the recipe's entry `where`."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except DatasetNotFoundError as error:
        raise RecipeError(
            f"{where}.path: {path} is neither a file here nor a data set on the Hub that you may read"
            f"{_near_files(path)}. ({_first_line(error)})"
        ) from error
    except RecipeError:
        raise
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        if "zst" in str(error) and "ompression" in str(error):
            raise RecipeError(
                f"{where}.path: {path} holds .zst files, which needs a package: pip install 'ssm-tune[stream]'."
            ) from error
        raise RecipeError(
            f"{where}.path: {path} (split {split}) could not be loaded from the Hub"
            f"{_near_files(path)}: {_first_line(error)}"
        ) from error


def _near_files(path: str) -> str:
    here = [file.name for file in Path.cwd().iterdir() if file.suffix in SUFFIXES]
    near = get_close_matches(Path(path).name, here, n=1)
    return f" (did you mean the file {near[0]}?)" if near else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
