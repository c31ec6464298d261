"""Convolutions of packed rows, as accelerators take them: equal to sums over the tokens of a document, no waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ssm_tune.kernels.document_conv import convolve_documents
from ssm_tune.kernels.long_conv import long_conv

DIM, COPIES = 3, 2
LENGTH = 331  # halves of every size, by matrices and by FFT, and a rest at every cut


def by_sums(u: Tensor, kernel: Tensor, seq_idx: Tensor) -> Tensor:
    """One document at a time, by its matrix of taps."""
    y = torch.zeros_like(u)
    for row, numbers in enumerate(seq_idx):
        for number in range(int(numbers.max()) + 1):
            places = (numbers == number).nonzero()[:, 0]
            lags = torch.arange(len(places))[:, None] - torch.arange(len(places))
            near = (lags >= 0) & (lags < kernel.shape[1])
            matrix = kernel[:, lags.clamp(0, kernel.shape[1] - 1)] * near
            y[row, places] = torch.einsum("dij,jcd->icd", matrix, u[row, places])
    return y


def packed_rows() -> Tensor:
    """Many short documents, some of several cuts, one of a whole row; padding anywhere, and only padding."""
    generator = torch.Generator().manual_seed(3)
    short = (torch.rand(LENGTH, generator=generator) < 0.2).cumsum(0)
    long = torch.zeros(LENGTH).long()
    long[40:] += 1
    long[299:] += 1
    padded = short.masked_fill(torch.rand(LENGTH, generator=generator) < 0.3, -1)
    nothing = torch.full((LENGTH,), -1)
    return torch.stack([short, long, padded, torch.zeros(LENGTH).long(), nothing]).to(torch.int32)


def with_gradients(convolve: Callable[..., Tensor], *arguments: Tensor) -> list[Tensor]:
    u, kernel, seq_idx, weight = arguments
    u, kernel = u.clone().requires_grad_(), kernel.clone().requires_grad_()
    y = convolve(u, kernel, seq_idx)
    return [y, *torch.autograd.grad((y * weight).sum(), [u, kernel])]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


# More taps than tokens, as many, fewer than the halves of products of matrices or of FFTs, and one.
@pytest.mark.parametrize("taps", [400, LENGTH, 100, 20, 1])
@pytest.mark.parametrize("convolve", [convolve_documents, long_conv])
def test_equals_sums_over_documents(convolve: Callable[..., Tensor], taps: int) -> None:
    seq_idx = packed_rows()
    u, weight, kernel = draw(5, LENGTH, COPIES, DIM), draw(5, LENGTH, COPIES, DIM), draw(DIM, taps)
    found = with_gradients(convolve, u, kernel, seq_idx, weight)
    expected = with_gradients(by_sums, u, kernel, seq_idx, weight)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 256])
def test_rows_of_any_length(length: int) -> None:
    seq_idx = packed_rows()[:4, :length]
    u, weight, kernel = draw(4, length, COPIES, DIM), draw(4, length, COPIES, DIM), draw(DIM, length)
    found = with_gradients(convolve_documents, u, kernel, seq_idx, weight)
    expected = with_gradients(by_sums, u, kernel, seq_idx, weight)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_channels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seq_idx = packed_rows()
    arguments = draw(5, LENGTH, COPIES, DIM), draw(DIM, LENGTH), seq_idx, draw(5, LENGTH, COPIES, DIM)
    whole = with_gradients(convolve_documents, *arguments)
    monkeypatch.setattr("ssm_tune.kernels.document_conv._MOST_AT_ONCE", seq_idx.numel() * COPIES * 2)
    torch.testing.assert_close(with_gradients(convolve_documents, *arguments), whole, rtol=1e-12, atol=1e-12)


def test_nothing_of_other_documents_or_padding_is_seen() -> None:
    """To the last bit, in float32: whatever stands in padding, and in the documents before."""
    seq_idx = packed_rows()[1:2].clone()
    seq_idx[:, 310:] = -1
    u, kernel = draw(1, LENGTH, COPIES, DIM, dtype=torch.float32), draw(DIM, LENGTH, dtype=torch.float32)
    weight = torch.zeros_like(u)
    weight[:, 40:299] = 1
    plain = with_gradients(convolve_documents, u, kernel, seq_idx, weight)
    u[:, :40] *= 1e6
    u[:, 310:] = torch.nan
    other = with_gradients(convolve_documents, u, kernel, seq_idx, weight)
    assert torch.equal(plain[0][:, 40:], other[0][:, 40:])
    assert torch.equal(plain[1], other[1]) and torch.equal(plain[2], other[2])
    assert (plain[1][:, :40] == 0).all() and (plain[1][:, 299:] == 0).all()


def test_a_device_is_not_waited_for() -> None:
    """Tensors without values: asking for one fails, as does a shape that depends on one."""
    options = {"device": "meta"}
    u = torch.empty(2, 300, 1, DIM, **options, requires_grad=True)
    kernel = torch.empty(DIM, 300, **options, requires_grad=True)
    seq_idx = torch.empty(2, 300, dtype=torch.int32, **options)
    y = long_conv(u, kernel, seq_idx)
    y.sum().backward()
    assert y.shape == u.shape and u.grad is not None and kernel.grad is not None


@pytest.mark.gpu
def test_equals_sums_on_a_gpu_without_a_wait() -> None:
    arguments = draw(5, LENGTH, COPIES, DIM), draw(DIM, LENGTH), packed_rows(), draw(5, LENGTH, COPIES, DIM)
    expected = with_gradients(by_sums, *arguments)
    there = [argument.cuda() for argument in arguments]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = with_gradients(long_conv, *there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([part.cpu() for part in found], expected, rtol=1e-9, atol=1e-9)
