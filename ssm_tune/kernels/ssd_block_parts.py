"""`ssd_block` as the operations that it consists of, each with the backend that serves it."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.conv import causal_conv1d
from ssm_tune.kernels.norm import gated_rms_norm
from ssm_tune.kernels.recompute import recomputable, reference_to
from ssm_tune.kernels.ssd import ssd_scan


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
    """The operation of `ssm_tune.kernels.ssd_block`."""
    z, xBC, dt = split_projected(projected, conv_weight, A)
    x, B, C = split_heads(_convolved(xBC, conv_weight, conv_bias, seq_idx), len(A), head_dim, groups)
    settings = {"chunk_size": chunk_size, "dt_limit": dt_limit, "seq_idx": seq_idx}
    y = ssd_scan(x, dt, A, B, C, D, dt_bias, **settings).flatten(-2)
    return gated(y, z, norm_weight, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)


def split_projected(projected: Tensor, conv_weight: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z, the convolution's input, and dt."""
    channels, heads = conv_weight.shape[0], A.shape[0]
    return projected.split([projected.shape[-1] - channels - heads, channels, heads], dim=-1)


def split_heads(xBC: Tensor, heads: int, head_dim: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., heads, head_dim), B and C (..., groups, state)."""
    dim = heads * head_dim
    state = (xBC.shape[-1] - dim) // 2
    x, B, C = xBC.split([dim, state, state], dim=-1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    y = causal_conv1d(x, weight, bias, seq_idx=seq_idx)
    given, weight, bias = reference_to(x), weight.detach(), None if bias is None else bias.detach()
    recomputable([y], lambda: [causal_conv1d(given(), weight, bias, seq_idx=seq_idx)])
    return y


def gated(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:
    """The gated norm, or the gate alone where there is no weight."""

    def gate(y: Tensor, z: Tensor, weight: Tensor | None) -> Tensor:
        return y * F.silu(z) if weight is None else gated_rms_norm(y, z, weight, eps, group_size, norm_before_gate)

    result = gate(y, z, norm_weight)
    given, weight = (reference_to(y), reference_to(z)), None if norm_weight is None else norm_weight.detach()
    recomputable([result], lambda: [gate(*(tensor() for tensor in given), weight)])
    return result
