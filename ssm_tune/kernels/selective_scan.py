"""Mamba-1's selective scan and its step form: one signature, backends behind it."""

from __future__ import annotations

from torch import Tensor

from ssm_tune.kernels import backends


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
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = (C_t h_t + D x_t) * silu(z_t) (Mamba, eq. 2 and algorithm 2).

    Args:
        x, dt, z: (batch, length, dim). dt is used as softplus(dt + dt_bias), or as dt + dt_bias without `dt_softplus`.
        A: (dim, state), negative, float32. B, C: (batch, length, state). D, dt_bias: (dim,).
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.
        initial_state: (batch, dim, state), float32: the state before the first token.
        return_final_state: also give the state after the last real token, (batch, dim, state), float32.

    Returns:
        y (batch, length, dim) in the dtype of x, or (y, final state). Differentiable in everything, both states
        included.

    Raises:
        ValueError: shapes that do not belong together.
        KernelError: kernels are required and only a fallback can serve this call.
    """
    batch, length, dim = x.shape
    state = A.shape[-1]
    backends.check_shapes(
        "selective_scan",
        dt=(dt, (batch, length, dim)),
        z=(z, (batch, length, dim)),
        A=(A, (dim, state)),
        B=(B, (batch, length, state)),
        C=(C, (batch, length, state)),
        D=(D, (dim,)),
        dt_bias=(dt_bias, (dim,)),
        seq_idx=(seq_idx, (batch, length)),
        initial_state=(initial_state, (batch, dim, state)),
    )
    return backends.call(
        "selective_scan",
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus=dt_softplus,
        seq_idx=seq_idx,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


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
    """One token of `selective_scan`, for decoding.

    Args:
        x, dt, z: (batch, dim). A: (dim, state). B, C: (batch, state). D, dt_bias: (dim,).
        state: (batch, dim, state), float32, updated in place.

    Returns:
        y (batch, dim) in the dtype of x.

    Raises:
        ValueError: shapes that do not belong together.
    """
    batch, dim = x.shape
    states = A.shape[-1]
    backends.check_shapes(
        "selective_scan_step",
        dt=(dt, (batch, dim)),
        z=(z, (batch, dim)),
        A=(A, (dim, states)),
        B=(B, (batch, states)),
        C=(C, (batch, states)),
        D=(D, (dim,)),
        dt_bias=(dt_bias, (dim,)),
        state=(state, (batch, dim, states)),
    )
    return backends.call("selective_scan_step", x, dt, A, B, C, state, D, z, dt_bias, dt_softplus)
