"""`ssd_block` on the kernels of the packages mamba_ssm and causal_conv1d, with our gated norm.

The rest is as in mamba_ssm's fused call, whose own norm takes four times as long as its bytes. `package`: where the
functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels import ssd_block_parts
from ssm_tune.kernels.documents import Documents, find_documents
from ssm_tune.kernels.fused_ssd_block import Functions, Marks, Settings, run_block
from ssm_tune.kernels.mamba_ssm_ssd import piece_that_fits
from ssm_tune.kernels.packages import MAMBA_SSM, Package
from ssm_tune.kernels.ssd_block_parts import split_heads, split_projected

# Offsets are 32-bit.
_LARGEST = 2**31
# The convolution reads channels eight at a time, in pieces of 16 bytes.
_TOGETHER, _BYTES = 8, 16


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
    """The operation of `ssm_tune.kernels.ssd_block`. What the kernels cannot do in one go is done in parts.

    That is widths that are not multiples of 8, padding inside a document, norms of wide groups, float64, and batches
    beyond 32-bit offsets.
    """
    functions, widest = _functions(package)
    documents = None if seq_idx is None else find_documents(seq_idx)
    dim = A.shape[0] * head_dim
    vectors = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
    if not _fits(projected, conv_weight, A, head_dim, groups, chunk_size, documents) or (
        norm_weight is not None and (group_size or dim) > widest
    ):
        norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
        settings = {"head_dim": head_dim, "groups": groups, "chunk_size": chunk_size, "dt_limit": dt_limit}
        return ssd_block_parts.ssd_block(projected, *vectors, **norm, **settings, seq_idx=seq_idx)
    settings = Settings(head_dim, groups, chunk_size, tuple(dt_limit), eps, group_size or dim, norm_before_gate)
    return run_block(functions, projected, *vectors, documents, settings)


def _functions(package: Package) -> tuple[Functions, int]:
    """And the most channels of a group of the norm."""
    scan = "ops.triton.ssd_combined"
    # The installed package takes the convolution from causal_conv1d; the prebuilt one brings its own.
    convolution = "_causal_conv1d.cpp_functions" if package.repo else scan
    names = (f"{convolution}.causal_conv1d_fwd_function", f"{convolution}.causal_conv1d_bwd_function")
    names += (f"{scan}._mamba_chunk_scan_combined_fwd", f"{scan}._mamba_chunk_scan_combined_bwd")
    convolve, convolve_backward, scan_forward, scan_backward = (package.function(name) for name in names)
    # After them: where mamba_ssm is not installed, that is the reason to be told, and not that Triton is not either.
    from ssm_tune.kernels.triton_gated_norm import WIDEST, normalise, normalise_backward

    def convolved(xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks) -> Tensor:
        given = (xBC.transpose(1, 2), weight, bias, marks and marks[0], None, None, True)
        return convolve(*given).transpose(1, 2)

    def convolved_backward(
        xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks, slope: Tensor, dxBC: Tensor, _: bool
    ) -> tuple[Tensor, Tensor | None]:
        given = (xBC.transpose(1, 2), weight, bias, slope.transpose(1, 2), marks and marks[0], None, None)
        return convolve_backward(*given, dxBC.transpose(1, 2), False, True)[1:3]

    def scanned(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        given = _scan_settings(*rest)
        out, ungated, *_ = scan_forward(x, dt, A, B, C, **given)
        return out, out if given["z"] is None else ungated

    def scanned_backward(
        slope: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, need_sums: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        D, dt_bias, z, kept, marks, settings, into = rest
        given = _scan_settings(D, dt_bias, z, marks, settings)
        _, _, dA, _, _, dD, _, ddt_bias, _ = scan_backward(slope, x, dt, A, B, C, kept, **given, **into)
        return dA, dD, ddt_bias

    functions = (convolved, convolved_backward, scanned, scanned_backward, normalise, normalise_backward)
    return Functions(*functions), WIDEST


def _scan_settings(D: Tensor, dt_bias: Tensor, z: Tensor | None, marks: Marks, settings: Settings) -> dict[str, Any]:
    """What the scan is given forward and backward. Without a norm it multiplies by the gate, too."""
    return {
        "chunk_size": settings.chunk_size,
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "seq_idx": marks and marks[0],
        "dt_softplus": True,
        "dt_limit": settings.dt_limit,
    }


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
    """Whether the kernels can do it, in one go."""
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
    # And the gradient, whose rows lie one after the other.
    aligned = aligned and projected.shape[2] % _TOGETHER == 0 and z.shape[2] * z.element_size() % _BYTES == 0
    if not aligned:
        return False
    x, B, C = split_heads(xBC, A.shape[0], head_dim, groups)
    batch, length = projected.shape[:2]
    return (
        batch * length * projected.stride(1) < _LARGEST
        and batch * projected.stride(0) < _LARGEST
        and piece_that_fits(x, dt, B, C, chunk_size) == (batch, length)
    )
