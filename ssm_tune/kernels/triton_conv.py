"""The causal convolution in Triton: channel-last, documents built in, silu fused, forward and backward.

It needs no compiled extension. Against the package causal_conv1d: any width, number of channels and alignment, padding
inside documents, and documents together with an initial state. Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.conv_gathered import remaining_rows, visible_rows
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.gradient_halves import gradient_of
from ssm_tune.kernels.part_sums import add_up
from ssm_tune.kernels.triton_conv_kernels import conv_kernel, conv_slope_kernel

_WIDEST = 8
# Tokens and channels of a program, its warps, and how many blocks of tokens one goes through in the backward pass.
_TOKENS, _BLOCK, _WARPS, _ROUNDS = 8, 128, 4, 32
_MOST_BLOCKS = 65535  # of tokens: what a launch takes in its second dimension
_Windows = tuple[Tensor, Tensor]
_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.causal_conv1d`; everything is computed in float32.

    Raises:
        Unsupported: float64, a width beyond 8, or more tokens in a row than a launch takes (half a million).
    """
    refuse(x, weight)
    width = weight.shape[-1]
    rows, head = x, 0
    if initial_state is not None:
        rows, head = torch.cat([initial_state.transpose(1, 2).to(x.dtype), x], dim=1), width - 1
    rows = rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
    windows = None if seq_idx is None else find_windows(seq_idx, width, head)
    y = _Conv.apply(rows, weight, bias, windows, head, activation == "silu")
    if not return_final_state:
        return y
    return y, remaining_rows(x, seq_idx, initial_state, width)


def refuse(x: Tensor, weight: Tensor) -> None:
    """Raises Unsupported if the kernels cannot do it: x (batch, length, ...)."""
    width = weight.shape[-1]
    if torch.float64 in {x.dtype, weight.dtype}:
        raise Unsupported("float64 is computed in PyTorch only")
    if width > _WIDEST:
        raise Unsupported(f"a width of {width}, at most {_WIDEST}")
    most = _MOST_BLOCKS * _TOKENS - (width - 1)
    if x.shape[1] > most:
        raise Unsupported(f"{x.shape[1]} tokens in a row, at most {most}")


def find_windows(seq_idx: Tensor, width: int, head: int) -> _Windows:
    """What tokens see: for every token and number of places back, the row of the input (the `head` rows of a state,
    then the tokens), (batch, length, width), -1 for none; and the other way round, for every row the token that sees
    it, (batch, head + length, width). int32; kept as long as that very tensor lives unchanged."""
    kept = _found.get(seq_idx)
    version = None if seq_idx.is_inference() else seq_idx._version
    if kept is None or kept[0] != version or version is None:
        kept = (version, {})
        if version is not None:
            _found[seq_idx] = kept
    found = kept[1].get((width, head))
    if found is None:
        found = kept[1][width, head] = _find_windows(seq_idx, width, head)
    return found


def _find_windows(seq_idx: Tensor, width: int, head: int) -> _Windows:
    batch, length = seq_idx.shape
    places, seen = (part[:, :length] for part in visible_rows(seq_idx, width))
    places = places - (width - 1 - head)  # without a state there are no rows before the tokens
    seen = seen & (places >= 0) & (seq_idx != -1)[..., None]
    # One more row takes what nobody sees.
    followers = places.new_full((batch, head + length + 1, width), -1)
    tokens = torch.arange(length, device=seq_idx.device)[None, :, None].expand(batch, length, width)
    followers.scatter_(1, places.where(seen, head + length), tokens)
    return places.where(seen, -1).to(torch.int32).contiguous(), followers[:, :-1].to(torch.int32).contiguous()


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: _Windows | None, head: int, silu: bool
    ) -> Tensor:
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        table, followers = (None, None) if windows is None else windows
        ctx.save_for_backward(x, weight, bias, table, followers)
        ctx.head, ctx.silu = head, silu
        if ctx.needs_input_grad[0]:
            ctx.gradient_of_x = gradient_of(x)
        return convolve(x, weight, bias, table, head, silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, table, followers = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx = ctx.gradient_of_x(x) if need_x else None
        windows = None if table is None else (table, followers)
        found = convolve_backward(x, weight, bias, windows, dy, dx, need_weight, ctx.head, ctx.silu)
        return dx, *found, None, None, None


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None, head: int = 0, silu: bool = True
) -> Tensor:
    """The forward pass, unknown to autograd: of rows x (batch, head + length, dim), whose channels lie side by side;
    table: the first of `find_windows`, or None for no documents."""
    y = torch.empty(x.shape[0], x.shape[1] - head, x.shape[2], device=x.device, dtype=x.dtype)
    _convolve(x, weight, bias, table, y, y.shape[1], head, silu=silu)
    return y


def convolve_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: _Windows | None,
    dy: Tensor,
    dx: Tensor | None,
    need_weight: bool,
    head: int = 0,
    silu: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass of `convolve`; writes the gradient of x into `dx`, if it is given.

    Returns:
        The gradients of weight and bias, if they are needed.
    """
    table, followers = (None, None) if windows is None else windows
    batch, rows, dim = x.shape
    length, width = rows - head, weight.shape[1]
    slopes, dy = dy, dy.contiguous()
    by_weight = by_bias = None
    if silu or need_weight:
        chunks = triton.cdiv(length, _TOKENS * _ROUNDS)
        slopes = torch.empty(batch, length, dim, device=x.device, dtype=x.dtype)
        dweight = x.new_empty((batch, chunks, width + 1, dim) if need_weight else (1,), dtype=torch.float32)
        with device_of(x):
            conv_slope_kernel[(triton.cdiv(dim, _BLOCK), chunks, batch)](
                x, weight, _or(bias, weight), _or(table, x), dy, slopes, dweight,
                dim, length, chunks, _ROUNDS, x.stride(0), x.stride(1),
                **_settings(width, head, bias, table), SILU=silu, NEED_WEIGHT=need_weight,
            )  # fmt: skip
        if need_weight:
            total = add_up(dweight.view(batch * chunks, -1), weight.dtype).view(width + 1, dim)
            by_weight = total[:width].t()  # a view, as that of a bias of the same dtype: the sum may be put off
            by_bias = None if bias is None else total[width].to(bias.dtype)
    if dx is not None:
        _convolve(slopes, weight, None, followers, dx, length, head, reverse=True)
    return by_weight, by_bias


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    y: Tensor,
    length: int,
    head: int,
    silu: bool = False,
    reverse: bool = False,
) -> None:
    """Into y, whose channels lie side by side; rows and tokens may be apart."""
    batch, rows, dim = y.shape
    with device_of(x):
        conv_kernel[(triton.cdiv(dim, _BLOCK), triton.cdiv(rows, _TOKENS), batch)](
            x, weight, _or(bias, weight), _or(table, x), y, dim, length, x.stride(0), x.stride(1),
            y.stride(0), y.stride(1), **_settings(weight.shape[1], head, bias, table), SILU=silu, REVERSE=reverse,
        )  # fmt: skip


def _settings(width: int, head: int, bias: Tensor | None, table: Tensor | None) -> dict[str, Any]:
    """What every kernel here is compiled for."""
    return {
        "HEAD": head,
        "WIDTH": width,
        "TOKENS": _TOKENS,
        "BLOCK": _BLOCK,
        "HAS_BIAS": bias is not None,
        "HAS_TABLE": table is not None,
        "num_warps": _WARPS,
    }


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that is not used."""
    return other if tensor is None else tensor
