"""Mamba-3's scan and its step form: one signature, backends behind it.

The recurrence (Mamba-3, sections 3.1 to 3.3) of one head; alpha_t = exp(dt_t A_t), lambda_t = sigmoid(trap_t):

    theta_t = theta_{t-1} + pi dt_t tanh(angles_t)                      one angle for each pair of state channels
    k_t, q_t = R(theta_t) (B_t + B_bias), R(theta_t) (C_t + C_bias)     R turns pairs of channels
    h_t = alpha_t h_{t-1} + alpha_t (1 - lambda_t) dt_t x_{t-1} k_{t-1}^T + lambda_t dt_t x_t k_t^T
    y_t = h_t q_t + D x_t

With rank > 1 (MIMO) there are `rank` of k, q and, by element-wise factors, of x, z and y for each token and head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels import backends


class Mamba3State(NamedTuple):
    """What the next token needs of all tokens before it; float32.

    Attributes:
        angle: (batch, heads, angles), theta, modulo 2 pi.
        ssm: (batch, heads, head_dim, state), h.
        k: (batch, rank, heads, state), the last k, turned. x: (batch, heads, head_dim), the last x.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    x: Tensor


class MimoFactors(NamedTuple):
    """The element-wise factors of MIMO, each (heads, rank, head_dim): x, z and y of rank r are x * mimo.x[r] and so on.

    `out` None: y is given for each rank, without gate, for a norm before it.
    """

    x: Tensor
    z: Tensor
    out: Tensor | None


class Mamba3Inputs(NamedTuple):
    """Everything of tokens that comes out of in_proj, prepared: see `mamba3_scan`; for one token without the length."""

    x: Tensor
    dt: Tensor
    A: Tensor
    trap: Tensor
    B: Tensor
    C: Tensor
    angles: Tensor
    z: Tensor | None


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
    """A row of tokens through Mamba-3's recurrence, times silu(z) where there is a gate.

    Args:
        x, z: (batch, length, heads, head_dim).
        dt: (batch, length, heads), step sizes, positive, float32. A: the same shape, negative, float32.
        trap: (batch, length, heads), before the sigmoid. angles: (batch, length, angles), before the tanh.
        B, C: (batch, length, rank, groups, state), normed, without their biases; heads are a multiple of groups.
        B_bias, C_bias: (heads, rank, state). D: (heads,).
        mimo: the factors of MIMO; None: SISO, of rank 1. SISO turns channels (2i, 2i + 1) together, MIMO
            (i, i + state / 2), as the published kernels do, so that published weights mean the same.
        chunk_size: tokens computed at once by backends that work in chunks; does not change the result.
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.
        initial_state, return_final_state: the state before the first and after the last real token.

    Returns:
        y (batch, length, heads, head_dim) in the dtype of x; with mimo.out None (batch, length, rank, heads, head_dim)
        and no gate; or (y, final state). Differentiable in everything but the states.

    Raises:
        ValueError: shapes that do not belong together.
        KernelError: kernels are required and only a fallback can serve this call.
    """
    inputs = Mamba3Inputs(x, dt, A, trap, B, C, angles, z)
    _check_shapes(inputs, B_bias, C_bias, D, mimo, seq_idx)
    return backends.call(
        "mamba3_scan",
        x,
        dt,
        A,
        trap,
        B,
        C,
        angles,
        B_bias,
        C_bias,
        D,
        z,
        mimo,
        chunk_size=chunk_size,
        seq_idx=seq_idx,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


def mamba3_step(
    inputs: Mamba3Inputs,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    state: Mamba3State,
    mimo: MimoFactors | None = None,
) -> tuple[Tensor, Mamba3State]:
    """One token, for decoding.

    Args:
        inputs: as for `mamba3_scan`, without the dimension of length.

    Returns:
        y as `mamba3_scan` gives it, without the dimension of length, and the new state.
    """
    wide = torch.promote_types(inputs.x.dtype, torch.float32)
    x, dt = inputs.x.to(wide), inputs.dt.to(wide)
    pairs = mimo is None
    turn = torch.pi * dt[..., None] * torch.tanh(inputs.angles.to(wide))[:, None]
    angle = torch.remainder(state.angle.to(wide) + turn, 2 * torch.pi)
    k = rotate(per_head(inputs.B, B_bias), angle[:, None], pairs)
    q = rotate(per_head(inputs.C, C_bias), angle[:, None], pairs)
    decay = torch.exp(dt * inputs.A.to(wide))
    weight = torch.sigmoid(inputs.trap.to(wide)) * dt
    old_weight = decay * (dt - weight)
    values, old_values = _ranks_of(x, mimo), _ranks_of(state.x.to(wide), mimo)
    ssm = decay[..., None, None] * state.ssm.to(wide)
    ssm = ssm + torch.einsum("brhp,brhn,bh->bhpn", old_values, state.k.to(wide), old_weight)
    ssm = ssm + torch.einsum("brhp,brhn,bh->bhpn", values, k, weight)
    y = torch.einsum("bhpn,brhn->brhp", ssm, q) + D.to(wide)[:, None] * values
    return gate_output(y, inputs.z, mimo).to(inputs.x.dtype), Mamba3State(angle, ssm, k, x)


def empty_state(inputs: Mamba3Inputs) -> Mamba3State:
    """The state before any token."""
    batch, _, heads, head_dim = inputs.x.shape
    rank, state = inputs.B.shape[2], inputs.B.shape[4]
    new = {"dtype": torch.promote_types(inputs.x.dtype, torch.float32), "device": inputs.x.device}
    return Mamba3State(
        torch.zeros(batch, heads, inputs.angles.shape[-1], **new),
        torch.zeros(batch, heads, head_dim, state, **new),
        torch.zeros(batch, rank, heads, state, **new),
        torch.zeros(batch, heads, head_dim, **new),
    )


def per_head(B: Tensor, bias: Tensor) -> Tensor:
    """B (..., rank, groups, state) of each head's group, plus bias: (..., rank, heads, state), float32 or wider."""
    heads = bias.shape[0]
    wide = torch.promote_types(B.dtype, torch.float32)
    return B.to(wide).repeat_interleave(heads // B.shape[-2], dim=-2) + bias.to(wide).transpose(0, 1)


def rotate(k: Tensor, angle: Tensor, pairs: bool) -> Tensor:
    """k (..., heads, state) with its pairs of channels turned by angle (..., heads, angles); further pairs stay.

    `pairs`: a pair is (2i, 2i + 1), else (i, i + state / 2).
    """
    cos, sin, count = torch.cos(angle), torch.sin(angle), angle.shape[-1]
    if pairs:
        first, second = k[..., : 2 * count].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return torch.cat([turned.flatten(-2), k[..., 2 * count :]], dim=-1)
    halves = k.unflatten(-1, (2, -1))
    first, second = halves[..., :count].unbind(-2)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2)
    return torch.cat([turned, halves[..., count:]], dim=-1).flatten(-2)


def gate_output(y: Tensor, z: Tensor | None, mimo: MimoFactors | None) -> Tensor:
    """y (..., rank, heads, head_dim) gated and, where that is asked for, summed over ranks."""
    if mimo is None:
        y = y.squeeze(-3)
        return y if z is None else y * F.silu(z.to(y.dtype))
    if mimo.out is None:
        return y
    if z is not None:
        y = y * F.silu(z.to(y.dtype)[..., None, :, :] * mimo.z.to(y.dtype).transpose(0, 1))
    return (y * mimo.out.to(y.dtype).transpose(0, 1)).sum(-3)


def _ranks_of(x: Tensor, mimo: MimoFactors | None) -> Tensor:
    """x (..., heads, head_dim) for each rank: (..., rank, heads, head_dim)."""
    x = x[..., None, :, :]
    return x if mimo is None else x * mimo.x.to(x.dtype).transpose(0, 1)


def _check_shapes(
    inputs: Mamba3Inputs, B_bias: Tensor, C_bias: Tensor, D: Tensor, mimo: MimoFactors | None, seq_idx: Tensor | None
) -> None:
    batch, length, heads, head_dim = inputs.x.shape
    rank, groups, state = inputs.B.shape[2:]
    if heads % groups:
        raise ValueError(f"mamba3_scan: {heads} heads are not a multiple of {groups} groups.")
    if state % 2 or not 0 < inputs.angles.shape[-1] <= state // 2:
        raise ValueError(f"mamba3_scan: {inputs.angles.shape[-1]} angles turn at most half as many pairs of {state}.")
    if mimo is None and rank != 1:
        raise ValueError(f"mamba3_scan: B of rank {rank} needs the factors of MIMO.")
    factors = (heads, rank, head_dim)
    backends.check_shapes(
        "mamba3_scan",
        z=(inputs.z, (batch, length, heads, head_dim)),
        B=(inputs.B, (batch, length, rank, groups, state)),
        C=(inputs.C, (batch, length, rank, groups, state)),
        dt=(inputs.dt, (batch, length, heads)),
        A=(inputs.A, (batch, length, heads)),
        trap=(inputs.trap, (batch, length, heads)),
        angles=(inputs.angles, (batch, length, inputs.angles.shape[-1])),
        B_bias=(B_bias, (heads, rank, state)),
        C_bias=(C_bias, (heads, rank, state)),
        D=(D, (heads,)),
        mimo_x=(None if mimo is None else mimo.x, factors),
        mimo_z=(None if mimo is None else mimo.z, factors),
        mimo_out=(None if mimo is None else mimo.out, factors),
        seq_idx=(seq_idx, (batch, length)),
    )
