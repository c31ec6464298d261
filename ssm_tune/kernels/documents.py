"""What kernels for a GPU have to know about the documents of a batch, worked out once for all layers.

Indices of the tokens concerned are cheaper than masks over whole activations, but finding them waits for the device.
Every layer of a model is given the same `seq_idx`, so that it is done once a batch. Where the device must not be waited
for, while a CUDA graph is captured, there is no padding (`without_waiting`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ssm_tune.kernels.reference import starts_and_padding


class Documents(NamedTuple):
    """The documents of a batch of rows.

    Attributes:
        number: (batch, length), int32: documents counted from 0 in each row; 0 continues the initial state, and
        padding has
            the number of the token before it. Two documents of a row never share one, as the values of `seq_idx` may.
        starts: rows and columns of the tokens before which the state is set to zero. padding: rows and columns of the
        tokens that are padding; `is_padding` (batch, length), or None if there is none. marked: `number` with -1 on
        padding. gaps: whether padding stands between the tokens of a document, so that a window would have to reach
        over it. Found without waiting, `starts`, `padding` and `is_padding` are None, and `gaps` is False.
    """

    number: Tensor
    starts: tuple[Tensor, Tensor] | None
    padding: tuple[Tensor, Tensor] | None
    is_padding: Tensor | None
    marked: Tensor
    gaps: bool


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_local = threading.local()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within, and in this thread, documents are found without looking at values: for a CUDA graph, which is run again
    with others. The caller answers for there being no padding."""
    before, _local.waits = getattr(_local, "waits", True), False
    try:
        yield
    finally:
        _local.waits = before


def find_documents(seq_idx: Tensor) -> Documents:
    """The documents of `seq_idx` (batch, length), kept as long as that very tensor lives unchanged."""
    kept = _found.get(seq_idx)
    version = None if seq_idx.is_inference() else seq_idx._version
    if kept is not None and kept[0] == version and version is not None:
        return kept[1]
    documents = _find_documents(seq_idx)
    if version is not None:
        _found[seq_idx] = (version, documents)
    return documents


def _find_documents(seq_idx: Tensor) -> Documents:
    starts, padding = starts_and_padding(seq_idx, *seq_idx.shape, seq_idx.device)
    if not getattr(_local, "waits", True):
        number = starts.cumsum(1).to(torch.int32)
        return Documents(number, None, None, None, number, gaps=False)
    within = (~padding).cumsum(1)[:, :-1] > 0
    after_padding = ~padding[:, 1:] & padding[:, :-1] & ~starts[:, 1:] & within
    pads = padding.nonzero(as_tuple=True)
    some = pads[0].numel() > 0
    number = starts.cumsum(1).to(torch.int32)
    return Documents(
        number=number,
        starts=starts.nonzero(as_tuple=True),
        padding=pads,
        is_padding=padding if some else None,
        marked=number.masked_fill(padding, -1) if some else number,
        gaps=some and bool(after_padding.any()),
    )
