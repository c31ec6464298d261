"""Mamba-3's scan in chunks of tokens, as matrix products, in PyTorch: any device, SISO and MIMO, documents and states.

Within a chunk it is masked attention, between chunks a recurrence (Mamba-2, section 6; Mamba-3, section 3.1). What a
token adds at the next one (the trapezoid's other half) is added to its own weight, for all later tokens at once:

    h_t q_t = sum_{s < t} exp(a_{s+1} + ... + a_t) (gamma_s + beta_{s+1}) (q_t k_s) x_s + gamma_t (q_t k_t) x_t

with a_t = dt_t A_t, gamma_t = lambda_t dt_t, beta_t = (1 - lambda_t) dt_t.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.mamba3 import (
    Mamba3Inputs,
    Mamba3State,
    MimoFactors,
    empty_state,
    gate_output,
    per_head,
    rotate,
)
from ssm_tune.kernels.reference import starts_and_padding


class _Row(NamedTuple):
    """A row of tokens, prepared: q, k, x (batch, length, rank, heads, ...); weights (batch, length, heads)."""

    q: Tensor
    k: Tensor
    x: Tensor
    log_decay: Tensor
    gamma: Tensor
    later: Tensor  # gamma and the beta of the next token; where that begins a document, nothing reaches it
    document: Tensor  # (batch, length), counts up where the state is set to zero


def mamba3_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    trap: Tensor,
    B: Tensor,
    C: Tensor,
    angles: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    mimo: MimoFactors | None = None,
    *,
    chunk_size: int = 64,
    seq_idx: Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    """As `kernels.mamba3.mamba3_scan`."""
    inputs = Mamba3Inputs(x, dt, A, trap, B, C, angles, z)
    with torch.autocast(x.device.type, enabled=False):
        batch, length = x.shape[:2]
        starts, padding = starts_and_padding(seq_idx, batch, length, inputs.x.device)
        before = empty_state(inputs) if initial_state is None else initial_state
        wide = before.ssm.dtype
        angle = _angles(inputs, before, starts, padding)
        row, beta = _prepare(inputs, B_bias, C_bias, mimo, angle, starts, padding)
        ssm = before.ssm.to(wide)
        if initial_state is not None:
            ssm = ssm + _unfinished(before, beta, padding, mimo)
        chunk = max(1, min(chunk_size // row.q.shape[2], length))
        y, ssm = _scan_chunks(row, ssm, chunk)
        y = y + D.to(wide)[:, None] * row.x
        y = gate_output(y, inputs.z, mimo).to(inputs.x.dtype)
        if seq_idx is not None:
            y = y.masked_fill(padding.view(batch, length, *[1] * (y.dim() - 2)), 0)
        if not return_final_state:
            return y
        return y, _final_state(inputs, row, angle, ssm, before, padding)


def _angles(inputs: Mamba3Inputs, before: Mamba3State, starts: Tensor, padding: Tensor) -> Tensor:
    """theta (batch, length, heads, angles), modulo 2 pi; summed in float64, which long rows need."""
    steps = torch.pi * inputs.dt.double()[..., None] * torch.tanh(inputs.angles.double())[:, :, None]
    total = steps.masked_fill(padding[..., None, None], 0).cumsum(1)
    places = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    began = places.masked_fill(~starts, -1).cummax(1).values  # where each token's document began; -1: before the row
    place = began.clamp(min=0)[..., None, None].expand_as(total)
    base = torch.where((began < 0)[..., None, None], -before.angle.double()[:, None], (total - steps).gather(1, place))
    return torch.remainder(total - base, 2 * torch.pi).to(before.ssm.dtype)


def _prepare(
    inputs: Mamba3Inputs,
    B_bias: Tensor,
    C_bias: Tensor,
    mimo: MimoFactors | None,
    angle: Tensor,
    starts: Tensor,
    padding: Tensor,
) -> tuple[_Row, Tensor]:
    """The row, and beta (batch, length, heads)."""
    wide = angle.dtype
    pairs = mimo is None
    x = inputs.x.to(wide)[:, :, None]
    if mimo is not None:
        x = x * mimo.x.to(wide).transpose(0, 1)
    dt = inputs.dt.to(wide).masked_fill(padding[..., None], 0)
    gamma = torch.sigmoid(inputs.trap.to(wide)) * dt
    beta = dt - gamma
    # What a token adds at the next real one; padding between them is as if it were not there.
    previous = _previous_real(padding)
    target = previous.clamp(min=0)[..., None].expand_as(beta)
    later = gamma.scatter_add(1, target, beta.masked_fill((previous < 0)[..., None], 0))
    row = _Row(
        q=rotate(per_head(inputs.C, C_bias), angle[:, :, None], pairs),
        k=rotate(per_head(inputs.B, B_bias), angle[:, :, None], pairs),
        x=x,
        log_decay=dt * inputs.A.to(wide),
        gamma=gamma,
        later=later,
        document=starts.cumsum(1),
    )
    return row, beta


def _previous_real(padding: Tensor) -> Tensor:
    """(batch, length): the place of the last real token strictly before each token, -1 if there is none."""
    places = torch.arange(padding.shape[1], device=padding.device).expand_as(padding)
    last = places.masked_fill(padding, -1).cummax(1).values
    return F.pad(last[:, :-1], (1, 0), value=-1)


def _unfinished(before: Mamba3State, beta: Tensor, padding: Tensor, mimo: MimoFactors | None) -> Tensor:
    """What the last token before the row adds at the first real one: (batch, heads, head_dim, state)."""
    first = (~padding).int().argmax(1)[:, None, None].expand(-1, 1, beta.shape[2])
    weight = beta.gather(1, first)[:, 0]  # padding has a beta of zero
    x = before.x.to(beta.dtype)[:, None]
    if mimo is not None:
        x = x * mimo.x.to(beta.dtype).transpose(0, 1)
    return torch.einsum("brhp,brhn,bh->bhpn", x, before.k.to(beta.dtype), weight)


def _scan_chunks(row: _Row, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """y (batch, length, rank, heads, head_dim) without the skip, and the state after the row."""
    length = row.q.shape[1]
    short = -length % chunk
    if short:
        document = F.pad(row.document.unsqueeze(-1), (0, 0, 0, short), mode="replicate").squeeze(-1)
        padded = (F.pad(part, (0, 0) * (part.dim() - 2) + (0, short)) for part in row[:-1])
        row = _Row(*padded, document)
    # (batch, chunks, heads, chunk * rank, ...) for tokens and ranks, (batch, chunks, heads, chunk) for weights
    q, k, x = (part.unflatten(1, (-1, chunk)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4) for part in row[:3])
    log_decay, gamma, later = (part.unflatten(1, (-1, chunk)).transpose(2, 3) for part in row[3:6])
    document = row.document.unflatten(1, (-1, chunk))
    rank = q.shape[3] // chunk

    same = document[..., :, None] == document[..., None, :]
    before = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril(-1)
    weights = torch.exp(_segment_sums(log_decay)) * later[..., None, :]
    weights = weights.masked_fill(~(same & before)[:, :, None], 0) + torch.diag_embed(gamma)
    weights = weights.repeat_interleave(rank, dim=-2).repeat_interleave(rank, dim=-1)
    y = (q @ k.transpose(-1, -2) * weights) @ x

    since_begin = log_decay.cumsum(-1)
    to_end = torch.exp(since_begin[..., -1:] - since_begin) * later
    to_end = to_end.masked_fill((document != document[..., -1:])[:, :, None], 0).repeat_interleave(rank, dim=-1)
    added = (x * to_end[..., None]).transpose(-1, -2) @ k  # (batch, chunks, heads, head_dim, state)
    entry = F.pad(document[:, :-1, -1], (1, 0))  # the document that the state belongs to when a chunk begins
    carried = torch.exp(since_begin[..., -1]).masked_fill((document[..., -1] != entry)[..., None], 0)
    states = []
    for index in range(q.shape[1]):
        states.append(state)
        state = carried[:, index, :, None, None] * state + added[:, index]
    reach = torch.exp(since_begin).masked_fill((document != entry[..., None])[:, :, None], 0)
    reach = reach.repeat_interleave(rank, dim=-1)
    y = y + (q @ torch.stack(states, dim=1).transpose(-1, -2)) * reach[..., None]
    y = y.unflatten(3, (chunk, rank)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2)
    return y[:, :length], state


def _segment_sums(a: Tensor) -> Tensor:
    """(..., length, length): a_{j+1} + ... + a_i below the diagonal; none is a difference of larger sums."""
    length = a.shape[-1]
    spread = a[..., :, None].expand(*a.shape, length)
    below = torch.ones(length, length, dtype=torch.bool, device=a.device).tril(-1)
    return spread.masked_fill(~below, 0).cumsum(-2)


def _final_state(
    inputs: Mamba3Inputs, row: _Row, angle: Tensor, ssm: Tensor, before: Mamba3State, padding: Tensor
) -> Mamba3State:
    """The state after the last real token; what was before where a row has none."""
    places = torch.arange(padding.shape[1], device=padding.device)
    last = places.expand_as(padding).masked_fill(padding, -1).amax(1)
    rows = torch.arange(last.shape[0], device=last.device)
    place = last.clamp(min=0)
    x = inputs.x.to(ssm.dtype)
    after = Mamba3State(angle[rows, place], ssm, row.k[rows, place], x[rows, place])
    none = last < 0
    parts = zip(before, after, strict=True)
    return Mamba3State(
        *(torch.where(none.view(-1, *[1] * (new.dim() - 1)), old.to(new.dtype), new) for old, new in parts)
    )
