"""Borders in every form give the same index."""

from __future__ import annotations

import pytest
import torch
from rows import make_documents, relative_error, stockin_pytorch
from tiny import HYBRID, KINDS, tiny_model

from ssm_tune.mixers import patch_model
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
    assert index_of((1, 6), cu_seq_lens_q=torch.tensor([2, 3, 3, 6])) == [[0, 0, 1, 3, 3, 3]]
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


def test_positions_go_on_after_padding() -> None:
    """Whether padding counts or not, and also where it stands between documents."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1]])
    for positions in ([0, 1, 0, 0, 2, 3, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1]):
        index = index_of((1, 9), position_ids=torch.tensor([positions]), attention_mask=mask)
        assert index == [[0, 0, -1, -1, 0, 0, -1, 1, 1]]


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


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_stand_anywhere(kind: str) -> None:
    """Within documents and between them: every document is as it is alone, whichever way the borders come."""
    stock, model = tiny_model(kind), patch_model(tiny_model(kind))
    documents = make_documents((9, 6, 12))
    with torch.no_grad(), stockin_pytorch():
        wanted = [stock(document[None], use_cache=False).logits[0] for document in documents]
    index = torch.tensor([[0] * 4 + [-1] * 3 + [0] * 5 + [-1] * 2 + [1] * 6 + [2] * 12])
    ids = torch.zeros_like(index)
    ids[index >= 0] = torch.cat(documents)
    counted = torch.tensor([[*range(14), *range(6), *range(12)]])
    positions = torch.tensor([[*range(4), 0, 0, 0, *range(4, 9), 0, 0, *range(6), *range(12)]])
    mask = (index >= 0).long()
    for borders in (
        {"seq_idx": index},
        {"position_ids": positions, "attention_mask": mask},
        {"position_ids": counted, "attention_mask": mask},
    ):
        with torch.no_grad():
            got = model(ids, use_cache=False, **borders).logits
        for number, logits in enumerate(wanted):
            assert relative_error(got[index == number], logits) < 1e-5, list(borders)
    first = slice(0, 12)  # one document alone, with a hole
    with torch.no_grad():
        got = model(ids[:, first], use_cache=False, attention_mask=mask[:, first]).logits[0]
        cached = model(ids[:, :10], attention_mask=mask[:, :10]).cache
        last = model(ids[:, 10:12], attention_mask=mask[:, first], cache=cached).logits[0]
    assert relative_error(got[mask[0, first] == 1], wanted[0]) < 1e-5
    assert relative_error(last, wanted[0][-2:]) < 1e-5


@pytest.mark.parametrize("kind", HYBRID)
def test_a_mask_of_attention_is_refused(kind: str) -> None:
    """Stock's attention goes by it, while its state-space layers let everything through."""
    ids = torch.randint(6, 260, (1, 8))
    mask = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match="documents by seq_idx"):
        patch_model(tiny_model(kind))(ids, attention_mask=mask, use_cache=False)
