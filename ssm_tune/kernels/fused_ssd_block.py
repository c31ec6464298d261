"""`ssd_block` in one piece, on functions that know nothing of autograd: what is kept, and where gradients are written.

As in mamba_ssm's fused call the input is kept, the convolution is computed again in backward, and the gradients of z,
x, B, C and dt are written side by side into one tensor. The scan's output, a third of what a layer keeps, is kept where
the scan takes long; where it does not, it is computed again too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels import ssd_block_parts
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import Documents
from ssm_tune.kernels.part_sums import added_together
from ssm_tune.kernels.recompute import ByProduct, is_ours_alone, recomputable, recomputing, reference_to
from ssm_tune.kernels.ssd_block_parts import split_heads, split_projected

Marks = tuple[Tensor, Tensor] | None  # documents of tokens, (batch, length), int32: `marked` and `number` of Documents


class Settings(NamedTuple):
    """What is no tensor."""

    head_dim: int
    groups: int
    chunk_size: int
    dt_limit: tuple[float, float]
    eps: float
    group_size: int
    norm_before_gate: bool


class Functions(NamedTuple):
    """What the block consists of. x, B and C are given by heads and groups; z, by heads, or None for no gate.

    convolve: of (xBC, weight, bias, marks), with silu. convolve_backward: of (xBC, weight, bias, marks, gradient of the
    result, where that of xBC goes, whether others are needed); gives those of weight and bias. scan: of (x, dt, A, B,
    C, D, dt_bias, z, marks, settings); gives the output and, the same without a gate, what backward wants.
    scan_backward: of (gradient of the output, x, dt, A, B, C, D, dt_bias, z, what it wants, marks, settings, where the
    gradients of x, dt, B, C and z go, by "dx" and so on) and `need_sums`, whether others are needed; gives those of A,
    D and dt_bias. Others may be put off (`part_sums.add_up`), and None where they are not needed. normalise,
    normalise_backward: `triton_gated_norm`. scan_again: if the scan is quick enough to be computed again, of (x, dt, A,
    B, C, D, dt_bias, marks, settings); gives the output without a gate, and what it has found on the way that
    scan_backward takes by keywords.
    """

    convolve: Callable[..., Tensor]
    convolve_backward: Callable[..., tuple[Tensor | None, Tensor | None]]
    scan: Callable[..., tuple[Tensor, Tensor]]
    scan_backward: Callable[..., tuple[Tensor | None, ...]]
    normalise: Callable[..., Any]
    normalise_backward: Callable[..., Any]
    scan_again: Callable[..., tuple[Tensor, dict[str, Any]]] | None = None


def run_block(
    functions: Functions,
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None,
    documents: Documents | None,
    settings: Settings,
) -> Tensor:
    """The operation of `ssm_tune.kernels.ssd_block`; documents without padding inside them."""
    outputs = ByProduct()
    y, scanned = _Block.apply(
        projected,
        conv_weight,
        None if conv_bias is None else conv_bias.to(conv_weight.dtype),
        A.float(),
        D.float(),
        dt_bias.float(),
        norm_weight,
        # To the convolution -1 is nothing: x, B and C are zero there, so that nothing enters a state, nor leaves.
        *((None, None) if documents is None else (documents.marked.contiguous(), documents.number)),
        settings,
        functions,
        outputs,
    )
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)  # zero already, but not yet for a gradient
    norm = {name: getattr(settings, name) for name in ("eps", "group_size", "norm_before_gate")}
    _recompute_gated(y, scanned, projected[..., : y.shape[-1]], norm_weight, norm, outputs)
    return y


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
        marked: Tensor | None,
        number: Tensor | None,
        settings: Settings,
        functions: Functions,
        outputs: ByProduct,
    ) -> tuple[Tensor, Tensor]:
        z, xBC, dt = split_projected(projected, conv_weight, A)
        marks = None if marked is None else (marked, number)
        gate = z.unflatten(-1, (-1, settings.head_dim)) if norm_weight is None else None
        with device_of(projected):
            convolved = functions.convolve(xBC, conv_weight, conv_bias, marks)
            x, B, C = split_heads(convolved, len(A), settings.head_dim, settings.groups)
            out, scanned = functions.scan(x, dt, A, B, C, D, dt_bias, gate, marks, settings)
            again = functions.scan_again is not None and recomputing()
            left = _Left()
            if again:
                given = (conv_weight, conv_bias, A, D, dt_bias), marks, settings, functions
                _recompute_scanned(convolved, scanned, projected, *given, left)
            y, scales = out.flatten(-2), None
            if norm_weight is not None:
                norm = (settings.eps, settings.group_size, settings.norm_before_gate)
                y, scales = functions.normalise(y, z, norm_weight, *norm)
        vectors = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
        ctx.save_for_backward(projected, *vectors, marked, number, convolved if again else None, scanned, scales)
        ctx.settings, ctx.functions, ctx.outputs, ctx.left = settings, functions, outputs, left
        ctx.mark_non_differentiable(scanned)
        ctx.set_materialize_grads(False)
        return y, scanned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 12
        projected, *vectors, marked, number, convolved, scanned, scales = ctx.saved_tensors
        conv_weight, conv_bias, A, D, dt_bias, norm_weight = vectors
        settings, functions = ctx.settings, ctx.functions
        marks = None if marked is None else (marked, number)
        z, xBC, dt = split_projected(projected, conv_weight, A)
        dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
        dz, dxBC, ddt = split_projected(dprojected, conv_weight, A)
        # Over what only this pass has, as soon as it has been read: see `Functions`.
        over = convolved is not None and convolved.is_contiguous() and is_ours_alone(convolved)
        dconvolved = convolved if over else torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
        dx, dB, dC = split_heads(dconvolved, len(A), settings.head_dim, settings.groups)
        dscanned, dnorm, gate, into = dy, None, None, {"dx": dx, "ddt": ddt, "dB": dB, "dC": dC}
        needed = ctx.needs_input_grad
        with device_of(projected), added_together():
            if norm_weight is None:
                gate, into["dz"] = (t.unflatten(-1, (len(A), settings.head_dim)) for t in (z, dz))
            else:
                norm = (settings.group_size, settings.norm_before_gate, needed[6])
                y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if ctx.outputs.is_expected() else None
                dscanned, dnorm = functions.normalise_backward(
                    dy, scanned.flatten(-2), z, norm_weight, scales, dz, *norm, y
                )
                if functions.scan_again is not None:
                    scanned = None
                if y is not None:
                    ctx.outputs.give([y])
            if convolved is None:
                convolved = functions.convolve(xBC, conv_weight, conv_bias, marks)
            x, B, C = split_heads(convolved, len(A), settings.head_dim, settings.groups)
            dscanned = dscanned.unflatten(-1, (len(A), settings.head_dim))
            given = (x, dt, A, B, C, D, dt_bias, gate, scanned, marks, settings)
            known = ctx.left.take() | {"need_sums": any(needed[3:6])}
            dA, dD, ddt_bias = functions.scan_backward(dscanned, *given, into, **known)
            given = (xBC, conv_weight, conv_bias, marks, dconvolved, dxBC, any(needed[1:3]))
            dweight, dbias = functions.convolve_backward(*given)
        return dprojected, dweight, dbias, dA, dD, ddt_bias, dnorm, None, None, None, None, None


class _Left:
    """What a scan that was computed again leaves to its backward pass; for one such pass, after which it is gone."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def take(self) -> dict[str, Any]:
        """As keywords; none where nothing was computed again."""
        found, self.found = self.found, {}
        return found


def _recompute_gated(
    y: Tensor,
    scanned: Tensor,
    z: Tensor,
    weight: Tensor | None,
    norm: dict[str, float | int | bool | None],
    outputs: ByProduct,
) -> None:
    """Let y be normalised and gated again in backward, from the scan's output."""
    given, weight = (reference_to(scanned), reference_to(z)), None if weight is None else weight.detach()

    def gated_again() -> list[Tensor]:
        scanned, z = (tensor() for tensor in given)
        return [ssd_block_parts.gated(scanned.flatten(-2), z, weight, **norm)]

    recomputable([y], gated_again, by_product=outputs)


def _recompute_scanned(
    convolved: Tensor,
    scanned: Tensor,
    projected: Tensor,
    vectors: tuple[Tensor | None, ...],
    marks: Marks,
    settings: Settings,
    functions: Functions,
    left: _Left,
) -> None:
    """Let the convolution and the scan be computed again in backward, both for whoever asks for one first."""
    given, (weight, bias, A, D, dt_bias) = reference_to(projected), (None if t is None else t.detach() for t in vectors)

    def scan_again() -> list[Tensor]:
        _, xBC, dt = split_projected(given(), weight, A)
        with device_of(xBC):
            convolved = functions.convolve(xBC, weight, bias, marks)
            x, B, C = split_heads(convolved, len(A), settings.head_dim, settings.groups)
            scanned, left.found = functions.scan_again(x, dt, A, B, C, D, dt_bias, marks, settings)
            return [convolved, scanned]

    recomputable([convolved, scanned], scan_again)
