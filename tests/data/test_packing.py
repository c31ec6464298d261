from __future__ import annotations

import time

import numpy as np
import pytest

from ssm_tune.data.packing import pack, padding_share


def realistic(count: int, capacity: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(5.5, 0.8, count).astype(np.int64) + 1, capacity)


@pytest.mark.parametrize(("count", "capacity"), [(0, 8), (1, 8), (200, 300), (3000, 2048)])
def test_every_document_is_in_one_row_that_holds_it(count, capacity):
    lengths = realistic(count, capacity)
    rows = pack(lengths, capacity, seed=0)
    assert sorted(index for row in rows for index in row) == list(range(count))
    assert all(lengths[row].sum() <= capacity for row in rows)


def test_little_padding():
    lengths = realistic(10_000, 2048)
    rows = pack(lengths, 2048, seed=0)
    assert 1 - lengths.sum() / (len(rows) * 2048) < 0.01


def test_the_best_fit_is_taken():
    # 6 fits behind 14 and behind 13. Behind 13 it would leave one place empty, and 4 and 3 would need a third row.
    rows = pack(np.array([14, 13, 6, 4, 3]), 20, seed=0)
    assert sorted(sorted(row) for row in rows) == [[0, 2], [1, 3, 4]]


def test_full_rows_take_nothing_more():
    assert sorted(pack(np.array([8, 8, 8]), 8, seed=1)) == [[0], [1], [2]]


def test_the_seed_alone_decides_the_order():
    lengths = realistic(500, 512)
    assert pack(lengths, 512, seed=3) == pack(lengths, 512, seed=3)
    assert pack(lengths, 512, seed=3) != pack(lengths, 512, seed=4)


def test_neighbours_of_one_length_do_not_stay_together():
    rows = pack(np.full(200, 10), 20, seed=0)
    assert sum(abs(first - second) == 1 for first, second in rows) < 10


def test_a_document_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="9 tokens does not fit into a row of 8"):
        pack(np.array([3, 9]), 8, seed=0)


def test_a_hundred_thousand_documents_in_seconds():
    start = time.process_time()
    pack(realistic(100_000, 8192), 8192, seed=0)
    assert time.process_time() - start < 5


def test_padding_of_unpacked_rows():
    lengths = np.array([1, 3])
    assert padding_share(lengths, 1, seed=0) == 0
    assert padding_share(lengths, 2, seed=0) == pytest.approx(2 / 6)
    assert padding_share(lengths, 5, seed=0) == pytest.approx(2 / 6)
    assert padding_share(np.zeros(0, np.int64), 4, seed=0) == 0
