"""The causal convolution and its step form through the package causal_conv1d.

`package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.conv_gathered import visible_rows
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import find_documents
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
        initial
            state or with padding inside them, or a row beyond 32-bit offsets.
    """
    convolve = package.function("causal_conv1d_fn")
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
    rows = batch if batch * max(a_row, values.stride(0)) < _LARGEST else 1
    bias = None if bias is None else bias.to(weight.dtype)
    with device_of(x):
        parts = []
        for row in range(0, batch, rows):
            some = slice(row, row + rows)
            kept = None if window is None else window[some]
            seen = None if number is None else number[some].contiguous()
            turned = values[some].transpose(1, 2)
            y = convolve(turned, weight, bias, seq_idx=seen, initial_states=kept, activation=activation)
            parts.append(y.transpose(1, 2))
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)  # zero already, but not yet for a gradient
    if not return_final_state:
        return y
    return y, _remaining(x, seq_idx, initial_state, width)


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
