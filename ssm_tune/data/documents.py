"""Documents of a stream: read by many readers that share a source, from any position, for ever.

A source is dealt out to a fixed number of readers (`VIRTUAL_SHARDS`), whatever the number of processes: that is what
makes the order of a stream independent of them. A reader's position is plain data (numbers and texts), so that a
checkpoint holds it, and a reader that is put back there reads on exactly. After the last document a source begins anew.

Where a Hub data set has enough files (or Parquet row groups) each reader takes files of its own; everywhere else each
takes every n-th document and passes over the others without parsing them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.compressed import kind_of, open_file
from ssm_tune.data.files import NumberedRow, read_file, unit_of
from ssm_tune.data.formatting import check_text
from ssm_tune.recipe import RecipeError

VIRTUAL_SHARDS = 16  # divides by 2, 4, 8 and 16 processes; more cost memory and connections
ENOUGH = 8 * VIRTUAL_SHARDS  # documents; of a source with fewer every reader takes all
_SEGMENT = 65536  # bytes of a .txt file that are one piece of its document

Position = dict[str, Any]


class Document(NamedTuple):
    """A text, or a prepared document's tokens; `first`, `last`: whether it is that part of a document cut in pieces."""

    text: str
    place: str
    first: bool = True
    last: bool = True
    tokens: NDArray[np.int32] | None = None


class Reader(Protocol):
    """One of the readers of a source. `epoch` counts how often it has begun again."""

    epoch: int

    def read(self) -> Document: ...

    def position(self) -> Position: ...

    def restore(self, position: Position) -> None: ...


class DocumentSource(Protocol):
    """What a recipe's entry names."""

    name: str

    def reader(self, shard: int, shards: int) -> Reader: ...

    def describe(self) -> list[str]: ...


def text_of(row: Any, columns: dict[str, str] | None, place: str) -> str | None:
    """A row's text; None if it is empty or null, which in a stream is passed over. Raises RecipeError without one."""
    column = (columns or {}).get("text", "text")
    if not isinstance(row, dict) or column not in row:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RecipeError(
            f"{place}: pretraining needs a column {column}; this row has: {found}. Name it: columns: {{text: ...}}."
        )
    value = row[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return check_text(value, f"column {column}", place)


class RepeatingReader:
    """A reader over a source that can be iterated from a position; takes every `shards`-th document, or all.

    Subclasses give `_documents`, which goes through one epoch from the present position and keeps `row` (documents of
    the epoch gone by, anybody's) and whatever else it needs in `mark` up to date before it yields.
    """

    def __init__(self, name: str, shard: int, shards: int) -> None:
        self.name, self.shard, self.shards = name, shard, shards
        self.epoch, self.row = 0, 0
        self.mark: dict[str, Any] = {}
        self._iterator: Iterator[Document] | None = None
        self._found = False  # a document in this epoch, or before the present position

    def mine(self) -> bool:
        """Whether the document that comes next is this reader's."""
        return self.row % self.shards == self.shard

    def read(self) -> Document:
        while True:
            if self._iterator is None:
                self._iterator = self._documents()
            document = next(self._iterator, None)
            if document is not None:
                self._found = True
                return document
            if not self._found:
                raise RecipeError(f"{self.name}: there is no usable row.")
            self.epoch, self.row, self.mark, self._iterator, self._found = self.epoch + 1, 0, {}, None, False

    def position(self) -> Position:
        return {"epoch": self.epoch, "row": self.row, "found": self._found, **self.mark}

    def restore(self, position: Position) -> None:
        rest = dict(position)
        self.epoch, self.row, self._found = rest.pop("epoch"), rest.pop("row"), rest.pop("found")
        self.mark, self._iterator = rest, None

    def _documents(self) -> Iterator[Document]:
        raise NotImplementedError


def count_up_to(reader: RepeatingReader, most: int) -> int:
    """How many documents a reader has in an epoch, if fewer than `most`; else `most`. Raises RecipeError for none."""
    for count in range(most):
        reader.read()
        if reader.epoch:
            return count
    return most


def dealt(few: bool, shard: int, shards: int) -> tuple[int, int]:
    """Which documents a reader takes: all, where there are too few to give every reader some."""
    return (0, 1) if few else (shard, shards)


# -- local files -----------------------------------------------------------------------------------------------------


@dataclass
class FileSource:
    """Local files: .jsonl and .txt are entered at a byte, .parquet at a row group, .json and .csv from the start.

    A compressed file is read up to the place where it is entered.

    A .txt file is one document, read in pieces of about 64 KiB that end with a line.
    """

    name: str
    files: Sequence[Path]
    columns: dict[str, str] | None = None
    few: bool = field(init=False)

    def __post_init__(self) -> None:
        self.few = count_up_to(_FileReader(self, 0, 1), ENOUGH) < ENOUGH

    def reader(self, shard: int, shards: int) -> Reader:
        return _FileReader(self, *dealt(self.few, shard, shards))

    def describe(self) -> list[str]:
        return [f"{self.name}: {len(self.files):,} files"] if len(self.files) > 1 else [self.name]


class _FileReader(RepeatingReader):
    def __init__(self, source: FileSource, shard: int, shards: int) -> None:
        super().__init__(source.name, shard, shards)
        self.source = source

    def _documents(self) -> Iterator[Document]:
        first = self.mark.get("file", 0)
        for number in range(first, len(self.source.files)):
            path = self.source.files[number]
            mark = self.mark if number == first else {}
            inside = _INSIDE.get(kind_of(path), _FileReader._read_whole)
            try:
                yield from inside(self, path, number, mark)
            except OSError as error:
                raise RecipeError(f"{path}: cannot be read: {error.strerror or error}.") from error

    def _pass(self, number: int, **inside: int) -> bool:
        """One more document has gone by; was it ours?"""
        ours = self.mine()
        self.row += 1
        self.mark = {"file": number, **inside}
        return ours

    def _read_lines(self, path: Path, number: int, mark: dict[str, int]) -> Iterator[Document]:
        offset, line = mark.get("offset", 0), mark.get("line", 0)
        with open_file(path) as file:
            file.seek(offset)
            for raw in file:
                offset, line = offset + len(raw), line + 1
                if not raw.strip() or not self._pass(number, offset=offset, line=line):
                    continue
                place = f"{path}, line {line}"
                try:
                    row = json.loads(raw.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise RecipeError(f"{place}: not valid JSON: {error}.") from error
                text = text_of(row, self.source.columns, place)
                if text is not None:
                    yield Document(text, place)

    def _read_segments(self, path: Path, number: int, mark: dict[str, int]) -> Iterator[Document]:
        offset = mark.get("offset", 0)
        with open_file(path) as file:
            file.seek(offset)
            while raw := file.read(_SEGMENT) + file.readline():
                begin, offset = offset, offset + len(raw)
                if not self._pass(number, offset=offset):
                    continue
                place = f"{path}, byte {begin:,}"
                try:
                    text = raw.decode("utf-8-sig" if begin == 0 else "utf-8").replace("\r\n", "\n")
                except UnicodeDecodeError as error:
                    raise RecipeError(
                        f"{path}: not valid UTF-8 (at byte {begin + error.start:,}). Save the file as UTF-8."
                    ) from error
                if text.strip():
                    yield Document(text, place, first=begin == 0, last=not file.peek(1))

    def _read_parquet(self, path: Path, number: int, mark: dict[str, int]) -> Iterator[Document]:
        import pyarrow
        from pyarrow import parquet

        column = (self.source.columns or {}).get("text", "text")
        seen, done = 0, mark.get("inside", 0)
        try:
            with path.open("rb") as file:
                table = parquet.ParquetFile(file)
                if column not in table.schema_arrow.names:
                    text_of(dict.fromkeys(table.schema_arrow.names), self.source.columns, str(path))
                for group in range(table.num_row_groups):
                    rows = table.metadata.row_group(group).num_rows
                    if seen + rows <= done:
                        seen += rows
                        continue
                    for batch in table.iter_batches(256, row_groups=[group], columns=[column]):
                        values = batch.column(0)
                        for index in range(len(values)):
                            seen += 1
                            if seen <= done or not self._pass(number, inside=seen):
                                continue
                            place = f"{path}, row {seen}"
                            text = text_of({column: values[index].as_py()}, self.source.columns, place)
                            if text is not None:
                                yield Document(text, place)
        except pyarrow.ArrowInvalid as error:
            reason = str(error).splitlines()[0]
            raise RecipeError(f"{path}: not a readable Parquet file (after {seen} rows): {reason}") from error

    def _read_whole(self, path: Path, number: int, mark: dict[str, int]) -> Iterator[Document]:
        done = mark.get("inside", 0)
        for inside, (line, row) in enumerate(read_file(path), 1):
            if inside <= done or not self._pass(number, inside=inside):
                continue
            place = f"{path}, {unit_of(path)} {line}"
            text = text_of(row, self.source.columns, place)
            if text is not None:
                yield Document(text, place)


_INSIDE = {
    ".jsonl": _FileReader._read_lines,
    ".txt": _FileReader._read_segments,
    ".parquet": _FileReader._read_parquet,
}


# -- rows in memory --------------------------------------------------------------------------------------------------


@dataclass
class RowSource:
    """Rows that are in memory, or built in (the demo corpora)."""

    name: str
    rows: Sequence[NumberedRow]
    columns: dict[str, str] | None = None
    few: bool = field(init=False)

    def __post_init__(self) -> None:
        self.few = count_up_to(_RowReader(self, 0, 1), ENOUGH) < ENOUGH

    def reader(self, shard: int, shards: int) -> Reader:
        return _RowReader(self, *dealt(self.few, shard, shards))

    def describe(self) -> list[str]:
        return [f"{self.name}: {len(self.rows):,} rows"]


class _RowReader(RepeatingReader):
    def __init__(self, source: RowSource, shard: int, shards: int) -> None:
        super().__init__(source.name, shard, shards)
        self.source = source

    def _documents(self) -> Iterator[Document]:
        while self.row < len(self.source.rows):
            ours, (number, row) = self.mine(), self.source.rows[self.row]
            self.row += 1
            place = f"{self.name}, row {number}"
            text = text_of(row, self.source.columns, place) if ours else None
            if text is not None:
                yield Document(text, place)
