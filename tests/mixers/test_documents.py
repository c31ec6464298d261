"""Borders in every form give the same index."""

from __future__ import annotations

import pytest
import torch

from ssm_tune.mixers.documents import document_index, mask_labels

CPU = torch.device("cpu")
LABELS = torch.arange(6)[None]


def index_of(shape: tuple[int, int], **borders: torch.Tensor) -> list[list[int]] | None:
    index = document_index(shape, CPU, **borders)
    if index is None:
        return None
    assert index.dtype == torch.int32 and index.is_contiguous()
    return index.tolist()


def test_nothing_known_is_one_document() -> None:
    assert index_of((2, 4)) is None
    assert index_of((2, 4), attention_mask=torch.ones(2, 4)) is None
    assert index_of((2, 4), position_ids=torch.arange(4)[None]) is None
    assert index_of((2, 1), position_ids=torch.tensor([[7], [3]])) is None


def test_seq_idx_is_taken_as_it_is() -> None:
    given = torch.tensor([[0, 0, 3, -1]])
    assert index_of((1, 4), seq_idx=given) == [[0, 0, 3, -1]]
    assert index_of((1, 4), seq_idx=torch.zeros(1, 4)) == [[0, 0, 0, 0]]


def test_cumulated_lengths() -> None:
    assert index_of((1, 6), cu_seq_lens_q=torch.tensor([0, 2, 3, 6])) == [[0, 0, 1, 2, 2, 2]]
    assert index_of((1, 6), cu_seq_lens_q=torch.tensor([0, 2, 3])) == [[0, 0, 1, -1, -1, -1]]
    with pytest.raises(ValueError, match="one flattened row"):
        index_of((2, 3), cu_seq_lens_q=torch.tensor([0, 2, 6]))


def test_positions_that_restart() -> None:
    assert index_of((1, 5), position_ids=torch.tensor([[0, 1, 0, 0, 1]])) == [[0, 0, 1, 2, 2]]
    # A chunk that begins within a document, and one position tensor for all rows.
    assert index_of((2, 4), position_ids=torch.tensor([[5, 6, 0, 1]])) == [[0, 0, 1, 1]] * 2
    with pytest.raises(ValueError, match="position_ids is"):
        index_of((1, 5), position_ids=torch.zeros(3, 1, 5))


def test_mask_is_applied_on_top() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert index_of((2, 4), attention_mask=mask) == [[-1, -1, 0, 0], [0, 0, 0, -1]]
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 0]])  # as transformers' generate makes them
    assert index_of((2, 4), attention_mask=mask, position_ids=positions)[1] == [0, 0, 0, -1]
    assert index_of((1, 4), attention_mask=mask[:1], seq_idx=torch.tensor([[0, 0, 0, 1]])) == [[-1, -1, 0, 1]]


def test_a_longer_mask_covers_the_past() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0]])
    assert index_of((1, 2), attention_mask=mask) == [[0, -1]]
    assert index_of((1, 3), attention_mask=mask[:, :4]) is None
    with pytest.raises(ValueError, match="attention_mask is"):
        index_of((1, 6), attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask is"):
        index_of((1, 2), attention_mask=mask[None, None])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="seq_idx is"):
        index_of((2, 4), seq_idx=torch.zeros(1, 4))


def test_first_tokens_and_padding_are_no_labels() -> None:
    index = torch.tensor([[-1, 0, 0, 1, 1, -1]])
    assert mask_labels(LABELS, index).tolist() == [[-100, -100, 2, -100, 4, -100]]
    assert mask_labels(LABELS, None) is LABELS
