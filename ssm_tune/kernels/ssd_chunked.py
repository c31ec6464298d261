"""Mamba-2's scan in chunks of matrix products, in plain PyTorch: any device, any floating dtype, autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.reference import starts_and_padding, time_step

# Work within a chunk grows with its square. On CPUs 64 was fastest at 8 heads of 64 channels and 64 states.
_LONGEST_CHUNK = 64


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.ssd_scan` by block decomposition (Mamba-2, section 6, listing 1).

    A chunk's output is what its own tokens give, a masked product of matrices, plus what the state before it gives.
    Only the states between chunks are computed one after the other. Masks keep documents apart: a token sees those
    before it that have the same number of document starts behind them.
    """
    batch, length, heads, head_dim = x.shape
    groups = B.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    values, B, C = x.to(wide), B.to(wide), C.to(wide)
    starts, padding = starts_and_padding(seq_idx, batch, length, x.device)
    if seq_idx is not None:
        # Whatever stands in padding is not looked at, not even by a derivative; it takes no time and brings nothing.
        values, B, C = (t.masked_fill(padding[..., None, None], 0.0) for t in (values, B, C))
        dt = time_step(dt.masked_fill(padding[..., None], 0.0), dt_bias, dt_softplus, dt_limit)
        dt = dt.masked_fill(padding[..., None], 0.0)
    else:
        dt = time_step(dt, dt_bias, dt_softplus, dt_limit)
    dt = dt.to(wide)
    size = min(chunk_size, _LONGEST_CHUNK, length)
    entering = _chunks(values * dt[..., None], size).unflatten(3, (groups, -1))
    entering = entering.permute(0, 1, 3, 4, 2, 5)
    B, C = (_chunks(t, size).transpose(2, 3) for t in (B, C))
    # In float64: sums of a chunk's decays are large where heads forget fast, and only their small differences count.
    decay = _chunks(dt.double() * A.double(), size).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2).cumsum(-1)
    reach = _Reach(starts, size) if seq_idx is not None else None
    first = values.new_zeros(batch, heads, head_dim, B.shape[-1]) if initial_state is None else initial_state.to(wide)
    before, last = _states_between(entering, decay, B, first, reach)
    y = _within_chunks(entering, decay, B, C, reach) + _from_before(before, decay, C, reach)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, head_dim)[:, :length]
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).to(wide) * values
    if seq_idx is not None:
        y = y.masked_fill(padding[..., None, None], 0.0)
    return (y.to(x.dtype), last) if return_final_state else y.to(x.dtype)


# Shapes below: entering (batch, chunks, groups, heads of a group, size, head_dim), the inputs dt * x; decay, the same
# without head_dim, the sums of dt * A from the start of the chunk; B, C (batch, chunks, groups, size, state); states
# between chunks (batch, chunks, groups, heads of a group, head_dim, state).


class _Reach:
    """Which tokens of a chunk see which: those with as many starts of documents behind them."""

    def __init__(self, starts: Tensor, size: int) -> None:
        document = starts.cumsum(1)
        short = -document.shape[1] % size
        # The tokens that fill up the last chunk belong to its last document, so that its state reaches the end.
        document = torch.cat([document, document[:, -1:].expand(-1, short)], dim=1).unflatten(1, (-1, size))
        last = document[..., -1]
        before = F.pad(last[:, :-1], (1, 0))
        self.each_other = (document[..., :, None] == document[..., None, :])[:, :, None, None]
        self.the_end = (document == last[..., None])[:, :, None, None]
        self.from_before = (document == before[..., None])[:, :, None, None]
        self.through = (before == last)[:, :, None, None]


def _chunks(tensor: Tensor, size: int) -> Tensor:
    """(batch, length, ...) to (batch, chunks, size, ...), filled up with zeros: no time, no input."""
    short = -tensor.shape[1] % size
    if short:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, short))
    return tensor.unflatten(1, (-1, size))


def _states_between(
    entering: Tensor, decay: Tensor, B: Tensor, first: Tensor, reach: _Reach | None
) -> tuple[Tensor, Tensor]:
    """The state before every chunk, and the one after the last (batch, heads, head_dim, state)."""
    total = decay[..., -1]
    to_end, through = torch.exp((total[..., None] - decay).to(B.dtype)), torch.exp(total.to(B.dtype))
    if reach is not None:
        to_end, through = to_end * reach.the_end, through * reach.through
    brought = (entering * to_end[..., None]).transpose(-1, -2) @ B[:, :, :, None]
    state = first.unflatten(1, (B.shape[2], -1))
    before = []
    for chunk in range(decay.shape[1]):
        before.append(state)
        state = through[:, chunk, ..., None, None] * state + brought[:, chunk]
    return torch.stack(before, dim=1), state.flatten(1, 2)


def _within_chunks(entering: Tensor, decay: Tensor, B: Tensor, C: Tensor, reach: _Reach | None) -> Tensor:
    """What the tokens of a chunk give each other: y_i = sum over j <= i of exp(decay_i - decay_j) (C_i B_j) x_j."""
    size = decay.shape[-1]
    sees = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    if reach is not None:
        sees = sees & reach.each_other
    # Above the diagonal the difference is positive: exp would overflow there, and its gradient be NaN, masked or not.
    differences = (decay[..., :, None] - decay[..., None, :]).to(B.dtype)
    weights = torch.exp(differences.masked_fill(~sees, -math.inf))
    return (weights * (C @ B.transpose(-1, -2))[:, :, :, None]) @ entering


def _from_before(before: Tensor, decay: Tensor, C: Tensor, reach: _Reach | None) -> Tensor:
    """What the state before a chunk gives its tokens: y_i = exp(decay_i) C_i h."""
    fading = torch.exp(decay.to(C.dtype))
    if reach is not None:
        fading = fading * reach.from_before
    return (C[:, :, :, None] @ before.transpose(-1, -2)) * fading[..., None]
