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
from ssm_tune.kernels.devices import device_of, multiprocessors
from ssm_tune.kernels.gradient_halves import gradient_of
from ssm_tune.kernels.gradient_sums import second_gradient, takes_two
from ssm_tune.kernels.part_sums import add_up, added_together
from ssm_tune.kernels.runtime_compile import Kernel, compiled

# As in conv_common.cuh.
THREADS, CHANNELS, WARPS, GROUP = 128, 128, 4, 4
WIDTHS = (2, 3, 4)
SHORTEST = 32  # tokens of a run: some of its neighbours' are read, and computed in backward, as well
LONGEST = 2**30  # tokens of a row: they are counted in 32 bits

_SIZES = "length dim run runs count"
_Forward = structure("ForwardArguments", "x y", "weight bias marks", "", _SIZES)
_Backward = structure("BackwardArguments", "x dy more dx", "weight bias marks dweight dbias", "", _SIZES)


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
    if batch > MOST_ROWS or length > LONGEST or x.numel() == 0:
        raise Unsupported(f"x is {tuple(x.shape)}")


def _with_head(seq_idx: Tensor, head: int) -> Tensor:
    """Documents with the tokens of a state before them, which are of the first real token's document."""
    first = (seq_idx != -1).to(torch.uint8).argmax(dim=1, keepdim=True)
    return torch.cat([seq_idx.gather(1, first).expand(-1, head), seq_idx], dim=1)


def _readable(weight: Tensor) -> Tensor:
    """The tensor contiguous, the factors of a channel at once readable."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _runs(x: Tensor, blocks: int) -> dict[str, int]:
    """How rows are cut, so that all warps run at the same time: with `blocks` blocks of a multiprocessor.

    A second wave of blocks, if it is not full, leaves multiprocessors idle; and every run begins by waiting.
    """
    batch, length, dim = x.shape
    warps = blocks * multiprocessors(x.device) // -(-dim // CHANNELS) * WARPS
    runs = min(max(1, warps // batch), -(-length // SHORTEST))
    run = -(-length // (runs * GROUP)) * GROUP
    runs = -(-length // run)
    return {"run": run, "runs": runs, "count": batch * runs}


def _blocks_of_runs(count: int) -> int:
    return -(-count // WARPS)


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
    defines = {"SILU": int(silu), "BLOCKS": 5 if x.dtype == torch.float32 else 7}
    runs = _runs(x, defines["BLOCKS"])
    arguments = _Forward(x=tokens_of(x), y=tokens_of(y), **_common(x, weight, bias, marks), **runs)
    with device_of(x):
        _kernel("forward", x, weight, defines).launch(_grid(x, runs["count"]), arguments)
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
    first, second = (None if gradient is None else aligned(gradient) for gradient in dy)
    defines = {"SILU": int(silu), "NEED_WEIGHT": int(need_weight), "TWO": int(second is not None)}
    # As many as the registers suffice for.
    defines["BLOCKS"] = 3 if x.dtype == torch.float32 or (need_weight and second is not None) else 4
    runs = _runs(x, defines["BLOCKS"])
    parts = _blocks_of_runs(runs["count"]) if need_weight else 0
    by_weight, by_bias = (torch.empty(parts, *size, device=x.device) for size in (weight.shape, weight.shape[:1]))
    tensors = {"x": tokens_of(x), "dy": tokens_of(first), "more": tokens_of(second), "dx": tokens_of(dx)}
    sums = {"dweight": pointer(by_weight), "dbias": pointer(by_bias)}
    arguments = _Backward(**tensors, **sums, **_common(x, weight, bias, marks), **runs)
    with device_of(x):
        _kernel("backward", x, weight, defines).launch(_grid(x, runs["count"]), arguments)
    if not need_weight:
        return None, None
    by_weight = add_up(by_weight.flatten(1), weight.dtype).view(weight.shape)
    return by_weight, None if bias is None else add_up(by_bias, weight.dtype)


def _common(x: Tensor, weight: Tensor, bias: Tensor | None, marks: Tensor | None) -> dict[str, Any]:
    pointers = {"weight": weight, "bias": bias, "marks": marks}
    sizes = {"length": x.shape[1], "dim": x.shape[2]}
    return {name: pointer(tensor) for name, tensor in pointers.items()} | sizes


def _grid(x: Tensor, runs: int) -> tuple[int, int, int]:
    return -(-x.shape[2] // CHANNELS), _blocks_of_runs(runs), 1


def _kernel(direction: str, x: Tensor, weight: Tensor, defines: dict[str, int]) -> Kernel:
    files = ("intrinsics.cuh", "tokens.cuh", "conv_common.cuh", f"conv_{direction}.cu")
    elements = {"ELEMENT": ELEMENTS[x.dtype], "WEIGHT": ELEMENTS[weight.dtype], "WIDTH": weight.shape[1]}
    return compiled(f"conv_{direction}", files, elements | defines, x.device, THREADS, 0)
