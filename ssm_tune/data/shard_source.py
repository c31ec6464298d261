"""Documents of a folder of tokens (`ssm_tune.data.token_shards`), mapped into memory, each epoch in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.documents import ENOUGH, Document, Position, Reader, dealt


@dataclass
class Part:
    """One file of tokens. entry: the number of the recipe's source. split: train or eval."""

    file: str
    entry: int
    split: str
    documents: int
    tokens: int
    sha256: str


@dataclass
class ShardSource:
    """Prepared documents, each epoch in another order of all of them."""

    name: str
    folder: Path
    dtype: str
    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self.firsts = np.cumsum([0, *(part.documents for part in self.parts)])
        self._maps: dict[int, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}  # a worker maps the files itself

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def document(self, number: int) -> NDArray[np.int32]:
        """The tokens of a document, int32."""
        part = int(np.searchsorted(self.firsts, number, "right")) - 1
        if part not in self._maps:
            file = self.folder / self.parts[part].file
            starts = np.load(file.with_name(file.name.replace(".tokens", ".starts.npy")), mmap_mode="r")
            self._maps[part] = (np.memmap(file, self.dtype, "r"), starts)
        tokens, starts = self._maps[part]
        inside = number - int(self.firsts[part])
        return np.array(tokens[starts[inside] : starts[inside + 1]], np.int32)

    def reader(self, shard: int, shards: int) -> Reader:
        return _ShardReader(self, *dealt(len(self) < ENOUGH, shard, shards))

    def describe(self) -> list[str]:
        tokens = sum(part.tokens for part in self.parts)
        return [f"{self.name}: {len(self):,} prepared documents, {tokens:,} tokens"]


class _ShardReader:
    """Reader of the documents at the places shard, shard + shards, ... of the epoch's order."""

    def __init__(self, source: ShardSource, shard: int, shards: int) -> None:
        self.source, self.shard, self.shards = source, shard, shards
        self.epoch, self.index = 0, shard

    def read(self) -> Document:
        if self.index >= len(self.source):
            self.epoch, self.index = self.epoch + 1, self.shard
        number = permuted(self.index, len(self.source), self.epoch)
        self.index += self.shards
        return Document("", f"{self.source.name}, document {number}", tokens=self.source.document(number))

    def position(self) -> Position:
        return {"epoch": self.epoch, "index": self.index}

    def restore(self, position: Position) -> None:
        self.epoch, self.index = position["epoch"], position["index"]


def permuted(index: int, size: int, key: int) -> int:
    """Where `index` goes in a permutation of range(size) that `key` names; without a table of it.

    A Feistel network of four rounds on the next even number of bits, walked until the result is in range (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixed = (right * 0x9E3779B1 + (key * 4 + turn) * 0x85EBCA6B + 0x27D4EB2F) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
        index = (left << half) | right
        if index < size:
            return index
