"""Where documents begin in a batch: whatever form the borders come in, one tensor for every layer.

The document index is int32 (batch, length): the number of each token's document within its row, -1 for padding. Blocks
get it as an explicit argument, never through a context, because gradient checkpointing runs them again after the
forward pass is over.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.reference import PADDING, starts_and_padding


def document_index(
    shape: tuple[int, int],
    device: torch.device,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor | None:
    """The document index of a batch of this shape, or None where each row is one document without padding.

    Borders are taken from the first of these that is given; the mask is applied on top of it:

    Args:
        seq_idx: (batch, length) integers, already an index.
        cu_seq_lens_q: (documents + 1,) integers, the cumulated lengths of the documents of one row; later tokens are
            padding. A first 0 may be left out.
        position_ids: (batch or 1, length); a document begins wherever a position is not that of the real token before
            it plus one (or plus the distance, where padding between them counts).
        attention_mask: (batch, at least length), 0 marks padding; the last `length` columns count, as when a cache is
            continued.

    Raises:
        ValueError: a tensor of another shape, or borders that cannot be told (cu_seq_lens_q with several rows).
    """
    real = None if attention_mask is None else _real_tokens(shape, attention_mask.to(device))
    if seq_idx is not None:
        _require(tuple(seq_idx.shape) == tuple(shape), f"seq_idx is {tuple(seq_idx.shape)}, expected {tuple(shape)}")
        index = seq_idx.to(device=device, dtype=torch.int32)
    elif cu_seq_lens_q is not None:
        index = _index_from_lengths(shape, cu_seq_lens_q.to(device))
    elif position_ids is not None and shape[1] > 1:
        index = _index_from_positions(shape, position_ids.to(device), real)
    elif real is not None:
        index = torch.zeros(shape, dtype=torch.int32, device=device)
    else:
        return None
    if real is not None:
        index = index.masked_fill(~real, PADDING)
    # Plain rows take the plain path. Looking costs one wait for the device, so it is not done for the borders of
    # packed rows.
    if seq_idx is None and cu_seq_lens_q is None and not torch.compiler.is_compiling() and not index.any():
        return None
    return index.contiguous()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message + ".")


def _index_from_lengths(shape: tuple[int, int], cumulated: Tensor) -> Tensor:
    batch, length = shape
    _require(
        batch == 1 and cumulated.dim() == 1,
        f"cu_seq_lens_q describes one flattened row, but there are {batch}; give seq_idx (batch, length) instead",
    )
    places = torch.arange(length, device=cumulated.device)
    index = torch.searchsorted(cumulated.contiguous(), places, right=True) - (cumulated[0] == 0).to(torch.int64)
    return index.masked_fill(places >= cumulated[-1], PADDING).to(torch.int32)[None]


def _index_from_positions(shape: tuple[int, int], positions: Tensor, real: Tensor | None) -> Tensor:
    _require(
        positions.dim() == 2 and positions.shape[0] in (1, shape[0]) and positions.shape[1] == shape[1],
        f"position_ids is {tuple(positions.shape)}, expected {tuple(shape)}",
    )
    if real is None:
        begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
        return begins.cumsum(1, dtype=torch.int32).expand(shape)
    # Padding's own positions say nothing, and makers of batches differ in whether it counts for those behind it.
    positions = positions.expand(shape)
    places = torch.arange(shape[1], device=positions.device).expand(shape)
    last_real = F.pad(places.masked_fill(~real, -1).cummax(dim=1).values[:, :-1], (1, 0), value=-1)
    step = positions - positions.gather(1, last_real.clamp(min=0))
    begins = real & (last_real >= 0) & (step != 1) & (step != places - last_real)
    return begins.cumsum(1, dtype=torch.int32)


def _real_tokens(shape: tuple[int, int], mask: Tensor) -> Tensor:
    batch, length = shape
    _require(
        mask.dim() == 2 and mask.shape[0] == batch and mask.shape[1] >= length,
        f"attention_mask is {tuple(mask.shape)}, expected ({batch}, at least {length})",
    )
    return mask[:, mask.shape[1] - length :] != 0


def predicts_own_document(index: Tensor) -> Tensor:
    """Bool (batch, length): tokens whose predecessor is of the same document, so that predicting them is meant."""
    same = index[:, 1:] == index[:, :-1]
    return F.pad(same, (1, 0)) & (index != PADDING)


def mask_labels(labels: Tensor, index: Tensor | None, ignore_index: int = -100) -> Tensor:
    """Labels (batch, length), aligned with their tokens, without those that another document or padding would
    predict.
    """
    return labels if index is None else labels.masked_fill(~predicts_own_document(index), ignore_index)


def holds_several(index: Tensor) -> bool:
    """Whether any row holds more than one document (waits for the device)."""
    return bool(starts_and_padding(index, *index.shape, index.device)[0].any())


def document_numbers(index: Tensor) -> Tensor:
    """(batch, length) int64, equal where two tokens of a row are of the same document, and nowhere else: values of
    `index` may come again, and every padding token has a number of its own.
    """
    starts, padding = starts_and_padding(index, *index.shape, index.device)
    places = torch.arange(index.shape[1], device=index.device)
    return torch.where(padding, -1 - places, starts.cumsum(1))


def document_positions(index: Tensor) -> Tensor:
    """Position of each token in its document, (batch, length) int64: the number of its real tokens before it; 0 for
    padding.
    """
    starts, padding = starts_and_padding(index, *index.shape, index.device)
    before = (~padding).cumsum(1) - 1
    return (before - torch.where(starts, before, 0).cummax(dim=1).values).masked_fill(padding, 0)
