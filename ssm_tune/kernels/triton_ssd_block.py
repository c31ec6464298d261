"""`ssd_block` on our kernels alone: the convolution in CUDA C++ or Triton, the scan and the gated norm in Triton.

It needs no other package. What is kept and where gradients are written: `fused_ssd_block`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ssm_tune.kernels import backends, cuda_conv, ssd_block_parts, triton_conv
from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.cuda_tokens import aligned, find_marks
from ssm_tune.kernels.documents import find_documents
from ssm_tune.kernels.fused_ssd_block import Functions, Marks, Settings, run_block
from ssm_tune.kernels.ssd_block_parts import split_projected
from ssm_tune.kernels.triton_gate import gate, gate_backward
from ssm_tune.kernels.triton_gated_norm import WIDEST, normalise, normalise_backward
from ssm_tune.kernels.triton_ssd import refuse_sizes, scan, scan_again
from ssm_tune.kernels.triton_ssd_backward import scan_backward


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
) -> Tensor:
    """The operation of `ssm_tune.kernels.ssd_block`. Padding inside a document, and norms of wide groups, are done in
    parts.

    Raises:
        Unsupported: what the convolution or the scan cannot do: float64, wide heads, many states, no tokens.
    """
    dim, channels = A.shape[0] * head_dim, conv_weight.shape[0]
    triton_conv.refuse(projected, conv_weight)
    refuse_sizes(projected, head_dim, (channels - dim) // (2 * groups))
    documents = None if seq_idx is None else find_documents(seq_idx)
    vectors = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
    vectors = tuple(None if t is None else t.contiguous() for t in vectors)
    wide = norm_weight is not None and (group_size or dim) > WIDEST
    if wide or (documents is not None and documents.gaps):
        norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
        settings = {"head_dim": head_dim, "groups": groups, "chunk_size": chunk_size, "dt_limit": dt_limit}
        return ssd_block_parts.ssd_block(projected, *vectors, **norm, **settings, seq_idx=seq_idx)
    settings = Settings(head_dim, groups, chunk_size, tuple(dt_limit), eps, group_size or dim, norm_before_gate)
    projected = projected if projected.stride(-1) == 1 else projected.contiguous()
    xBC = split_projected(projected, conv_weight, A)[1]
    convolution = _CUDA if _is_for_cuda(xBC, conv_weight, conv_bias) else _TRITON
    return run_block(Functions(*convolution, *_SCAN, _scanned_again), projected, *vectors, documents, settings)


def _is_for_cuda(xBC: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our convolution in CUDA C++ works here, is preferred to that in Triton, and can do it."""
    if backends.first_that_works("causal_conv1d", xBC.device, ("cuda", "triton")) != "cuda":
        return False
    try:
        cuda_conv.refuse(xBC, weight, bias)
    except Unsupported:
        return False
    return True


def _convolved(xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks) -> Tensor:
    return triton_conv.convolve(xBC, weight, bias, None if marks is None else _windows(marks, weight)[0])


def _convolved_backward(
    xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks, slope: Tensor, dxBC: Tensor, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    windows = None if marks is None else _windows(marks, weight)
    return triton_conv.convolve_backward(xBC, weight, bias, windows, slope, dxBC, need_weight)


def _windows(marks: tuple[Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    return triton_conv.find_windows(marks[0], weight.shape[1], 0)


def _convolved_by_cuda(xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks) -> Tensor:
    return cuda_conv.convolve(aligned(xBC), weight, bias, None if marks is None else find_marks(marks[0]))


def _convolved_backward_by_cuda(
    xBC: Tensor, weight: Tensor, bias: Tensor | None, marks: Marks, slope: Tensor, dxBC: Tensor, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    found = None if marks is None else find_marks(marks[0])
    given = (aligned(xBC), weight, bias, found, (slope, None), dxBC)
    return cuda_conv.convolve_backward(*given, need_weight)


def _scanned(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    marks: Marks,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    number = None if marks is None else marks[1]
    y, _ = scan(x, dt, A, B, C, D, dt_bias, number, None, True, settings.dt_limit)
    return (y if z is None else gate(y, z)), y


def _scanned_again(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    marks: Marks,
    settings: Settings,
) -> tuple[Tensor, dict[str, Any]]:
    number = None if marks is None else marks[1]
    return scan_again(x, dt, A, B, C, D, dt_bias, number, None, True, settings.dt_limit)


def _scanned_backward(
    slope: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    kept: Tensor,
    marks: Marks,
    settings: Settings,
    into: dict[str, Tensor],
    **more: Any,
) -> tuple[Tensor | None, ...]:
    into = dict(into)
    if z is not None:
        slope = gate_backward(slope, kept, z, into.pop("dz"))
    given = (x, dt, A, B, C, D, dt_bias, None if marks is None else marks[1], None, True, settings.dt_limit)
    dA, dD, ddt_bias, _ = scan_backward(slope, *given, **into, **more)
    return dA, dD, ddt_bias


_TRITON = _convolved, _convolved_backward
_CUDA = _convolved_by_cuda, _convolved_backward_by_cuda
_SCAN = _scanned, _scanned_backward, normalise, normalise_backward
