"""Mamba-2's scan (state-space duality) and its step form: one signature, backends behind it."""

from __future__ import annotations

import math

from torch import Tensor

from ssm_tune.kernels import backends


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
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t, a scalar A per head (Mamba-2, sections 5 and
    6).

    Args:
        x: (batch, length, heads, head_dim). dt: (batch, length, heads), used as softplus(dt + dt_bias) clamped to
        `dt_limit`. A, dt_bias: (heads,), A negative, float32. D: (heads,) or (heads, head_dim). B, C: (batch, length,
        groups, state); heads are a multiple of groups. chunk_size: tokens computed at once by backends that work in
        chunks; does not change the result. seq_idx: (batch, length) integers, the document of each token; -1 is
        padding. See `kernels/reference.py`. initial_state: (batch, heads, head_dim, state), float32: the state before
        the first token. return_final_state: also give the state after the last real token, same shape, float32.

    Returns:
        y (batch, length, heads, head_dim) in the dtype of x, or (y, final state). Differentiable in everything.

    Raises:
        ValueError: shapes that do not belong together.
        KernelError: kernels are required and only a fallback can serve this call.
    """
    batch, length, heads, head_dim = x.shape
    _check_heads("ssd_scan", heads, head_dim, B.shape[-2], D)
    shape_of_B = (batch, length, B.shape[-2], B.shape[-1])
    backends.check_shapes(
        "ssd_scan",
        dt=(dt, (batch, length, heads)),
        A=(A, (heads,)),
        B=(B, shape_of_B),
        C=(C, shape_of_B),
        dt_bias=(dt_bias, (heads,)),
        seq_idx=(seq_idx, (batch, length)),
        initial_state=(initial_state, (batch, heads, head_dim, B.shape[-1])),
    )
    return backends.call(
        "ssd_scan",
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        chunk_size=chunk_size,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        seq_idx=seq_idx,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


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
    """One token of `ssd_scan`, for decoding.

    Args:
        x: (batch, heads, head_dim). dt: (batch, heads). B, C: (batch, groups, state). D: (heads,) or (heads, head_dim).
        state: (batch, heads, head_dim, state), float32, updated in place.

    Returns:
        y (batch, heads, head_dim) in the dtype of x.

    Raises:
        ValueError: shapes that do not belong together.
    """
    batch, heads, head_dim = x.shape
    _check_heads("ssd_step", heads, head_dim, B.shape[-2], D)
    shape_of_B = (batch, B.shape[-2], B.shape[-1])
    backends.check_shapes(
        "ssd_step",
        dt=(dt, (batch, heads)),
        A=(A, (heads,)),
        B=(B, shape_of_B),
        C=(C, shape_of_B),
        dt_bias=(dt_bias, (heads,)),
        state=(state, (batch, heads, head_dim, B.shape[-1])),
    )
    return backends.call("ssd_step", x, dt, A, B, C, state, D, dt_bias, dt_softplus, dt_limit)


def _check_heads(operation: str, heads: int, head_dim: int, groups: int, D: Tensor | None) -> None:
    if heads % groups:
        raise ValueError(f"{operation}: {heads} heads are not a multiple of {groups} groups.")
    if D is not None and tuple(D.shape) not in {(heads,), (heads, head_dim)}:
        raise ValueError(f"{operation}: D is {tuple(D.shape)}, expected ({heads},) or ({heads}, {head_dim}).")
