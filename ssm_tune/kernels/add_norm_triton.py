"""The residual stream's addition and norm in one Triton kernel: at one token a row, launches are what costs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of

_WIDEST = 16384  # channels: one program holds a whole row in registers


@triton.jit
def _add_norm(
    x,
    residual,
    weight,
    y,
    dim,
    eps,
    x_stride,
    residual_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < dim
    old = tl.load(residual + row * residual_stride + places, mask=inside, other=0.0).to(tl.float32)
    total = old + tl.load(x + row * x_stride + places, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + places, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / dim + eps)
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * dim + places, (total * scale * factors).to(y.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The operation of `ssm_tune.kernels.add_rms_norm`.

    Raises:
        Unsupported: float64, rows too wide, or channels that do not lie side by side.
    """
    rows, dim = x.shape
    if torch.float64 in {x.dtype, residual.dtype, weight.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    if dim > _WIDEST:
        raise Unsupported(f"{dim} channels, at most {_WIDEST}")
    if {x.stride(1), residual.stride(1), weight.stride(0)} != {1}:
        raise Unsupported("channels that do not lie side by side")
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    with device_of(x):
        _add_norm[(rows,)](
            x,
            residual,
            weight,
            y,
            dim,
            eps,
            x.stride(0),
            residual.stride(0),
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return y
