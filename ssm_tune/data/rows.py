"""Documents of any length into the rows of a token data set: cut or split, packed or not, as an Arrow table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.packing import pack
from ssm_tune.data.tokens import Documents

if TYPE_CHECKING:
    import pyarrow

_CHUNK = 2**28  # tokens in one Arrow chunk, whose offsets are 32 bits wide


@dataclass
class TokenRows:
    """The rows of a token data set, flat: row i is tokens[starts[i]:starts[i + 1]].

    lengths, numbers: of every row's documents, and of their source rows; those of row i are
    lengths[length_starts[i]:length_starts[i + 1]], and likewise the numbers. All int64, tokens int32, learned bool.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    length_starts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    number_starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def to_table(self) -> pyarrow.Table:
        """Columns input_ids, labels (-100 where nothing is learned), seq_lengths and rows, all lists."""
        import pyarrow

        names = ["input_ids", "labels", "seq_lengths", "rows"]
        first, tables = 0, []
        while first < len(self):
            last = max(int(np.searchsorted(self.starts, self.starts[first] + _CHUNK, "right")) - 1, first + 1)
            here = slice(int(self.starts[first]), int(self.starts[last]))
            tokens = self.tokens[here]
            labels = np.where(self.learned[here], tokens, np.int32(-100))
            columns = [
                _lists(tokens, self.starts[first : last + 1]),
                _lists(labels, self.starts[first : last + 1]),
                _part(self.lengths, self.length_starts[first : last + 1]),
                _part(self.numbers, self.number_starts[first : last + 1]),
            ]
            tables.append(pyarrow.Table.from_arrays(columns, names=names))
            first = last
        return pyarrow.concat_tables(tables)


def cut_documents(documents: Documents, max_length: int) -> Documents:
    """Every document's first `max_length` tokens."""
    indices = np.arange(len(documents))
    return documents.slices(indices, np.zeros_like(indices), np.minimum(documents.lengths, max_length))


def split_documents(documents: Documents, max_length: int) -> Documents:
    """Every document in pieces of at most `max_length` tokens.

    A piece begins with the last token of the one before it, so that each token of the document but the first is
    predicted once: no loss falls on the first token of a piece.
    """
    step = max_length - 1
    counts = np.maximum(-(-(documents.lengths - 1) // step), 1)
    indices = np.repeat(np.arange(len(documents)), counts)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    begins = (np.arange(len(indices)) - np.repeat(firsts, counts)) * step
    return documents.slices(indices, begins, np.minimum(documents.lengths[indices] - begins, max_length))


def single_rows(documents: Documents) -> TokenRows:
    """One row a document, in their order."""
    return _grouped(documents, np.ones(len(documents), np.int64))


def packed_rows(documents: Documents, max_length: int, seed: int) -> TokenRows:
    """Documents packed into rows of at most `max_length` tokens (the collator pads them), their borders kept."""
    packs = pack(documents.lengths, max_length, seed)
    order = np.fromiter((index for row in packs for index in row), np.int64, count=len(documents))
    return _grouped(documents.take(order), np.array([len(row) for row in packs], np.int64))


def joined_rows(documents: Documents, max_length: int, seed: int) -> TokenRows:
    """All documents, in an order drawn with `seed`, as one text cut into rows of `max_length` tokens without borders.

    Rows in which nothing would be learned are left out.
    """
    documents = documents.take(np.random.default_rng(seed).permutation(len(documents)))
    total = int(documents.starts[-1])
    begins = np.arange(0, total, max_length)
    ends = np.minimum(begins + max_length, total)
    counts = np.concatenate([[0], np.cumsum(documents.learned)])
    useful = counts[ends] - counts[begins] - documents.learned[begins] > 0
    begins, ends = begins[useful], ends[useful]
    kept = np.zeros(total, np.bool_)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        kept[begin:end] = True
    # The documents that a row touches: from the one its first token is in to the one its last token is in.
    first = np.searchsorted(documents.starts, begins, "right") - 1
    touched = np.searchsorted(documents.starts, ends, "left") - first
    lengths = ends - begins
    starts = _starts(lengths)
    number_starts = _starts(touched)
    inside = np.arange(number_starts[-1]) - np.repeat(number_starts[:-1], touched)
    numbers = documents.rows[np.repeat(first, touched) + inside]
    one_each = np.arange(len(begins) + 1)
    return TokenRows(documents.tokens[kept], documents.learned[kept], starts, lengths, one_each, numbers, number_starts)


def _grouped(documents: Documents, counts: NDArray[np.int64]) -> TokenRows:
    """Rows of so many documents each, in their order."""
    groups = _starts(counts)
    starts = documents.starts[groups]
    return TokenRows(documents.tokens, documents.learned, starts, documents.lengths, groups, documents.rows, groups)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _part(values: NDArray[np.int64], starts: NDArray[np.int64]) -> pyarrow.ListArray:
    return _lists(values[int(starts[0]) : int(starts[-1])], starts)


def _lists(values: NDArray[np.generic], starts: NDArray[np.int64]) -> pyarrow.ListArray:
    import pyarrow

    return pyarrow.ListArray.from_arrays(pyarrow.array((starts - starts[0]).astype(np.int32)), pyarrow.array(values))
