"""The norms through the Triton kernels of the package mamba_ssm.

`package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

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
        Unsupported: float64, or rows too wide.
    """
    _refuse(x, x.shape[-1])
    normalise = package.function("ops.triton.layer_norm.rms_norm_fn")
    with device_of(x):
        return _in_pieces(lambda x: normalise(x, weight, None, eps=eps), x)


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
        Unsupported: float64, or groups too wide.
    """
    _refuse(y, group_size or y.shape[-1])
    normalise = package.function("ops.triton.layernorm_gated.rmsnorm_fn")
    with device_of(y):
        return _in_pieces(lambda y, z: normalise(y, weight, None, z, eps, group_size, norm_before_gate), y, z)


def _refuse(x: Tensor, width: int) -> None:
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed by the reference only")
    if width * x.element_size() > _WIDEST:
        raise Unsupported(f"a mean over {width} channels, at most {_WIDEST // x.element_size()}")


def _in_pieces(normalise: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`normalise` of as many rows at a time as 32-bit offsets reach."""
    dim = tensors[0].shape[-1]
    # From one row to the next; a part of a wider projection lies apart. The kernels copy rows that are not dense.
    steps = [max(t.stride(-2) if t.dim() > 1 and t.stride(-1) == 1 else 0, dim) for t in tensors]
    rows = max(1, (_LARGEST - 1) // max(steps))
    if tensors[0].numel() // dim <= rows:
        return normalise(*tensors)
    # Split, not sliced: the gradient of each slice would be a whole tensor of zeros.
    pieces = zip(*(t.reshape(-1, dim).split(rows) for t in tensors), strict=True)
    return torch.cat([normalise(*piece) for piece in pieces]).view(tensors[0].shape)
