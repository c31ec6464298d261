"""Causal convolutions of packed rows, each document by itself, at a cost that does not depend on the documents.

A row is halved again and again. At each cut the tokens on its right take in those on its left, and of all pairs of
tokens across a cut just those share a document that both share the one of the token before the cut. So a mask on the
left, a product with a matrix of taps that is the same for all pairs of halves, and a mask on the right make it exact.
Short halves are multiplied as matrices, long ones by FFT. Nothing here waits for the device, and shapes do not change
with the documents, so that plans of FFTs are found again and CUDA graphs can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ssm_tune.kernels.reference import starts_and_padding

# Halves up to this many tokens are multiplied as matrices (channels, half, 2 * half), which take 25 MB at 768 channels.
_LARGEST_PRODUCT = 64
# Numbers of u worked on at once: each copy of them takes half a GB in float32, and there are a few at a time.
_MOST_AT_ONCE = 2**27


def convolve_documents(u: Tensor, kernel: Tensor, seq_idx: Tensor) -> Tensor:
    """y_t = sum_l kernel_l u_{t-l} over the real tokens of the same document; zero for padding.

    Args:
        u: (batch, length, copies, dim), float32 or wider. kernel: (dim, taps), the same dtype.
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.

    Returns:
        The shape of u. Differentiable once in u and kernel; u itself is all that is kept for it.
    """
    return _DocumentConv.apply(u, kernel[:, : u.shape[1]], *_find_rows(seq_idx, u.shape[2], u.dtype))


class _Rows(NamedTuple):
    """The rows of a batch with their real tokens moved to the front, in order.

    Attributes:
        order, place: (batch * length,), from which token of the batch each of the moved ones comes, and the inverse.
        padding: (batch * copies, length), of the moved tokens.
        shares: (batch * copies, cuts, length), 1 where a moved token shares the document of the token before the cut
            with halves of 2^index tokens that it is next to, else 0.
    """

    order: Tensor
    place: Tensor
    padding: Tensor
    shares: Tensor


def _find_rows(seq_idx: Tensor, copies: int, dtype: torch.dtype) -> _Rows:
    batch, length = seq_idx.shape
    starts, padding = starts_and_padding(seq_idx, batch, length, seq_idx.device)
    order = padding.to(torch.uint8).argsort(dim=1, stable=True)
    place = order.argsort(dim=1)
    begin = torch.arange(batch, device=seq_idx.device)[:, None] * length
    number = starts.cumsum(1).masked_fill(padding, -1).gather(1, order)
    tokens = torch.arange(length, device=seq_idx.device)
    halves = 2 ** torch.arange((length - 1).bit_length(), device=seq_idx.device)[:, None]
    before_cut = (tokens // (2 * halves) * (2 * halves) + halves - 1).clamp(max=length - 1)
    shares = (number[:, before_cut] == number[:, None]).to(dtype)
    wide = [mask.repeat_interleave(copies, dim=0) for mask in (padding.gather(1, order), shares)]
    return _Rows((order + begin).flatten(), (place + begin).flatten(), *wide)


class _Cuts(NamedTuple):
    """Cuts of one size: `pairs` neighbours of `half` and at most as many tokens, `pair` together, from token `begin`.

    Of each, the last `left` tokens before the cut and the first `right` after it are near enough for the taps.
    """

    index: int
    begin: int
    pairs: int
    pair: int
    half: int
    left: int
    right: int

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of x (..., length), before and after the cuts: (..., pairs, left) and (..., pairs, right)."""
        pairs = x[..., self.begin : self.begin + self.pairs * self.pair].unflatten(-1, (self.pairs, self.pair))
        return pairs[..., self.half - self.left : self.half], pairs[..., self.half : self.half + self.right]


def _find_cuts(length: int, taps: int) -> Iterator[_Cuts]:
    reach = taps - 1
    for index in range((length - 1).bit_length() if reach else 0):
        half = 2**index
        whole, rest = divmod(length, 2 * half)
        left = min(half, reach)
        if whole:
            yield _Cuts(index, 0, whole, 2 * half, half, left, left)
        if rest > half:
            yield _Cuts(index, length - rest, 1, rest, half, left, min(rest - half, reach))


class _Taps:
    """What one side of a cut gives the other, kernel (dim, taps): [j, i] is tap left + i - j."""

    def __init__(self, kernel: Tensor, cuts: list[_Cuts]) -> None:
        self.kernel = kernel
        sizes = [cut.left for cut in cuts if cut.left <= _LARGEST_PRODUCT]
        self.size = max(sizes, default=0)
        self.matrix = _shift_rows(kernel[:, : 2 * self.size], self.size) if sizes else None  # [j, i] is tap i - j
        self.spectra: dict[int, Tensor] = {}

    def of(self, cut: _Cuts) -> Tensor | None:
        """(dim, left, right), or None where products of matrices are too large."""
        if self.matrix is None or cut.left > self.size:
            return None
        return self.matrix[:, : cut.left, cut.left : cut.left + cut.right]

    def spectrum(self, cut: _Cuts) -> Tensor:
        """(dim, 1, 1, left + 1), of 2 left taps: those around the cut do not come round to it again."""
        if cut.left not in self.spectra:
            self.spectra[cut.left] = torch.fft.rfft(self.kernel[:, : 2 * cut.left], n=2 * cut.left)[:, None, None]
        return self.spectra[cut.left]


def _shift_rows(kernel: Tensor, size: int) -> Tensor:
    """(dim, size, 2 size): kernel (dim, at most 2 size), each row one place further on; below the diagonal anything."""
    rows = F.pad(kernel, (0, 2 * size + 1 - kernel.shape[1]))[:, None].expand(-1, size, -1).flatten(1)
    return rows[:, : 2 * size**2].unflatten(1, (size, 2 * size))


def _forward(x: Tensor, kernel: Tensor, shares: Tensor) -> Tensor:
    """x, y: (dim, rows, length)."""
    cuts = list(_find_cuts(x.shape[-1], kernel.shape[1]))
    taps = _Taps(kernel, cuts)
    y = x * kernel[:, :1, None]
    for cut in cuts:
        before, after = cut.sides(shares[:, cut.index])
        given = cut.sides(x)[0] * before
        matrix = taps.of(cut)
        if matrix is not None:
            taken = _multiply(given, matrix)
        else:
            size = 2 * cut.left
            spectrum = torch.fft.rfft(given, n=size).mul_(taps.spectrum(cut))
            taken = torch.fft.irfft(spectrum, n=size)[..., cut.left : cut.left + cut.right]
        cut.sides(y)[1].addcmul_(taken, after)
    return y


def _backward(x: Tensor, dy: Tensor, kernel: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and kernel."""
    cuts = list(_find_cuts(x.shape[-1], kernel.shape[1]))
    taps = _Taps(kernel, cuts)
    dx = dy * kernel[:, :1, None]
    dkernel = torch.zeros_like(kernel)
    dkernel[:, 0] = torch.einsum("drl,drl->d", x, dy)
    dmatrix = kernel.new_zeros(kernel.shape[0], taps.size + 1, 2 * taps.size)
    for cut in cuts:
        before, after = cut.sides(shares[:, cut.index])
        given, taken = cut.sides(x)[0] * before, cut.sides(dy)[1] * after
        matrix = taps.of(cut)
        if matrix is not None:
            dmatrix[:, : cut.left, cut.left : cut.left + cut.right] += given.flatten(1, 2).mT @ taken.flatten(1, 2)
            back = _multiply(taken, matrix.mT)
        else:
            back, dtaps = _backward_by_fft(given, taken, taps.spectrum(cut))
            dkernel[:, : 2 * cut.left] += dtaps[:, : kernel.shape[1]]
        cut.sides(dx)[0].addcmul_(back, before)
    return dx, dkernel + _sum_diagonals(dmatrix, kernel.shape[1])


def _multiply(tokens: Tensor, matrix: Tensor) -> Tensor:
    """tokens (dim, rows, pairs, j), matrix (dim, j, i): (dim, rows, pairs, i)."""
    if matrix.shape[1:] == (1, 1):
        return tokens * matrix[:, None]
    return (tokens.flatten(1, 2) @ matrix).unflatten(1, tokens.shape[1:3])


def _backward_by_fft(given: Tensor, taken: Tensor, spectrum: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of what is given (dim, rows, pairs, left), and of the taps (dim, 2 left)."""
    left = given.shape[-1]
    # `taken` stands `left` tokens into the pair: half of a turn more for each frequency.
    turn = 1 - 2 * (torch.arange(left + 1, device=given.device) % 2).to(given.dtype)
    dspectrum = torch.fft.rfft(taken, n=2 * left).mul_(turn)
    back = torch.fft.irfft(dspectrum * spectrum.conj(), n=2 * left)[..., :left]
    dtaps = dspectrum.mul_(torch.fft.rfft(given, n=2 * left).conj_physical_()).sum((1, 2))
    return back, torch.fft.irfft(dtaps, n=2 * left)


def _sum_diagonals(matrix: Tensor, taps: int) -> Tensor:
    """sum_j matrix[:, j, j + l] for l < taps: matrix (dim, size + 1, 2 size), zero below its diagonal and last."""
    dim, rows, width = matrix.shape
    skewed = matrix.as_strided((dim, rows - 1, width), (rows * width, width + 1, 1))
    return F.pad(skewed.sum(1)[:, :taps], (0, max(taps - width, 0)))


class _DocumentConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(u, kernel, *rows)
        order, place, padding, shares = rows
        x = _move(u, order)
        y = torch.empty_like(x)
        for part in _parts(u):
            channels = _channels_first(x[..., part], padding)
            _put_channels_last(_forward(channels, kernel[part], shares), y[..., part])
        return _move(y, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, kernel, order, place, padding, shares = ctx.saved_tensors
        x, dy = _move(u, order), _move(dy, order)
        dx, dkernel = torch.empty_like(x), torch.empty_like(kernel)
        for part in _parts(u):
            channels = (_channels_first(tensor[..., part], padding) for tensor in (x, dy))
            dchannels, dkernel[part] = _backward(*channels, kernel[part], shares)
            _put_channels_last(dchannels, dx[..., part])
        return _move(dx, place), dkernel, None, None, None, None


def _parts(u: Tensor) -> list[slice]:
    """Channels of u (batch, length, copies, dim) to be worked on at once."""
    dim = u.shape[3]
    size = max(_MOST_AT_ONCE * dim // max(u.numel(), 1), 1)
    return [slice(begin, begin + size) for begin in range(0, dim, size)]


def _move(u: Tensor, order: Tensor) -> Tensor:
    """u (batch, length, ...) with its tokens in another order."""
    return u.flatten(0, 1).index_select(0, order).view(u.shape)


def _channels_first(u: Tensor, padding: Tensor) -> Tensor:
    """A copy of u (batch, length, copies, dim) as (dim, batch * copies, length), zero for padding."""
    first = u.new_empty(u.shape[3], u.shape[0], u.shape[2], u.shape[1])
    first.copy_(u.permute(3, 0, 2, 1))
    return first.flatten(1, 2).masked_fill_(padding, 0.0)


def _put_channels_last(x: Tensor, out: Tensor) -> None:
    """Back again, into `out`."""
    batch, length, copies, dim = out.shape
    out.copy_(x.view(dim, batch, copies, length).permute(1, 3, 2, 0))
