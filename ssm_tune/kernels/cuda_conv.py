"""The short causal convolution in CUDA C++ (`kernels/cuda`), compiled at run time: documents built in, both directions.

It needs neither an extension, nor Triton, nor a compiler: only the NVRTC of PyTorch's own wheels. Against the package
causal_conv1d: padding inside documents, documents together with an initial state, and any multiple of four channels.
How it is laid out: `cuda/conv_common.cuh`; why: benchmarks/NOTES.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.conv_gathered import remaining_rows
from ssm_tune.kernels.cuda_tokens import ELEMENTS, MOST_ROWS, aligned, find_marks, pointer, structure, tokens_of
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.gradient_halves import gradient_of
from ssm_tune.kernels.gradient_sums import second_gradient, takes_two
from ssm_tune.kernels.part_sums import add_up, added_together
from ssm_tune.kernels.runtime_compile import Kernel, compiled

# As in conv_common.cuh.
THREADS, CHANNELS, WARPS = 128, 128, 4
WIDTHS = (2, 3, 4)
RUN = 32  # tokens of a warp

_Forward = structure("ForwardArguments", "x y", "weight bias marks", "", "length dim run")
_Backward = structure("BackwardArguments", "x dy more dx", "weight bias marks dweight dbias", "", "length dim run")


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
        Unsupported: a dtype, a width, channels or a length that the kernel is not written for, or nothing to do.
    """
    width = weight.shape[-1]
    refuse(x, weight, bias)
    rows, documents, head = x, seq_idx, 0
    if initial_state is not None:
        rows, head = torch.cat([initial_state.transpose(1, 2).to(x.dtype), x], dim=1), width - 1
        documents = None if seq_idx is None else _with_head(seq_idx, head)
    marks = None if documents is None else find_marks(documents)
    bias = None if bias is None else bias.to(weight.dtype)
    y = _Conv.apply(rows, weight, bias, marks, activation == "silu")
    y = y[:, head:] if head else y
    return (y, remaining_rows(x, seq_idx, initial_state, width)) if return_final_state else y


def refuse(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises Unsupported for what the kernels cannot do: x (batch, length, dim)."""
    batch, length, dim = x.shape
    for tensor in (x, weight, bias):
        if tensor is not None and tensor.dtype not in ELEMENTS:
            raise Unsupported(f"{tensor.dtype} is computed in PyTorch only")
    if weight.shape[-1] not in WIDTHS:
        raise Unsupported(f"a width of {weight.shape[-1]}, not one of {', '.join(map(str, WIDTHS))}")
    if dim % 4:
        raise Unsupported(f"{dim} channels, no multiple of 4")
    if batch > MOST_ROWS or _blocks(length + weight.shape[-1]) > MOST_ROWS or x.numel() == 0:
        raise Unsupported(f"x is {tuple(x.shape)}")


def _with_head(seq_idx: Tensor, head: int) -> Tensor:
    """Documents with the tokens of a state before them, which are of the first real token's document."""
    first = (seq_idx != -1).to(torch.uint8).argmax(dim=1, keepdim=True)
    return torch.cat([seq_idx.gather(1, first).expand(-1, head), seq_idx], dim=1)


def _readable(weight: Tensor) -> Tensor:
    """The tensor contiguous, the factors of a channel at once readable."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _blocks(length: int) -> int:
    return -(-length // (RUN * WARPS))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, marks: Tensor | None, silu: bool) -> Tensor:
        ctx.silu, ctx.gradient_of_x = silu, gradient_of(x)
        takes_two(ctx)
        x, weight = aligned(x), _readable(weight)
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight, bias, marks)
        return convolve(x, weight, bias, marks, silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, marks = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx = ctx.gradient_of_x(x)
        both = (dy, second_gradient(ctx))
        with added_together(x.device):
            dweight, dbias = convolve_backward(x, weight, bias, marks, both, dx, need_weight, ctx.silu)
        return dx, dweight, dbias, None, None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, marks: Tensor | None, silu: bool = True) -> Tensor:
    """The forward pass, unknown to autograd: x (batch, length, dim), channels side by side; `marks` of `find_marks`."""
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    arguments = _Forward(x=tokens_of(x), y=tokens_of(y), **_common(x, weight, bias, marks))
    with device_of(x):
        _kernel("forward", x, weight, {"SILU": int(silu)}).launch(_grid(x), arguments)
    return y


def convolve_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    marks: Tensor | None,
    dy: tuple[Tensor, Tensor | None],
    dx: Tensor,
    need_weight: bool,
    silu: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass of `convolve`, of one or two gradients by its output; writes the gradient of x into `dx`.

    Returns:
        The gradients of weight and bias, if there is one, in the dtype of weight, if they are needed (`add_up`).
    """
    batch, length, dim = x.shape
    first, second = (None if gradient is None else aligned(gradient) for gradient in dy)
    parts = batch * _blocks(length) if need_weight else 0
    by_weight, by_bias = (torch.empty(parts, *size, device=x.device) for size in ((dim, weight.shape[1]), (dim,)))
    tensors = {"x": tokens_of(x), "dy": tokens_of(first), "more": tokens_of(second), "dx": tokens_of(dx)}
    sums = {"dweight": pointer(by_weight), "dbias": pointer(by_bias)}
    arguments = _Backward(**tensors, **sums, **_common(x, weight, bias, marks))
    with device_of(x):
        defines = {"SILU": int(silu), "NEED_WEIGHT": int(need_weight), "TWO": int(second is not None)}
        _kernel("backward", x, weight, defines).launch(_grid(x), arguments)
    if not need_weight:
        return None, None
    by_weight = add_up(by_weight.flatten(1), weight.dtype).view(weight.shape)
    return by_weight, None if bias is None else add_up(by_bias, weight.dtype)


def _common(x: Tensor, weight: Tensor, bias: Tensor | None, marks: Tensor | None) -> dict[str, Any]:
    pointers = {"weight": weight, "bias": bias, "marks": marks}
    sizes = {"length": x.shape[1], "dim": x.shape[2], "run": RUN}
    return {name: pointer(tensor) for name, tensor in pointers.items()} | sizes


def _grid(x: Tensor) -> tuple[int, int, int]:
    batch, length, dim = x.shape
    return -(-dim // CHANNELS), _blocks(length), batch


def _kernel(direction: str, x: Tensor, weight: Tensor, defines: dict[str, int]) -> Kernel:
    files = ("intrinsics.cuh", "tokens.cuh", "conv_common.cuh", f"conv_{direction}.cu")
    elements = {"ELEMENT": ELEMENTS[x.dtype], "WEIGHT": ELEMENTS[weight.dtype], "WIDTH": weight.shape[1]}
    return compiled(f"conv_{direction}", files, elements | defines, x.device, THREADS, 0)
