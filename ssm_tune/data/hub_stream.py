"""Documents of a Hub data set, streamed by `datasets`: nothing is downloaded but what is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ssm_tune.data.documents import (
    ENOUGH,
    VIRTUAL_SHARDS,
    Document,
    Position,
    Reader,
    RepeatingReader,
    count_up_to,
    text_of,
)
from ssm_tune.data.sources import hub_errors, load_hub
from ssm_tune.recipe import DataSource

if TYPE_CHECKING:
    from datasets import IterableDataset


@dataclass
class HubSource:
    """A data set on the Hub (`owner/name` or `owner/name:subset`), or a folder that `datasets` reads likewise.

    With as many files as readers, or row groups in Parquet files, each reader has its own. With fewer, each reader
    reads everything and passes over what is the others': the data set is then downloaded once for each, which the
    start of a run says.

    Raises RecipeError if there is no such data set or split, or its first row has no text.
    """

    path: str
    split: str = "train"
    columns: dict[str, str] | None = None
    where: str = "data.train"
    few: bool = field(init=False)
    apart: bool = field(init=False)
    _dataset: IterableDataset | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self.few = False
        self.apart = self.open().num_shards >= VIRTUAL_SHARDS
        # Of many files the first document is looked at; of fewer so many that it is known whether there are enough.
        wanted = 1 if self.apart else ENOUGH
        self.few = count_up_to(_HubReader(self, 0, VIRTUAL_SHARDS if self.apart else 1), wanted) < wanted

    @property
    def name(self) -> str:
        return f"{self.path} {self.split}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_dataset": None}  # a worker opens it itself

    def open(self) -> IterableDataset:
        """The data set with its text only; asked of the Hub once."""
        if self._dataset is not None:
            return self._dataset
        with hub_errors(self.path, self.split, self.where):
            dataset = load_hub(DataSource(self.path, self.split), self.where, streaming=True)
            if dataset.num_shards < VIRTUAL_SHARDS:
                dataset = dataset.reshard()  # Parquet: by row groups
            column = (self.columns or {}).get("text", "text")
            if dataset.column_names is not None and column in dataset.column_names:
                dataset = dataset.select_columns([column])
        self._dataset = dataset
        return dataset

    def reader(self, shard: int, shards: int) -> Reader:
        if self.few:
            shard, shards = 0, 1
        return _HubReader(self, shard, shards)

    def describe(self) -> list[str]:
        if self.apart or self.few:
            return [f"{self.name}: streamed"]
        return [
            f"{self.name}: streamed, and read {VIRTUAL_SHARDS} times over, since it has fewer than {VIRTUAL_SHARDS} "
            "files; `ssm-tune prepare` reads it once"
        ]

    def head(self, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        """The rows of a bounded part, numbered from 0, for evaluation."""
        with hub_errors(self.path, self.split, self.where):
            yield from islice(enumerate(self.open()), begin, end)


class _HubReader(RepeatingReader):
    """`row` counts what this reader's part of the data set has given; where that is `datasets` itself knows."""

    def __init__(self, source: HubSource, shard: int, shards: int) -> None:
        apart = source.apart and shards > 1
        super().__init__(source.name, *((0, 1) if apart else (shard, shards)))
        self.source = source
        self.part = (shards, shard) if apart else None
        self._dataset: IterableDataset | None = None

    def _open(self) -> IterableDataset:
        if self._dataset is None:
            self._dataset = self.source.open().shard(*(self.part or (1, 0)), contiguous=False)
        return self._dataset

    def _documents(self) -> Iterator[Document]:
        dataset = self._open()
        dataset.set_epoch(self.epoch)
        if "state" in self.mark:
            dataset.load_state_dict(self.mark["state"])
        place = f"{self.name}, " + ("row" if self.part is None else f"part {self.part[1]} of {self.part[0]}, row")
        with hub_errors(self.source.path, self.source.split, self.source.where):
            for row in dataset:
                ours = self.mine()
                self.row += 1
                text = text_of(row, self.source.columns, f"{place} {self.row - 1}") if ours else None
                if text is not None:
                    yield Document(text, f"{place} {self.row - 1}")

    def position(self) -> Position:
        # A deep copy, but asked for only at the beginning of a block.
        state = {} if self._iterator is None else {"state": self._open().state_dict()}
        return {**super().position(), **state}
