from __future__ import annotations

import numpy as np
import pytest

from ssm_tune.data import rows as rows_module
from ssm_tune.data.rows import cut_documents, joined_rows, packed_rows, single_rows, split_documents
from ssm_tune.data.tokens import Documents


def make(*lengths: int) -> Documents:
    """Documents whose tokens count up; the first token of each is not learned."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    learned = np.ones(starts[-1], np.bool_)
    learned[starts[:-1]] = False
    count = len(lengths)
    return Documents(
        np.arange(starts[-1], dtype=np.int32),
        learned,
        starts,
        np.arange(100, 100 + count),
        np.arange(count),
        np.zeros(count, np.int32),
    )


def documents_of(table: list[dict]) -> dict[int, list[list[int]]]:
    """Source row -> the token lists of its documents, by the borders of the table's rows."""
    found: dict[int, list[list[int]]] = {}
    for row in table:
        position = 0
        for length, number in zip(row["seq_lengths"], row["rows"], strict=True):
            found.setdefault(number, []).append(row["input_ids"][position : position + length])
            position += length
        assert position == len(row["input_ids"]) == len(row["labels"])
    return found


def test_single_rows():
    table = single_rows(make(2, 3)).to_table().to_pylist()
    assert table == [
        {"input_ids": [0, 1], "labels": [-100, 1], "seq_lengths": [2], "rows": [100]},
        {"input_ids": [2, 3, 4], "labels": [-100, 3, 4], "seq_lengths": [3], "rows": [101]},
    ]


def test_packed_rows_keep_every_document_whole():
    lengths = np.random.default_rng(0).integers(1, 20, 200)
    documents = make(*lengths.tolist())
    packed = packed_rows(documents, 20, seed=0)
    table = packed.to_table().to_pylist()
    assert len(table) == len(packed) < 200
    assert all(len(row["input_ids"]) <= 20 for row in table)
    expected = {100 + i: [list(range(documents.starts[i], documents.starts[i + 1]))] for i in range(200)}
    assert documents_of(table) == expected
    for row in table:
        assert [label for label in row["labels"] if label != -100] == [
            token for token in row["input_ids"] if token not in set(documents.starts.tolist())
        ]


def test_tables_of_several_chunks_are_the_same(monkeypatch):
    documents = make(*np.random.default_rng(0).integers(1, 20, 200).tolist())
    packed = packed_rows(documents, 20, seed=0)
    whole = packed.to_table()
    monkeypatch.setattr(rows_module, "_CHUNK", 50)
    parts = packed.to_table()
    assert parts.column("input_ids").num_chunks > 10 and whole.column("input_ids").num_chunks == 1
    assert parts.to_pylist() == whole.to_pylist()


def test_joined_rows_run_over_the_borders():
    documents = make(3, 4, 5)
    table = joined_rows(documents, 5, seed=0).to_table().to_pylist()
    assert [len(row["input_ids"]) for row in table] == [5, 5, 2]
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in table)
    tokens = [token for row in table for token in row["input_ids"]]
    order = np.random.default_rng(0).permutation(3)
    assert tokens == documents.take(order).tokens.tolist()
    for row in table:
        touched = {100 + int(np.searchsorted(documents.starts, token, "right") - 1) for token in row["input_ids"]}
        assert set(row["rows"]) == touched and len(row["rows"]) == len(touched)


def test_joined_rows_without_a_loss_are_left_out():
    documents = make(12)
    documents.learned[:] = False
    documents.learned[[4, 9]] = True  # 4 is the first token of a row: nothing in the row predicts it
    table = joined_rows(documents, 4, seed=0).to_table().to_pylist()
    assert [row["input_ids"] for row in table] == [[8, 9, 10, 11]]


def test_cutting_takes_the_end_away():
    cut = cut_documents(make(2, 6), 4)
    assert cut.tokens.tolist() == [0, 1, 2, 3, 4, 5] and cut.lengths.tolist() == [2, 4]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8, 13])
def test_splitting_predicts_every_token_once(length):
    documents = make(length)
    documents.learned[:] = True
    pieces = split_documents(documents, 4)
    assert max(pieces.lengths) <= 4
    predicted = [
        pieces.tokens[start + 1 : end].tolist() for start, end in zip(pieces.starts, pieces.starts[1:], strict=False)
    ]
    assert [token for piece in predicted for token in piece] == list(range(1, length))
    assert all(predicted), "no piece is without a token to predict"
    assert set(pieces.rows.tolist()) == {100}
