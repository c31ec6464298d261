"""`ssd_block` on the kernels of the packages mamba_ssm and causal_conv1d, with our gated norm.

The rest is as in mamba_ssm's fused call, whose own norm takes four times as long as its bytes: the input and the scan's
output are kept, the convolution is computed again in backward, and the gradients of z, x, B, C and dt are written side
by side into one tensor. `package`: where the functions come from, see `ssm_tune.kernels.packages`; it is imported at
the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels import ssd_block_parts
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import Documents, find_documents
from ssm_tune.kernels.mamba_ssm_ssd import piece_that_fits
from ssm_tune.kernels.packages import MAMBA_SSM, Package
from ssm_tune.kernels.recompute import recomputable, reference_to
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
    functions = _functions(package)
    documents = None if seq_idx is None else find_documents(seq_idx)
    norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
    dim = A.shape[0] * head_dim
    if not _fits(projected, conv_weight, A, head_dim, groups, chunk_size, documents) or (
        norm_weight is not None and (group_size or dim) > functions.widest
    ):
        settings = {"head_dim": head_dim, "groups": groups, "chunk_size": chunk_size, "dt_limit": dt_limit}
        vectors = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
        return ssd_block_parts.ssd_block(projected, *vectors, **norm, **settings, seq_idx=seq_idx)
    settings = _Settings(head_dim, groups, chunk_size, tuple(dt_limit), eps, group_size or dim, norm_before_gate)
    y, scanned = _Block.apply(
        projected,
        conv_weight,
        None if conv_bias is None else conv_bias.to(conv_weight.dtype),
        A.float(),
        D.float(),
        dt_bias.float(),
        norm_weight,
        # To the convolution -1 is nothing: x, B and C are zero there, so that nothing enters a state, nor leaves.
        None if documents is None else documents.marked.contiguous(),
        settings,
        functions,
    )
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)  # zero already, but not yet for a gradient
    _recompute_gated(y, scanned, projected[..., :dim], norm_weight, norm)
    return y


class _Settings(NamedTuple):
    """What is no tensor."""

    head_dim: int
    groups: int
    chunk_size: int
    dt_limit: tuple[float, float]
    eps: float
    group_size: int
    norm_before_gate: bool


class _Functions(NamedTuple):
    """The kernels' functions, which know nothing of autograd. widest: channels of a group of the norm."""

    convolve: Callable[..., Any]
    convolve_backward: Callable[..., Any]
    scan: Callable[..., Any]
    scan_backward: Callable[..., Any]
    normalise: Callable[..., Any]
    normalise_backward: Callable[..., Any]
    widest: int


def _functions(package: Package) -> _Functions:
    scan = "ops.triton.ssd_combined"
    # The installed package takes the convolution from causal_conv1d; the prebuilt one brings its own.
    convolution = "_causal_conv1d.cpp_functions" if package.repo else scan
    names = (f"{convolution}.causal_conv1d_fwd_function", f"{convolution}.causal_conv1d_bwd_function")
    names += (f"{scan}._mamba_chunk_scan_combined_fwd", f"{scan}._mamba_chunk_scan_combined_bwd")
    found = [package.function(name) for name in names]
    # After them: where mamba_ssm is not installed, that is the reason to be told, and not that Triton is not either.
    from ssm_tune.kernels.triton_gated_norm import WIDEST, normalise, normalise_backward

    return _Functions(*found, normalise, normalise_backward, WIDEST)


class _Block(torch.autograd.Function):
    """Gives the block's output, and the scan's, which is kept, to compute the former again."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor | None,
        seq_idx: Tensor | None,
        settings: _Settings,
        functions: _Functions,
    ) -> tuple[Tensor, Tensor]:
        z, xBC, dt = split_projected(projected, conv_weight, A)
        with device_of(projected):
            x, B, C = _convolved(xBC, conv_weight, conv_bias, A, seq_idx, settings, functions)
            scan = _scan_settings(z, D, dt_bias, norm_weight, seq_idx, settings)
            out, ungated, *_ = functions.scan(x, dt, A, B, C, **scan)
            if norm_weight is None:
                y, scanned, scales = out.flatten(-2), ungated, None
            else:
                norm = (settings.eps, settings.group_size, settings.norm_before_gate)
                (y, scales), scanned = functions.normalise(out.flatten(-2), z, norm_weight, *norm), out
        ctx.save_for_backward(
            projected, conv_weight, conv_bias, A, D, dt_bias, norm_weight, seq_idx, scanned, scales
        )  # fmt: skip
        ctx.settings, ctx.functions = settings, functions
        ctx.mark_non_differentiable(scanned)
        ctx.set_materialize_grads(False)
        return y, scanned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 10
        saved = ctx.saved_tensors
        projected, conv_weight, conv_bias, A, D, dt_bias, norm_weight, seq_idx, scanned, scales = saved
        settings, functions = ctx.settings, ctx.functions
        z, xBC, dt = split_projected(projected, conv_weight, A)
        dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
        dz, dxBC, ddt = split_projected(dprojected, conv_weight, A)
        dconvolved = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
        dx, dB, dC = split_heads(dconvolved, len(A), settings.head_dim, settings.groups)
        dscanned, dnorm, into = dy, None, {"dx": dx, "ddt": ddt, "dB": dB, "dC": dC}
        with device_of(projected):
            if norm_weight is None:
                into["dz"] = dz.unflatten(-1, scanned.shape[-2:])
            else:
                norm = (settings.group_size, settings.norm_before_gate, ctx.needs_input_grad[6])
                given = (scanned.flatten(-2), z, norm_weight, scales, dz)
                dscanned, dnorm = functions.normalise_backward(dy, *given, *norm)
            x, B, C = _convolved(xBC, conv_weight, conv_bias, A, seq_idx, settings, functions)
            scan = _scan_settings(z, D, dt_bias, norm_weight, seq_idx, settings)
            dscanned = dscanned.unflatten(-1, scanned.shape[-2:])
            _, _, dA, _, _, dD, _, ddt_bias, _ = functions.scan_backward(
                dscanned, x, dt, A, B, C, scanned, **scan, **into
            )
            given = (xBC.transpose(1, 2), conv_weight, conv_bias, dconvolved.transpose(1, 2), seq_idx, None, None)
            _, dweight, dbias, *_ = functions.convolve_backward(*given, dxBC.transpose(1, 2), False, True)
        return dprojected, dweight, dbias, dA, dD, ddt_bias, dnorm, None, None, None


def _convolved(
    xBC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A: Tensor,
    seq_idx: Tensor | None,
    settings: _Settings,
    functions: _Functions,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, B and C, by heads and groups."""
    convolved = functions.convolve(xBC.transpose(1, 2), weight, bias, seq_idx, None, None, True).transpose(1, 2)
    return split_heads(convolved, len(A), settings.head_dim, settings.groups)


def _scan_settings(
    z: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None,
    seq_idx: Tensor | None,
    settings: _Settings,
) -> dict[str, Any]:
    """What the scan is given forward and backward. Without a norm it multiplies by the gate, too."""
    return {
        "chunk_size": settings.chunk_size,
        "D": D,
        "z": z.unflatten(-1, (-1, settings.head_dim)) if norm_weight is None else None,
        "dt_bias": dt_bias,
        "seq_idx": seq_idx,
        "dt_softplus": True,
        "dt_limit": settings.dt_limit,
    }


def _recompute_gated(
    y: Tensor, scanned: Tensor, z: Tensor, weight: Tensor | None, norm: dict[str, float | int | bool | None]
) -> None:
    """Let y be normalised and gated again in backward, from the scan's output, which is kept."""
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
