"""The products of a linear layer with a low-rank matrix: one signature, backends behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ssm_tune.kernels import backends, products

_DTYPES = (torch.bfloat16, torch.float16)
_HIGHEST_RANK = 64  # above it products of PyTorch's are as fast as one pass


def low_rank_product(x: Tensor, A: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """h = scale * x A' and y = h B'.

    Args:
        x: (tokens, in). A: (rank, in). B: (out, rank). All in one dtype.

    Returns:
        (tokens, rank) and (tokens, out) in that dtype, contiguous; sums are in float32, and h is scaled before it is
        rounded. Not differentiable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    rank, channels = A.shape
    backends.check_shapes("low_rank_product", x=(x, (len(x), channels)), B=(B, (len(B), rank)))
    if rank > _HIGHEST_RANK or x.dtype not in _DTYPES:
        return products.low_rank_product(x, A, B, scale)
    return backends.call("low_rank_product", x, A, B, scale)


def low_rank_gradients(
    dy: Tensor, B: Tensor, h: Tensor, scale: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """scale * dy @ B and dy' @ h: of y = h B', the gradients by what h is `scale` times of, and by B.

    Args:
        dy: (tokens, out), the slope of y. B: (out, rank). h: (tokens, rank). All in one dtype.
        dtype: of the second result.

    Returns:
        (tokens, rank) in the dtype of dy, scaled before it is rounded, and (out, rank) in `dtype`; sums are in float32.
        Not differentiable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    (tokens, out), rank = dy.shape, B.shape[-1]
    backends.check_shapes("low_rank_gradients", B=(B, (out, rank)), h=(h, (tokens, rank)))
    if rank > _HIGHEST_RANK or dy.dtype not in _DTYPES:
        return products.low_rank_gradients(dy, B, h, scale, dtype)
    return backends.call("low_rank_gradients", dy, B, h, scale, dtype)
