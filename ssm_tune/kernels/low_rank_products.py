"""The gradients through a low-rank factor as matrix products of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)


def low_rank_gradients(
    dy: Tensor, B: Tensor, h: Tensor, scale: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.low_rank_gradients`."""
    return scaled_product(dy, B, scale), product_in(dtype, dy.t(), h)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right of matrices in one kernel: the product is scaled before it is rounded."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of a and b, of one dtype, in another; from lower precision to float32 without a rounding
    between, but for a CPU."""
    if dtype == torch.float32 and a.dtype in _LOW and a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(dtype)
