"""Convolutions as long as the row, by FFT, each document by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
        The shape of u, float32 or wider; zero for padding. Differentiable once in u and kernel.
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
    return _RowConv.apply(u, kernel[:, : u.shape[1]])


class _RowConv(torch.autograd.Function):
    """Keeps u and kernel only, no spectra, and differentiates by FFTs of real numbers too, unlike autograd."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(u, kernel)
        length, size = u.shape[1], u.shape[1] + kernel.shape[1]
        spectrum = torch.fft.rfft(_length_last(u), n=size).mul_(torch.fft.rfft(kernel, n=size))
        return torch.fft.irfft(spectrum, n=size)[..., :length].permute(0, 3, 1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        u, kernel = ctx.saved_tensors
        length, size = u.shape[1], u.shape[1] + kernel.shape[1]
        spectrum = torch.fft.rfft(_length_last(dy), n=size)
        du = torch.fft.irfft(spectrum * torch.fft.rfft(kernel, n=size).conj(), n=size)[..., :length]
        dtaps = spectrum.mul_(torch.fft.rfft(_length_last(u), n=size).conj_physical_()).sum((0, 1))
        dkernel = torch.fft.irfft(dtaps, n=size)[:, : kernel.shape[1]]
        return du.permute(0, 3, 1, 2).contiguous(), dkernel


def _length_last(u: Tensor) -> Tensor:
    """(rows, length, copies, dim) to (rows, copies, dim, length), in order: FFTs of strided numbers are slow."""
    return u.permute(0, 2, 3, 1).contiguous()


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
