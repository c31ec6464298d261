"""Readable PyTorch of every operation, one token at a time: the truth that the fast backends are tested against.

Nothing here is clever. Every function takes the arguments of the public function of the same name, works on any
device and in any floating dtype (float64 included), is differentiable by autograd, and serves where no fast backend
does.

Documents. `seq_idx` (batch, length) numbers the documents of a row. At a token whose document differs from that of
the real token before it, the state (and the window of the convolution) starts from zero; the first document of a row
continues `initial_state`. A token marked -1 is padding: it is as if it were not there. Its output is zero, nothing of
it enters the state, no gradient reaches it, and the state passes through, so that a final state is the state after
the last real token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = -1


def starts_and_padding(seq_idx: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two bool masks (batch, length): tokens where the state is set to zero first, and tokens that are padding.

    Computed without looking at values from Python, so that no device has to be waited for.
    """
    if seq_idx is None:
        nothing = torch.zeros(batch, length, dtype=torch.bool, device=device)
        return nothing, nothing
    padding = seq_idx == PADDING
    places = torch.arange(length, device=seq_idx.device).expand(batch, length)
    # The place of the last real token at or before each token, then of the one strictly before it; -1: there is none.
    last_real = places.masked_fill(padding, -1).cummax(dim=1).values
    before = F.pad(last_real[:, :-1], (1, 0), value=-1)
    document_before = seq_idx.gather(1, before.clamp(min=0))
    starts = ~padding & (before >= 0) & (document_before != seq_idx)
    return starts, padding


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def time_step(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, limit: tuple[float, float]) -> Tensor:
    """dt as the recurrence uses it: + bias, softplus, clamped to `limit`; in the accumulator's dtype."""
    dt = dt.to(_accumulator(dt.dtype))
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    if tuple(limit) != (0.0, math.inf):
        dt = dt.clamp(*limit)
    return dt


def _as_mask(tokens: Tensor, like: Tensor) -> Tensor:
    """A mask of one token per row (batch,) shaped to broadcast over `like` (batch, ...)."""
    return tokens.view(-1, *[1] * (like.dim() - 1))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t (Mamba, eq. 2 and algorithm 2)."""
    batch, length, dim = x.shape
    wide = _accumulator(x.dtype)
    starts, padding = starts_and_padding(seq_idx, batch, length, x.device)
    state = x.new_zeros(batch, dim, A.shape[-1], dtype=wide) if initial_state is None else initial_state.to(wide)
    outputs = []
    for t in range(length):
        before = torch.where(_as_mask(starts[:, t], state), 0, state)
        y, after = _selective_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], before, D, dt_bias, dt_softplus)
        if z is not None:
            y = y * F.silu(z[:, t].to(wide))
        state = torch.where(_as_mask(padding[:, t], state), state, after)
        outputs.append(torch.where(_as_mask(padding[:, t], y), 0, y))
    y = torch.stack(outputs, dim=1).to(x.dtype)
    return (y, state) if return_final_state else y


def _selective_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """One token: y (batch, dim) before the gate, and the new state (batch, dim, state), in float32 or wider."""
    wide = _accumulator(state.dtype)
    dt = time_step(dt, dt_bias, dt_softplus, (0.0, math.inf)).to(wide)
    x = x.to(wide)
    decay = torch.exp(dt[..., None] * A.to(wide))
    state = decay * state + (dt * x)[..., None] * B.to(wide)[:, None, :]
    y = (state * C.to(wide)[:, None, :]).sum(-1)
    return (y if D is None else y + D.to(wide) * x), state


def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
) -> Tensor:
    """One token of `selective_scan`: x, dt, z (batch, dim), B, C (batch, state); `state` is updated in place."""
    y, after = _selective_step(x, dt, A, B, C, state, D, dt_bias, dt_softplus)
    state.copy_(after)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return y.to(x.dtype)


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
    """The same with a scalar A per head (Mamba-2, section 6, as a recurrence). `chunk_size` changes nothing here."""
    batch, length, heads, head_dim = x.shape
    wide = _accumulator(x.dtype)
    starts, padding = starts_and_padding(seq_idx, batch, length, x.device)
    if initial_state is None:
        state = x.new_zeros(batch, heads, head_dim, B.shape[-1], dtype=wide)
    else:
        state = initial_state.to(wide)
    outputs = []
    for t in range(length):
        before = torch.where(_as_mask(starts[:, t], state), 0, state)
        y, after = _ssd_step(x[:, t], dt[:, t], A, B[:, t], C[:, t], before, D, dt_bias, dt_softplus, dt_limit)
        state = torch.where(_as_mask(padding[:, t], state), state, after)
        outputs.append(torch.where(_as_mask(padding[:, t], y), 0, y))
    y = torch.stack(outputs, dim=1).to(x.dtype)
    return (y, state) if return_final_state else y


def _ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """One token: y (batch, heads, head_dim) and the new state (batch, heads, head_dim, state), in float32 or wider."""
    wide = _accumulator(state.dtype)
    heads_per_group = x.shape[1] // B.shape[1]
    B = B.to(wide).repeat_interleave(heads_per_group, dim=1)
    C = C.to(wide).repeat_interleave(heads_per_group, dim=1)
    dt = time_step(dt, dt_bias, dt_softplus, dt_limit).to(wide)
    x = x.to(wide)
    decay = torch.exp(dt * A.to(wide))
    state = decay[..., None, None] * state + (dt[..., None] * x)[..., None] * B[:, :, None, :]
    y = (state * C[:, :, None, :]).sum(-1)
    if D is not None:
        y = y + (D.to(wide) if D.dim() == 2 else D.to(wide)[:, None]) * x
    return y, state


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """One token of `ssd_scan`: x (batch, heads, head_dim), dt (batch, heads), B, C (batch, groups, state)."""
    y, after = _ssd_step(x, dt, A, B, C, state, D, dt_bias, dt_softplus, dt_limit)
    state.copy_(after)
    return y.to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution over the last `width` tokens of the same document, then silu or nothing."""
    batch, length, dim = x.shape
    width = weight.shape[-1]
    starts, padding = starts_and_padding(seq_idx, batch, length, x.device)
    window = x.new_zeros(batch, dim, width - 1) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        before = torch.where(_as_mask(starts[:, t], window), 0, window)
        seen = torch.cat([before, x[:, t, :, None].to(window.dtype)], dim=-1)
        y = _convolve(seen, weight, bias, activation, x.dtype)
        window = torch.where(_as_mask(padding[:, t], window), window, seen[..., 1:])
        outputs.append(torch.where(_as_mask(padding[:, t], y), 0, y))
    y = torch.stack(outputs, dim=1)
    return (y, window) if return_final_state else y


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype) -> Tensor:
    """The output (batch, dim) at the newest of the tokens `seen` (batch, dim, width)."""
    wide = _accumulator(dtype)
    y = (seen.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation == "silu" else y).to(dtype)


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """One token of `causal_conv1d`: x (batch, dim), `state` (batch, dim, width - 1), newest last, updated in place."""
    seen = torch.cat([state, x[..., None].to(state.dtype)], dim=-1)
    state.copy_(seen[..., 1:])
    return _convolve(seen, weight, bias, activation, x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019, eq. 4)."""
    wide = x.to(_accumulator(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def rms_norm_parts(x: Tensor, sizes: Sequence[int], eps: float) -> tuple[Tensor, ...]:
    """rms_norm of each part of x by itself, without weights."""
    return tuple(rms_norm(part, part.new_ones(part.shape[-1]), eps) for part in x.split(list(sizes), dim=-1))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(residual + x); `residual` is updated in place."""
    residual.copy_(residual.to(_accumulator(residual.dtype)) + x)
    return rms_norm(residual, weight, eps).to(x.dtype)


def residual_rms_norm(
    stream: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """rms_norm(stream + x) in `dtype` (None: the stream's), and the sum, rounded to the stream's dtype."""
    wide = stream.to(_accumulator(stream.dtype))
    total = stream if x is None else (wide + x).to(stream.dtype)
    return rms_norm(total.to(wide.dtype), weight, eps).to(dtype or stream.dtype), total


def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None = None, norm_before_gate: bool = False
) -> Tensor:
    """rms_norm(y * silu(z)), or rms_norm(y) * silu(z), over groups of `group_size` channels (None: all of them)."""
    wide = y.to(_accumulator(y.dtype))
    gate = F.silu(z.to(wide.dtype))
    if not norm_before_gate:
        wide = wide * gate
    grouped = wide.unflatten(-1, (-1, group_size or y.shape[-1]))
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    normed = normed.flatten(-2) * weight.to(wide.dtype)
    return (normed * gate if norm_before_gate else normed).to(y.dtype)


@torch.no_grad()
def low_rank_product(x: Tensor, A: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """h = scale * x @ A', rounded to the dtype of x, and h @ B'."""
    wide, A, B = (tensor.to(_accumulator(tensor.dtype)) for tensor in (x, A, B))
    h = (scale * wide @ A.t()).to(x.dtype)
    return h, (h.to(B.dtype) @ B.t()).to(x.dtype)


@torch.no_grad()
def narrow_weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """dy' @ x in `dtype`."""
    wide, x = (tensor.to(_accumulator(tensor.dtype)) for tensor in (dy, x))
    return (wide.t() @ x).to(dtype)


@torch.no_grad()
def low_rank_gradients(
    dy: Tensor, B: Tensor, h: Tensor, scale: float, dtype: torch.dtype = torch.float32, A: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dh = scale * dy @ B, rounded to the dtype of dy, dy' @ h in `dtype`, and dh @ A."""
    wide, B, h = (tensor.to(_accumulator(tensor.dtype)) for tensor in (dy, B, h))
    dh, dB = (scale * wide @ B).to(dy.dtype), (wide.t() @ h).to(dtype)
    return dh, dB, None if A is None else (dh.to(wide.dtype) @ A.to(wide.dtype)).to(dy.dtype)


def ssd_block(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None = None,
    *,
    head_dim: int,
    groups: int,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    chunk_size: int = 256,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Mamba-2's mixer between its projections (Mamba-2, figure 6). See `ssm_tune.kernels.ssd_block`."""
    heads, channels = len(A), len(conv_weight)
    dim = heads * head_dim
    states = (channels - dim) // 2
    z, xBC, dt = projected.split([dim, channels, heads], dim=-1)
    x, B, C = causal_conv1d(xBC, conv_weight, conv_bias, seq_idx=seq_idx).split([dim, states, states], dim=-1)
    x, B, C = x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    y = ssd_scan(x, dt, A, B, C, D, dt_bias, dt_limit=dt_limit, seq_idx=seq_idx).flatten(-2)
    if norm_weight is None:
        return y * F.silu(z)
    return gated_rms_norm(y, z, norm_weight, eps, group_size, norm_before_gate)
