"""`ssd_block` through the one fused call of the package mamba_ssm, without its output projection.

The call saves its input and the scan's output, and computes the convolution again in backward. `package`: where its
functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels import ssd_block_parts
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import Documents, find_documents
from ssm_tune.kernels.mamba_ssm_ssd import piece_that_fits
from ssm_tune.kernels.packages import MAMBA_SSM, Package
from ssm_tune.kernels.recompute import kept_tensors, recomputable, reference_to
from ssm_tune.kernels.ssd_block_parts import split_heads, split_projected

# Offsets are 32-bit.
_LARGEST = 2**31
# The convolution reads channels eight at a time, in pieces of 16 bytes; the norm at most this many bytes in one go.
_TOGETHER, _BYTES, _WIDEST = 8, 16, 65536


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
    package: Package = MAMBA_SSM,
) -> Tensor:
    """The operation of `ssm_tune.kernels.ssd_block`. What the fused call cannot do is done in parts.

    Those are widths that are not multiples of 8, padding inside a document, norms over other groups than the scan's,
    float64, and batches beyond 32-bit offsets.
    """
    call = package.function("ops.triton.ssd_combined.mamba_split_conv1d_scan_combined")
    dim = A.shape[0] * head_dim
    documents = None if seq_idx is None else find_documents(seq_idx)
    norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
    if not _fits(projected, conv_weight, A, head_dim, groups, chunk_size, documents) or (
        norm_weight is not None and (group_size or dim) != dim // groups
    ):
        settings = {"head_dim": head_dim, "groups": groups, "chunk_size": chunk_size, "dt_limit": dt_limit}
        vectors = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
        return ssd_block_parts.ssd_block(projected, *vectors, **norm, **settings, seq_idx=seq_idx)
    with device_of(projected), kept_tensors() as kept:
        y = call(
            projected,
            conv_weight,
            None if conv_bias is None else conv_bias.to(conv_weight.dtype),
            dt_bias.float(),
            A.float(),
            D.float(),
            chunk_size,
            # To the convolution -1 is nothing: x, B and C are zero there, so that nothing enters a state, nor leaves.
            seq_idx=None if documents is None else documents.marked,
            dt_limit=tuple(dt_limit),
            activation="silu",
            rmsnorm_weight=norm_weight,
            rmsnorm_eps=eps,
            headdim=head_dim,
            ngroups=groups,
            norm_before_gate=norm_before_gate,
        )
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)  # zero already, but not yet for a gradient
    scanned = [t for t in kept if tuple(t.shape) == (*projected.shape[:2], A.shape[0], head_dim)]
    if len(scanned) == 1:
        _recompute_gated(y, scanned[0], projected[..., :dim], norm_weight, norm)
    return y


def _recompute_gated(
    y: Tensor, scanned: Tensor, z: Tensor, weight: Tensor | None, norm: dict[str, float | int | bool | None]
) -> None:
    """Let y be normalised and gated again in backward: the call keeps the scan's output."""
    z_again, weight = reference_to(z), None if weight is None else weight.detach()
    recomputable([y], lambda: [ssd_block_parts.gated(scanned.flatten(-2), z_again(), weight, **norm)])


# By shapes and strides: asking the device for its properties in every layer would cost more than the launch.
_fitting: dict[tuple[Any, ...], bool] = {}


def _fits(
    projected: Tensor,
    conv_weight: Tensor,
    A: Tensor,
    head_dim: int,
    groups: int,
    chunk_size: int,
    documents: Documents | None,
) -> bool:
    """Whether the fused call can do it, in one go."""
    if documents is not None and documents.gaps:
        return False
    sizes = (A.shape[0], head_dim, groups, chunk_size)
    layout = (projected.shape, projected.stride(), projected.data_ptr() % _BYTES, projected.dtype, projected.device)
    key = (layout, conv_weight.shape, conv_weight.dtype, sizes)
    if key not in _fitting:
        if len(_fitting) > 1000:
            _fitting.clear()
        _fitting[key] = _fits_in_shape(projected, conv_weight, A, head_dim, groups, chunk_size)
    return _fitting[key]


def _fits_in_shape(
    projected: Tensor, conv_weight: Tensor, A: Tensor, head_dim: int, groups: int, chunk_size: int
) -> bool:
    channels, width = conv_weight.shape
    if torch.float64 in {projected.dtype, conv_weight.dtype} or not 2 <= width <= 4:
        return False
    z, xBC, dt = split_projected(projected, conv_weight, A)
    aligned = channels % _TOGETHER == 0 and xBC.data_ptr() % _BYTES == 0 and projected.stride(2) == 1
    aligned = aligned and projected.stride(0) % _TOGETHER == 0 and projected.stride(1) % _TOGETHER == 0
    if not aligned or z.shape[-1] // groups * z.element_size() > _WIDEST:
        return False
    x, B, C = split_heads(xBC, A.shape[0], head_dim, groups)
    batch, length = projected.shape[:2]
    return (
        batch * length * projected.stride(1) < _LARGEST
        and batch * projected.stride(0) < _LARGEST
        and piece_that_fits(x, dt, B, C, chunk_size) == (batch, length)
    )
