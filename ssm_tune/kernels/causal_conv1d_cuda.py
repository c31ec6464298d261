"""The causal convolution and its step form through the package causal_conv1d.

`package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.conv_gathered import visible_rows
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import find_documents
from ssm_tune.kernels.gradient_halves import gradient_of
from ssm_tune.kernels.packages import CAUSAL_CONV1D, Package

# Offsets within a tensor are 32-bit.
_LARGEST = 2**31
# Rows of channels are read eight at a time, in pieces of 16 bytes.
_TOGETHER, _BYTES = 8, 16


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    package: Package = CAUSAL_CONV1D,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.causal_conv1d`. Rows too large for 32-bit offsets are done one by one.

    Raises:
        Unsupported: float64, a width or a number of channels that the kernel has not, documents together with an
            initial state or with padding inside them, or a row beyond 32-bit offsets.
    """
    bias = None if bias is None else bias.to(weight.dtype)
    convolve = _convolution(package, weight, bias, activation)
    batch, length, dim = x.shape
    width = weight.shape[-1]
    _refuse(x, weight)
    documents = None if seq_idx is None else find_documents(seq_idx)
    number = None
    if documents is not None:
        if initial_state is not None:
            raise Unsupported("documents together with an initial state")
        if documents.gaps:
            raise Unsupported("padding inside a document")
        number = documents.marked  # -1 is the kernel's own mark of what is nothing
    window = None
    if initial_state is not None:
        window = initial_state.to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    values = _readable(x)
    a_row = max(length * values.stride(1), length * dim)
    if a_row >= _LARGEST:
        raise Unsupported(f"{length} tokens in a row, beyond 32-bit offsets")
    together = batch == 1 or batch * max(a_row, values.stride(0)) < _LARGEST
    with device_of(x):
        if together:
            y = convolve(values, number, window)
        else:
            one = [[None if t is None else t[row : row + 1] for t in (values, number, window)] for row in range(batch)]
            y = torch.cat([convolve(*given) for given in one])
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)  # zero already, but not yet for a gradient
    if not return_final_state:
        return y
    return y, _remaining(x, seq_idx, initial_state, width)


def _convolution(
    package: Package, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """Of x (batch, length, dim), documents' numbers and the window before x."""
    whole, functions = package.function("causal_conv1d_fn"), _without_autograd(package)

    def convolve(x: Tensor, number: Tensor | None, window: Tensor | None) -> Tensor:
        number = None if number is None else number.contiguous()
        if functions is not None and window is None:
            return _Conv.apply(x, weight, bias, number, activation == "silu", *functions)
        turned = x.transpose(1, 2)
        y = whole(turned, weight, bias, seq_idx=number, initial_states=window, activation=activation)
        return y.transpose(1, 2)

    return convolve


def _without_autograd(package: Package) -> tuple[Callable[..., Any], ...] | None:
    """Forward and backward of the package's function. None where it has not what version 1.6 has: only those below
    its interface are told where to write."""
    try:
        return tuple(package.function(f"cpp_functions.causal_conv1d_{way}_function") for way in ("fwd", "bwd"))
    except (ImportError, AttributeError):
        return None


class _Conv(torch.autograd.Function):
    """The package's own, but that the gradient by x is written where it is to go (`gradient_halves.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: Tensor | None,
        silu: bool,
        function: Callable[..., Any],
        backward_function: Callable[..., Any],
    ) -> Tensor:
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight, bias, number)
        ctx.silu, ctx.function, ctx.gradient_of_x = silu, backward_function, gradient_of(x)
        return function(x.transpose(1, 2), weight, bias, number, None, None, silu).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, number = ctx.saved_tensors
        dx, dy = ctx.gradient_of_x(x), _readable(dy)
        with device_of(x):
            given = (x.transpose(1, 2), weight, bias, dy.transpose(1, 2), number, None, None, dx.transpose(1, 2))
            _, dweight, dbias, _ = ctx.function(*given, False, ctx.silu)
        return dx, dweight, dbias, None, None, None, None


def _refuse(x: Tensor, weight: Tensor) -> None:
    dim, width = weight.shape
    if torch.float64 in {x.dtype, weight.dtype}:
        raise Unsupported("float64 is computed in PyTorch only")
    if not 2 <= width <= 4:
        raise Unsupported(f"a width of {width}, only 2, 3 and 4")
    if dim % _TOGETHER:
        raise Unsupported(f"{dim} channels, only multiples of {_TOGETHER}")


def _readable(x: Tensor) -> Tensor:
    """x with channels side by side, and every token's where the kernel can read them in whole pieces."""
    fits = x.stride(2) == 1 and x.stride(1) > 1 and x.stride(0) % _TOGETHER == 0 and x.stride(1) % _TOGETHER == 0
    return x if fits and x.data_ptr() % _BYTES == 0 else x.clone(memory_format=torch.contiguous_format)


def _remaining(x: Tensor, seq_idx: Tensor | None, initial_state: Tensor | None, width: int) -> Tensor:
    """The final state, (batch, dim, width - 1): a plain selection of rows, so that autograd knows its gradient."""
    batch, length, dim = x.shape
    if seq_idx is not None:
        places, seen = (part[:, -1, 1:].flip(1) for part in visible_rows(seq_idx, width))
        rows = x.gather(1, (places - (width - 1)).clamp(min=0)[..., None].expand(-1, -1, dim))
        seen = seen & (places >= width - 1)  # the rows before x are those of a state, and there is none
        return rows.masked_fill(~seen[..., None], 0.0).transpose(1, 2)
    if initial_state is None:
        initial_state = x.new_zeros(batch, dim, width - 1)
    last = x[:, max(0, length - (width - 1)) :].transpose(1, 2).to(initial_state.dtype)
    return torch.cat([initial_state, last], dim=-1)[..., -(width - 1) :]


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    package: Package = CAUSAL_CONV1D,
) -> Tensor:
    """The operation of `ssm_tune.kernels.causal_conv1d_step`.

    Raises:
        Unsupported: float64, a width that the kernel has not, or a state in another dtype than x.
    """
    if torch.float64 in {x.dtype, weight.dtype} or state.dtype != x.dtype:
        raise Unsupported(f"tokens in {x.dtype} with a state in {state.dtype}")
    if not 2 <= weight.shape[-1] <= 4:
        raise Unsupported(f"a width of {weight.shape[-1]}, only 2, 3 and 4")
    update = package.function("causal_conv1d_update")
    with device_of(x):
        return update(x, state, weight, None if bias is None else bias.to(weight.dtype), activation)
