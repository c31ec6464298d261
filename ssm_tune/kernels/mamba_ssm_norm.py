"""The norms through the Triton kernels of the package mamba_ssm.

`package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.packages import MAMBA_SSM, Package

# A mean is taken in one go over at most this many bytes.
_WIDEST = 65536
# Offsets are 32-bit.
_LARGEST = 2**31


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, package: Package = MAMBA_SSM) -> Tensor:
    """The operation of `ssm_tune.kernels.rms_norm`.

    Raises:
        Unsupported: float64, rows too wide, or more numbers than 32-bit offsets reach.
    """
    _refuse(x, x.shape[-1])
    normalise = package.function("ops.triton.layer_norm.rms_norm_fn")
    with device_of(x):
        return normalise(x, weight, None, eps=eps)


def gated_rms_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    *,
    package: Package = MAMBA_SSM,
) -> Tensor:
    """The operation of `ssm_tune.kernels.gated_rms_norm`.

    Raises:
        Unsupported: float64, groups too wide, or more numbers than 32-bit offsets reach.
    """
    _refuse(y, group_size or y.shape[-1])
    _refuse(z, group_size or z.shape[-1])
    normalise = package.function("ops.triton.layernorm_gated.rmsnorm_fn")
    with device_of(y):
        return normalise(y, weight, None, z, eps, group_size, norm_before_gate)


def _refuse(x: Tensor, width: int) -> None:
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed by the reference only")
    if width * x.element_size() > _WIDEST:
        raise Unsupported(f"a mean over {width} channels, at most {_WIDEST // x.element_size()}")
    rows = x.numel() // x.shape[-1]
    if rows * max(x.stride(-2) if x.dim() > 1 else 0, x.shape[-1]) >= _LARGEST:
        raise Unsupported(f"{x.numel()} numbers, beyond 32-bit offsets")
