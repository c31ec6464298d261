"""The norms of state-space blocks: one signature, backends behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssm_tune.kernels import backends


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019, eq. 4).

    Args:
        x: (..., dim). weight: (dim,).

    Returns:
        The shape and dtype of x; the mean and the product are computed in float32.

    Raises:
        ValueError: a weight that does not fit.
    """
    backends.check_shapes("rms_norm", weight=(weight, (x.shape[-1],)))
    return backends.call("rms_norm", x, weight, eps)


def rms_norm_parts(x: Tensor, sizes: Sequence[int], eps: float) -> tuple[Tensor, ...]:
    """`rms_norm` of each part of x by itself, without weights.

    Args:
        x: (..., dim), cut into parts of so many channels each.

    Returns:
        (..., size) for each size, contiguous, in the dtype of x; computed in float32.

    Raises:
        ValueError: sizes that do not add up to the channels of x.
    """
    if sum(sizes) != x.shape[-1]:
        raise ValueError(f"rms_norm_parts: sizes are {tuple(sizes)}, their sum should be {x.shape[-1]}.")
    return backends.call("rms_norm_parts", x, sizes, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(residual + x)`, for decoding; `residual` becomes the sum, in place.

    Args:
        x: (rows, dim). residual: (rows, dim), float32 or the dtype of x; the sum is rounded to its dtype.
        weight: (dim,).

    Returns:
        (rows, dim) in the dtype of x; computed in float32. Not differentiable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    backends.check_shapes("add_rms_norm", residual=(residual, tuple(x.shape)), weight=(weight, (x.shape[-1],)))
    return backends.call("add_rms_norm", x, residual, weight, eps)


def residual_rms_norm(
    stream: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm(stream + x)` and the sum itself, for training: what stands between two residual blocks.

    Args:
        stream: (..., dim), the residual stream. x: (..., dim), what is added to it; None: nothing is.
        weight: (dim,).
        dtype: of the norm, as its reader takes it; None: the stream's.

    Returns:
        The norm, (..., dim) in `dtype`, computed in float32 and rounded once; and the sum, (..., dim) in the stream's
        dtype, which is what is normed. Without x the second is the stream itself.

    Raises:
        ValueError: shapes that do not belong together.
    """
    shape = tuple(stream.shape)
    backends.check_shapes("residual_rms_norm", x=(x, shape), weight=(weight, shape[-1:]))
    return backends.call("residual_rms_norm", stream, x, weight, eps, dtype)


def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None = None, norm_before_gate: bool = False
) -> Tensor:
    """Mamba-2's norm after the scan: rms_norm(y * silu(z)), or rms_norm(y) * silu(z) with `norm_before_gate`.

    Args:
        y, z: (..., dim). weight: (dim,).
        group_size: channels that share one mean, a divisor of dim; None: all of them (Mamba-2, section 7.3).

    Returns:
        The shape and dtype of y; computed in float32.

    Raises:
        ValueError: shapes that do not belong together.
    """
    dim = y.shape[-1]
    backends.check_shapes("gated_rms_norm", z=(z, tuple(y.shape)), weight=(weight, (dim,)))
    if dim % (group_size or dim):
        raise ValueError(f"gated_rms_norm: {dim} channels are not a multiple of the group size {group_size}.")
    return backends.call("gated_rms_norm", y, z, weight, eps, group_size, norm_before_gate)
