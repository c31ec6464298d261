"""The products of a linear layer with a low-rank matrix: one signature each, backends behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels import backends, products

_DTYPES = (torch.bfloat16, torch.float16)
# Above it products of PyTorch's are as fast as one pass, whose shares would be a quarter of what it reads and more.
_HIGHEST_RANK = 32


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
    return _call("low_rank_product", rank, x, A, B, scale)


def low_rank_gradients(
    dy: Tensor, B: Tensor, h: Tensor, scale: float, dtype: torch.dtype = torch.float32, A: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dh = scale * dy B, dB = dy' h and dh A: of y = h B' with h = scale * x A', the gradients by x A', B and x.

    Args:
        dy: (tokens, out), the slope of y. B: (out, rank). h: (tokens, rank). All in one dtype.
        dtype: of dB.
        A: (rank, in), in the dtype of the others. None: the third is not wanted.

    Returns:
        (tokens, rank) in the dtype of dy, scaled before it is rounded; (out, rank) in `dtype`; (tokens, in) in the
        dtype of dy, contiguous, or None. Sums are in float32. Not differentiable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    (tokens, out), rank = dy.shape, B.shape[-1]
    backends.check_shapes("low_rank_gradients", B=(B, (out, rank)), h=(h, (tokens, rank)))
    return _call("low_rank_gradients", rank, dy, B, h, scale, dtype, A)


def narrow_weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """dy' x, the gradient of a weight, by a kernel of its own where dy is narrow.

    Args:
        dy: (tokens, out). x: (tokens, in). Both in one dtype.

    Returns:
        (out, in) in `dtype`; sums are in float32. Not differentiable.

    Raises:
        ValueError: shapes that do not belong together.
    """
    backends.check_shapes("narrow_weight_gradient", x=(x, (len(dy), x.shape[1])))
    return _call("narrow_weight_gradient", dy.shape[1], dy, x, dtype)


def _call(operation: str, rank: int, *args: Any) -> Any:
    if rank > _HIGHEST_RANK or args[0].dtype not in _DTYPES or not args[0].numel():
        return vars(products)[operation](*args)
    return backends.call(operation, *args)
