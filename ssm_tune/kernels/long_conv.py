"""Convolutions as long as the row, by FFT, each document by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.document_conv import convolve_documents
from ssm_tune.kernels.reference import starts_and_padding


class Documents(NamedTuple):
    """Where the documents of a batch are. Real tokens are counted within their document.

    Attributes:
        real: (batch, length), not padding.
        place: (batch, length), the number of real tokens of the same document before each token.
        left: (batch, length), the number of real tokens after each token, in its row.
        first, last: (batch, length), real tokens of the first and of the last document of the row.
    """

    real: Tensor
    place: Tensor
    left: Tensor
    first: Tensor
    last: Tensor


def find_documents(seq_idx: Tensor | None, batch: int, length: int, device: torch.device) -> Documents:
    """From (batch, length) document numbers, -1 padding; None: each row is one document."""
    starts, padding = starts_and_padding(seq_idx, batch, length, device)
    real = ~padding
    number = starts.cumsum(1)
    counted = real.cumsum(1)
    before = torch.where(starts, counted - 1, 0).cummax(1).values  # real tokens before the document
    return Documents(
        real=real,
        place=counted - 1 - before,
        left=counted[:, -1:] - counted,
        first=real & (number == 0),
        last=real & (number == number[:, -1:]),
    )


def long_conv(u: Tensor, kernel: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """y_t = sum_l kernel_l u_{t-l} over the tokens of the same document (H3, section 4).

    By one FFT of whole rows. With seq_idx, where a device would have to be waited for, by `convolve_documents`; a CPU
    knows the lengths of documents for nothing and does least when it lays them out by size.

    Args:
        u: (batch, length, copies, dim). kernel: (dim, taps); further tokens have no weight.
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.

    Returns:
        The shape of u, float32 or wider; zero for padding. Differentiable in u and kernel.
    """
    u = u.to(torch.promote_types(u.dtype, torch.float32))
    kernel = kernel.to(u.dtype)
    if seq_idx is None:
        return _convolve_rows(u, kernel)
    if u.device.type != "cpu":
        return convolve_documents(u, kernel, seq_idx)
    return _convolve_by_size(u, kernel, seq_idx)


def _convolve_rows(u: Tensor, kernel: Tensor) -> Tensor:
    """Each row (rows, length, copies, dim) by itself, causally."""
    length = u.shape[1]
    kernel = kernel[:, :length]
    size = length + kernel.shape[1]
    spectrum = torch.fft.rfft(u, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=1).transpose(0, 1)[:, None]
    return torch.fft.irfft(spectrum, n=size, dim=1)[:, :length]


def _convolve_by_size(u: Tensor, kernel: Tensor, seq_idx: Tensor) -> Tensor:
    """Documents in batches of rows of a power of two tokens, so that at most half of the work is on nothing."""
    groups = list(_lay_out(seq_idx))
    if not groups:
        return torch.zeros_like(u)
    tokens = u.flatten(0, 1)
    laid_out = tokens.index_select(0, torch.cat([places.flatten() for places, _ in groups]))
    results = []
    for rows, (places, real) in zip(laid_out.split([places.numel() for places, _ in groups]), groups, strict=True):
        rows = rows.view(*places.shape, *rows.shape[1:]) * real[..., None, None]
        results.append(_convolve_rows(rows, kernel)[real])
    where = torch.cat([places[real] for places, real in groups])
    return torch.zeros_like(tokens).index_put((where,), torch.cat(results)).view_as(u)


def _lay_out(seq_idx: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents by size: the places of their tokens in the flattened batch (documents, 2^n), and which are real."""
    batch, length = seq_idx.shape
    documents = find_documents(seq_idx, batch, length, seq_idx.device)
    places = documents.real.flatten().nonzero()[:, 0]
    begins = (documents.place.flatten()[places] == 0).nonzero()[:, 0]
    lengths = torch.diff(F.pad(begins, (0, 1), value=places.numel()))
    exponents = torch.log2(lengths.clamp(min=1).double()).ceil().long()
    for exponent in exponents.unique().tolist():
        size = 2**exponent
        chosen = (exponents == exponent).nonzero()[:, 0]
        steps = torch.arange(size, device=seq_idx.device)
        real = steps < lengths[chosen, None]
        index = (begins[chosen, None] + steps).clamp(max=places.numel() - 1)
        yield places[index], real
