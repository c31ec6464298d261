"""Matrix products in other precisions than PyTorch's operators give, and those with a low-rank matrix."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)


def low_rank_product(x: Tensor, A: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.low_rank_product`."""
    h = scaled_product(x, A.t(), scale)
    return h, torch.mm(h, B.t())


def narrow_linear(x: Tensor, weight: Tensor, A: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """h = scale x A' (tokens, rank) and y = x weight' + h B' (tokens, out), rounded once: one product of both matrices
    side by side, for a narrow x, of which copies are small."""
    h = scaled_product(x, A.t(), scale)
    return h, torch.mm(torch.cat([x, h], 1), torch.cat([weight, B], 1).t())


def narrow_gradient(dy: Tensor, weight: Tensor, dh: Tensor, A: Tensor) -> Tensor:
    """dy weight + dh A (tokens, in), rounded once, as `narrow_linear`, for a narrow dy."""
    return torch.mm(torch.cat([dy, dh], 1), torch.cat([weight, A], 0))


def low_rank_gradients(
    dy: Tensor, B: Tensor, h: Tensor, scale: float, dtype: torch.dtype = torch.float32, A: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operation of `ssm_tune.kernels.low_rank_gradients`."""
    dh = scaled_product(dy, B, scale)
    return dh, product_in(dtype, dy.t(), h), None if A is None else torch.mm(dh, A)


def narrow_weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The operation of `ssm_tune.kernels.narrow_weight_gradient`."""
    return product_in(dtype, dy.t(), x)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right of matrices in one kernel: the product is scaled before it is rounded."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of a and b, of one dtype, in another; from lower precision to float32 without a rounding
    between, but for a CPU."""
    if dtype == torch.float32 and a.dtype in _LOW and a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(dtype)
