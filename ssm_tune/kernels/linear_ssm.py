"""The two time-invariant state-space models of H3, as long convolutions, and their step forms: shift and diagonal.

Hungry Hungry Hippos (Fu et al., 2023), section 3.2 (shift) and S4D (Gu et al., 2022), section 3 (diagonal), with the
published code's parameters. Inputs are (batch, length, copies, dim): one system for each of dim, used by all copies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.long_conv import Documents, find_documents, long_conv
from ssm_tune.kernels.reference import PADDING


class DiagonalSSM(NamedTuple):
    """A system of complex diagonal A; each of its states stands for itself and its conjugate.

    Attributes:
        log_dt: (dim,). inv_A_real, A_imag: (dim, state / 2): A = -exp(inv_A_real) + i A_imag.
        B, C: (dim, state / 2, 2), real and imaginary parts.
    """

    log_dt: Tensor
    inv_A_real: Tensor
    A_imag: Tensor
    B: Tensor
    C: Tensor

    def discretize(self) -> tuple[Tensor, Tensor, Tensor]:
        """dA, dB and C (dim, state / 2), complex, by the bilinear rule (S4D, eq. 4)."""
        log_dt, inv_A_real, A_imag, B, C = (part.to(_wide(part.dtype)) for part in self)
        A = torch.complex(-torch.exp(inv_A_real), A_imag)
        dt = torch.exp(log_dt)[:, None]
        half = A * dt / 2
        dB = torch.view_as_complex(B.contiguous()) * dt / (1 - half)
        return (1 + half) / (1 - half), dB, torch.view_as_complex(C.contiguous())


def diagonal_scan(
    u: Tensor,
    system: DiagonalSSM,
    *,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = dA h_{t-1} + dB u_t, y_t = 2 Re(C h_t).

    Args:
        u: (batch, length, copies, dim).
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.
        initial_state: (batch, copies, dim, state / 2, 2), float32: before the first token, real and imaginary parts.
        return_final_state: also give the state after the last real token.

    Returns:
        y, the shape of u, float32 or wider, or (y, final state). Differentiable in everything.
    """
    with torch.autocast(u.device.type, enabled=False):
        dA, dB, C = system.discretize()
        length = u.shape[1]
        powers = _Powers(dA, length)
        y = long_conv(u, 2 * powers.combine(dB * C).real, seq_idx)
        if initial_state is None and not return_final_state:
            return y
        documents = find_documents(seq_idx, u.shape[0], length, u.device)
        state = None if initial_state is None else torch.view_as_complex(initial_state.to(y.dtype).contiguous())
        if state is not None:
            answer = 2 * powers.combine(state * dA * C).real  # (batch, copies, dim, length)
            y = y + _take_places(answer.movedim(-1, 1), documents)
        if not return_final_state:
            return y
        final = powers.sum_up(_reversed_last(u.to(y.dtype), documents)) * dB
        if state is not None:
            final = final + _carry(state, dA, documents)
        return y, torch.view_as_real(final)


def diagonal_step(u: Tensor, system: DiagonalSSM, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of `diagonal_scan`: u (batch, copies, dim); y of that shape, and the new state."""
    with torch.autocast(u.device.type, enabled=False):
        dA, dB, C = system.discretize()
        wide = dA.real.dtype
        after = dA * torch.view_as_complex(state.to(wide).contiguous()) + dB * u.to(wide)[..., None]
        return 2 * (C * after).real.sum(-1), torch.view_as_real(after)


def shift_scan(
    u: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = S h_{t-1} + B u_t, y_t = C h_t, where S moves every entry one place on: a convolution of `state` taps.

    Args:
        u: (batch, length, copies, dim). B, C: (dim, state). seq_idx: as in `diagonal_scan`.
        initial_state: (batch, copies, dim, state - 1): the inputs before the first token, the newest last.
        return_final_state: also give the last state - 1 real inputs of the last document, same shape.

    Returns:
        y, the shape of u, float32 or wider, or (y, final inputs). Differentiable in everything.
    """
    with torch.autocast(u.device.type, enabled=False):
        taps = shift_taps(B, C)
        u = u.to(_wide(u.dtype))
        if initial_state is None:
            whole, borders, begin = u, seq_idx, 0
        else:
            before = initial_state.to(u.dtype).movedim(-1, 1)
            whole, begin = torch.cat([before, u], dim=1), before.shape[1]
            borders = None if seq_idx is None else torch.cat([_first_document(seq_idx, begin), seq_idx], dim=1)
        y = long_conv(whole, taps, borders)[:, begin:]
        if not return_final_state:
            return y
        documents = find_documents(borders, whole.shape[0], whole.shape[1], u.device)
        width = taps.shape[1] - 1
        newest_first = _reversed_last(whole, documents)[:, :width]
        newest_first = F.pad(newest_first, (0, 0, 0, 0, 0, width - newest_first.shape[1]))
        return y, newest_first.flip(1).movedim(1, -1)


def shift_step(u: Tensor, B: Tensor, C: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """One token of `shift_scan`: u (batch, copies, dim); y of that shape, and the new inputs."""
    with torch.autocast(u.device.type, enabled=False):
        seen = torch.cat([inputs, u.to(inputs.dtype)[..., None]], dim=-1)
        taps = shift_taps(B, C).flip(-1)
        return (seen.to(taps.dtype) * taps).sum(-1), seen[..., 1:]


def shift_taps(B: Tensor, C: Tensor) -> Tensor:
    """The convolution of a shift system, (dim, state): tap l is sum_i B_i C_{i+l}."""
    B, C = B.to(_wide(B.dtype)), C.to(_wide(C.dtype))
    state = B.shape[-1]
    size = 2 * state
    return torch.fft.irfft(torch.fft.rfft(B, n=size).conj() * torch.fft.rfft(C, n=size), n=size)[..., :state]


class _Powers:
    """dA^l for l < length, as products dA^(c i) dA^j of two short lists, which need little memory."""

    def __init__(self, dA: Tensor, length: int) -> None:
        self.length = length
        self.step = math.isqrt(max(length - 1, 0)) + 1
        log_dA = torch.log(dA.to(torch.complex128))[..., None]
        counts = torch.arange(self.step, device=dA.device, dtype=torch.float64)
        self.fine = _exp(log_dA * counts, dA.dtype)  # (dim, state / 2, step)
        self.coarse = _exp(log_dA * counts * self.step, dA.dtype)

    def combine(self, weight: Tensor) -> Tensor:
        """sum_n weight_n dA_n^l: weight (..., dim, state / 2) -> (..., dim, length)."""
        return ((weight[..., None] * self.coarse).transpose(-1, -2) @ self.fine).flatten(-2)[..., : self.length]

    def sum_up(self, u: Tensor) -> Tensor:
        """sum_l dA_n^l u_l: u (batch, length, copies, dim) -> (batch, copies, dim, state / 2)."""
        u = F.pad(u, (0, 0, 0, 0, 0, self.step**2 - u.shape[1])).unflatten(1, (self.step, self.step))
        inner = torch.einsum("bijcd,dnj->bicdn", u.to(self.fine.dtype), self.fine)
        return torch.einsum("bicdn,dni->bcdn", inner, self.coarse)


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of complex128, in `dtype`. In float32 an angle of hundreds of turns would have an error that shows: whole
    turns are taken off before."""
    angle = exponent.imag.remainder(2 * math.pi)
    return torch.exp(torch.complex(exponent.real, angle).to(dtype))


def _take_places(answer: Tensor, documents: Documents) -> Tensor:
    """answer (batch, place, copies, dim) at each token of the first document, zero at other tokens."""
    index = documents.place.clamp(min=0)[..., None, None].expand(-1, -1, *answer.shape[2:])
    return answer.gather(1, index) * documents.first[..., None, None]


def _reversed_last(u: Tensor, documents: Documents) -> Tensor:
    """The real tokens of the last document of each row, the newest first, then zeros: the shape of u."""
    index = documents.left[..., None, None].expand_as(u)
    return torch.zeros_like(u).scatter_add(1, index, u * documents.last[..., None, None])


def _carry(state: Tensor, dA: Tensor, documents: Documents) -> Tensor:
    """What is left after the row of the state before it: all forgotten where another document has begun."""
    count = documents.real.sum(1)
    stays = (documents.first.sum(1) == count).view(-1, 1, 1, 1)
    return state * torch.exp(torch.log(dA) * count.view(-1, 1, 1, 1)) * stays


def _first_document(seq_idx: Tensor, length: int) -> Tensor:
    """(batch, length): for tokens before the row, the number of its first real token's document; 0 if none is real."""
    first = (seq_idx != PADDING).int().argmax(1, keepdim=True)
    return seq_idx.gather(1, first).clamp(min=0).expand(-1, length)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
