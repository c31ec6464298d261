from __future__ import annotations

import pytest
import torch

from ssm_tune.data import Collator

SINGLE = [
    {"input_ids": [5, 6, 2], "labels": [5, 6, 2], "seq_lengths": [3], "rows": [7]},
    {"input_ids": [8, 9, 4, 2, 2], "labels": [-100, -100, 4, 2, 2], "seq_lengths": [5], "rows": [3]},
]
PACKED = [
    {"input_ids": [5, 6, 2, 8, 2], "labels": [5, 6, 2, 8, 2], "seq_lengths": [3, 2], "rows": [7, 3]},
    {"input_ids": [4, 2], "labels": [-100, 2], "seq_lengths": [2], "rows": [1]},
]


def test_single_rows_are_padded_on_the_right_with_a_mask():
    batch = Collator(pad_token_id=2)(SINGLE)
    assert set(batch) == {"input_ids", "labels", "attention_mask", "rows"}
    assert batch["input_ids"].tolist() == [[5, 6, 2, 2, 2], [8, 9, 4, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["rows"].tolist() == [[7], [3]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_padding_has_no_label_though_it_is_eos_and_eos_has_one():
    labels = Collator(pad_token_id=2)(SINGLE)["labels"]
    assert labels.tolist() == [[-100, 6, 2, -100, -100], [-100, -100, 4, 2, 2]]


def test_packed_rows_carry_their_borders():
    batch = Collator(pad_token_id=0, fixed_length=6)(PACKED)
    assert set(batch) == {"input_ids", "labels", "position_ids", "seq_idx", "rows"}
    assert batch["input_ids"].tolist() == [[5, 6, 2, 8, 2, 0], [4, 2, 0, 0, 0, 0]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch["rows"].tolist() == [[7, 3], [1, -1]]
    assert batch["seq_idx"].dtype == torch.int32 and batch["position_ids"].dtype == torch.int64


def test_no_label_stands_on_the_first_token_of_a_document():
    labels = Collator(pad_token_id=0, fixed_length=6)(PACKED)["labels"]
    assert labels.tolist() == [[-100, 6, 2, -100, 2, -100], [-100, 2, -100, -100, -100, -100]]


def test_packed_rows_without_a_fixed_length_keep_their_borders_too():
    batch = Collator(pad_token_id=0)(PACKED)
    assert batch["seq_idx"].shape == (2, 5)


def test_rows_that_do_not_fit_or_do_not_add_up_are_errors():
    with pytest.raises(ValueError, match="5 tokens does not fit into a batch of length 4"):
        Collator(0, fixed_length=4)(PACKED)
    with pytest.raises(ValueError, match="have 3 tokens, the row has 2"):
        Collator(0)([{**PACKED[1], "seq_lengths": [3]}])
