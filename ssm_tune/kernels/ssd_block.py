"""What a Mamba-2 mixer does between its projections, as one operation: one signature, backends behind it."""

from __future__ import annotations

import math

from torch import Tensor

from ssm_tune.kernels import backends


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
    """Convolution, scan, and the gated norm (Mamba-2, figure 6): from in_proj's output to out_proj's input.

    Args:
        projected: (batch, length, 2 dim + 2 groups state + heads): z, x, B, C and dt side by side, dim = heads *
            head_dim.
        conv_weight: (dim + 2 groups state, width). conv_bias: (dim + 2 groups state,).
        A, D, dt_bias: (heads,), A negative, float32.
        norm_weight: (dim,); None: the scan's output times silu(z), no norm.
        eps, group_size, norm_before_gate: as in `gated_rms_norm`. chunk_size, dt_limit: as in `ssd_scan`.
        seq_idx: (batch, length) integers, the document of each token; -1 is padding. See `kernels/reference.py`.

    Returns:
        (batch, length, dim) in the dtype of `projected`. Differentiable in everything.

    Raises:
        ValueError: shapes that do not belong together.
        KernelError: kernels are required and only a fallback can serve this call.
    """
    batch, length, width = projected.shape
    (heads,), (channels, _) = A.shape, conv_weight.shape
    dim = heads * head_dim
    if width != dim + channels + heads or channels < dim or (channels - dim) % (2 * groups) or heads % groups:
        raise ValueError(
            f"ssd_block: {width} channels are not z ({dim}), x, B and C ({channels}) and dt ({heads}) of {heads} heads "
            f"of {head_dim} in {groups} groups."
        )
    backends.check_shapes(
        "ssd_block",
        conv_bias=(conv_bias, (channels,)),
        D=(D, (heads,)),
        dt_bias=(dt_bias, (heads,)),
        norm_weight=(norm_weight, (dim,)),
        seq_idx=(seq_idx, (batch, length)),
    )
    return backends.call(
        "ssd_block",
        projected,
        conv_weight,
        conv_bias,
        A,
        D,
        dt_bias,
        norm_weight,
        head_dim=head_dim,
        groups=groups,
        eps=eps,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        chunk_size=chunk_size,
        dt_limit=dt_limit,
        seq_idx=seq_idx,
    )
