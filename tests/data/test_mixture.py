from __future__ import annotations

import numpy as np
import pytest

from ssm_tune.data.mixture import hold_out, weigh
from ssm_tune.data.tokens import Documents
from ssm_tune.recipe import RecipeError


def make(keys: list[int], groups: list[int] | None = None, length: int = 3) -> Documents:
    count = len(keys)
    return Documents(
        np.arange(count * length, dtype=np.int32),
        np.ones(count * length, np.bool_),
        np.arange(count + 1) * length,
        np.arange(count),
        np.array(keys),
        np.array(groups or [0] * count, np.int32),
    )


def test_a_share_is_held_out_and_nothing_is_lost():
    train, held = hold_out(make(list(range(1000))), 0.1, seed=0)
    assert len(held) == 100 and len(train) == 900
    assert sorted([*train.rows, *held.rows]) == list(range(1000))
    assert train.rows.tolist() == sorted(train.rows), "the order stays"
    assert held.tokens.tolist() == [token for row in held.rows for token in range(3 * row, 3 * row + 3)]


def test_equal_rows_are_on_one_side():
    keys = [number % 100 for number in range(1000)]
    train, held = hold_out(make(keys), 0.1, seed=0)
    assert not set(train.keys.tolist()) & set(held.keys.tolist())
    assert len(held) == 100


def test_a_row_that_is_most_of_the_data_stays_in_training_where_it_can():
    for seed in range(300):  # whichever row is drawn first
        train, held = hold_out(make([0] * 900 + list(range(1, 101))), 0.05, seed=seed)
        assert len(held) == 50 and len(train) == 950
    train, held = hold_out(make([0] * 30 + [1] * 20), 0.1, seed=0)
    assert len(held) == 20 and set(held.keys.tolist()) == {1}


def test_the_seed_decides_who_is_held_out():
    documents = make(list(range(200)))
    again = [hold_out(documents, 0.1, seed)[1].rows.tolist() for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]


def test_small_shares_hold_one_row():
    train, held = hold_out(make([1, 2]), 0.01, seed=0)
    assert len(train) == len(held) == 1


def test_equal_rows_alone_cannot_be_split():
    with pytest.raises(RecipeError, match="10 rows with 1 different content cannot be split"):
        hold_out(make([5] * 10), 0.5, seed=0)


def test_of_one_long_text_the_end_is_held_out():
    train, held = hold_out(make([7], length=100), 0.25, seed=0, piece_length=11)
    assert train.tokens.max() <= held.tokens.min() + 1
    assert held.tokens.max() == 99 and len(held) == 2 and len(train) == 8


def test_many_documents_are_held_out_whole_in_pretraining_too():
    train, held = hold_out(make(list(range(20)), length=100), 0.1, seed=0, piece_length=11)
    assert len(held) == 2 and held.lengths.tolist() == [100, 100] and len(train) == 18


def test_without_weights_every_row_comes_once():
    documents = make(list(range(10)), [0] * 4 + [1] * 6)
    mixed, notes = weigh(documents, [None, None], seed=0)
    assert mixed is documents and notes == []
    assert weigh(documents, [3.0], seed=0)[0] is documents


def test_weights_are_shares_and_no_row_is_lost():
    documents = make(list(range(400)), [0] * 100 + [1] * 300)
    mixed, notes = weigh(documents, [0.5, 0.5], seed=0)
    counts = np.bincount(mixed.groups)
    assert counts.tolist() == [300, 300]
    assert set(np.bincount(mixed.rows, minlength=400)[:100].tolist()) == {3}
    assert [group for group, _ in notes] == [0] and "3 times" in notes[0][1]


def test_a_part_of_a_pass_is_drawn_without_repetition():
    documents = make(list(range(200)), [0] * 100 + [1] * 100)
    mixed, _ = weigh(documents, [3, 2], seed=0)
    times = np.bincount(mixed.rows, minlength=200)
    assert set(times[:100].tolist()) == {1, 2} and times[:100].sum() == 150 and set(times[100:].tolist()) == {1}
    assert weigh(documents, [3, 2], seed=0)[0].rows.tolist() == mixed.rows.tolist()


def test_an_absent_weight_is_one():
    documents = make(list(range(200)), [0] * 100 + [1] * 100)
    assert np.bincount(weigh(documents, [2, None], seed=0)[0].groups).tolist() == [200, 100]


def test_absurd_weights_are_refused():
    documents = make(list(range(1001)), [0] + [1] * 1000)
    with pytest.raises(RecipeError, match=r"data.train.0.weight: its 1 rows would come 100,000 times"):
        weigh(documents, [100, 1], seed=0)
