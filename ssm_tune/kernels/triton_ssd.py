"""Mamba-2's scan in Triton: forward and backward, documents and initial and final states, on the tensor cores.

Nothing but the inputs is kept for backward, which works out the states again. bfloat16 and float16 are multiplied as
they are and summed in float32, the states between chunks too; float32 is multiplied in three parts (TF32x3), as exact
as float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.compile_ahead import compiling_only
from ssm_tune.kernels.devices import recorded_launches, shared_memory
from ssm_tune.kernels.documents import find_documents
from ssm_tune.kernels.reference import time_step
from ssm_tune.kernels.triton_ssd_backward import scan_backward
from ssm_tune.kernels.triton_ssd_common import CHUNK, NO_LIMIT, empty_states, prepare_steps
from ssm_tune.kernels.triton_ssd_forward import scan_forward

_SHARED = 157 * 1024  # bytes of shared memory that the largest kernel takes: an A100 has 163 KB, an RTX 4090 99
_MOST_ROWS = 65535  # what a launch takes in its third dimension
_compiled: set[tuple[Any, ...]] = set()  # what the kernels of both passes are ready for
# What has been run on a GPU: states and channels of a head, and dtypes.
_MOST_STATES, _MOST_CHANNELS = 128, 128
_RUN_ON_GPUS = (torch.bfloat16, torch.float16)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int = 256,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = NO_LIMIT,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.ssd_scan`; x, B and C are used in the dtype of x, the rest in float32.

    `chunk_size` is not used: chunks have the size that the kernels are made for.

    Raises:
        Unsupported: float64, float32 on a GPU, heads of more than 128 states or channels, a GPU with little shared
            memory, no tokens, or more rows than a launch takes.
    """
    refuse_sizes(x, x.shape[-1], B.shape[-1])
    vectors = (A, D, dt_bias, initial_state)
    A, D, dt_bias, initial_state = (None if t is None else t.float().contiguous() for t in vectors)
    B, C = B.to(x.dtype), C.to(x.dtype)
    documents = None if seq_idx is None else find_documents(seq_idx)
    if documents is not None and documents.is_padding is not None:
        # No step: the state passes, and nothing enters. The kernels' own limits would make a step of it.
        padding = documents.is_padding[..., None]
        dt = time_step(dt.masked_fill(padding, 0.0), dt_bias, dt_softplus, dt_limit).masked_fill(padding, 0.0)
        dt_bias, dt_softplus, dt_limit = None, False, NO_LIMIT
        x, B, C = (t.masked_fill(padding[..., None], 0.0) for t in (x, B, C))
    x, B, C = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, B, C))
    number = None if documents is None else documents.number
    settings = dt_softplus, tuple(dt_limit), return_final_state
    y, final = _Scan.apply(x, dt, A, B, C, D, dt_bias, initial_state, number, *settings)
    return (y, final) if return_final_state else y


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    number: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass, unknown to autograd: y, and the final state, if asked for. Arguments: see `scan_backward`."""
    given = (x, dt, A, B, C, D, dt_bias, number, initial_state, dt_softplus, dt_limit)
    if x.is_cuda:
        _compile_together(*given, return_final_state)
    return _scan(*given, return_final_state)


def scan_again(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    number: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, dict[str, Any]]:
    """y once more, in backward, and what it leaves to `scan_backward`: `steps`, and `states`, the size of two y's."""
    steps = prepare_steps(dt, A, dt_bias, dt_softplus, dt_limit)
    states = empty_states(x, B)
    y, _ = scan_forward(x, B, C, D, steps, number, initial_state, False, states)
    return y, {"steps": steps, "states": states}


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    number: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    steps = prepare_steps(dt, A, dt_bias, dt_softplus, dt_limit)
    return scan_forward(x, B, C, D, steps, number, initial_state, return_final_state)


def _compile_together(*given: Any) -> None:
    """Compile the kernels of both passes side by side, when a model is first met: a third of the time of one by one."""
    x, dt, _, B, C = given[:5]
    layouts = [(t.dtype, t.shape[2:], t.stride()[1:]) for t in (x, dt, B, C)]
    kinds = [t if isinstance(t, bool | tuple) else None if t is None else t.dim() for t in given[5:]]
    key = (x.device, x.shape[1] % CHUNK == 0, *layouts, *kinds)
    if key in _compiled:
        return
    _compiled.add(key)
    # Where nothing can be compiled ahead, they run.
    names = {"dx": x, "dB": B, "dC": C, "ddt": dt}
    into = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for name, t in names.items()}
    with compiling_only():
        _scan(*given)
        scan_again(*given[:-1])
        scan_backward(x, *given[:-1], **into)
        with recorded_launches():  # which may be other kernels
            _scan(*given)
            scan_again(*given[:-1])
            scan_backward(x, *given[:-1], **into)


def refuse_sizes(x: Tensor, channels: int, states: int) -> None:
    """Raises Unsupported for what the kernels cannot do: x (batch, length, ...), and the sizes of a head."""
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed in PyTorch only")
    if x.is_cuda and x.dtype not in _RUN_ON_GPUS:
        raise Unsupported(f"{x.dtype}: these kernels have not been run with it on a GPU")
    if x.is_cuda and shared_memory(x.device) < _SHARED:
        raise Unsupported(f"a GPU with {shared_memory(x.device)} bytes of shared memory a program, at least {_SHARED}")
    if states > _MOST_STATES or channels > _MOST_CHANNELS:
        raise Unsupported(
            f"heads of {states} states and {channels} channels, at most {_MOST_STATES} and {_MOST_CHANNELS}"
        )
    if not x.numel() or x.shape[0] > _MOST_ROWS:
        raise Unsupported(f"{x.shape[0]} rows of {x.shape[1]} tokens, at least one of one, at most {_MOST_ROWS} rows")


class _Scan(torch.autograd.Function):
    """Gives y and, if asked for, the final state."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        number: Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        return_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, initial_state, number)
        ctx.settings = dt_softplus, dt_limit
        ctx.set_materialize_grads(False)
        given = (x, dt, A, B, C, D, dt_bias, number, initial_state, dt_softplus, dt_limit)
        return scan(*given, return_final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None and dfinal is None:
            return (None,) * 12
        x, dt, A, B, C, D, dt_bias, initial_state, number = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        dx, ddt, dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt, B, C))
        given = (x, dt, A, B, C, D, dt_bias, number, initial_state, *ctx.settings)
        dA, dD, dbias, dinitial = scan_backward(dy, *given, dx=dx, dB=dB, dC=dC, ddt=ddt, dfinal=dfinal)
        dbias = None if dt_bias is None else dbias
        return dx, ddt, dA, dB, dC, dD, dbias, dinitial, None, None, None, None
