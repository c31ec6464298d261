"""Mamba-1's selective scan in CUDA C++ (`kernels/cuda`), compiled at run time: documents built in, both directions.

It needs neither an extension, nor Triton, nor a compiler: only the NVRTC of PyTorch's own wheels. Inputs and outputs
are (batch, length, dim) as the projections beside it give and take them. A row is done in one go by blocks of 32
channels, so that nothing has to be known beforehand. Forward keeps the state before every 96 tokens, from which
backward works. How it is laid out: `cuda/scan_common.cuh`; why: benchmarks/NOTES.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.cuda_tokens import (
    ELEMENTS,
    MOST_ROWS,
    TILE,
    aligned,
    find_marks,
    pointer,
    structure,
    tokens_of,
    wide,
)
from ssm_tune.kernels.devices import device_of, multiprocessors
from ssm_tune.kernels.gradient_halves import gradient_of
from ssm_tune.kernels.part_sums import add_up, added_together
from ssm_tune.kernels.recompute import ByProduct, is_ours_alone, recomputable, recomputing, reference_to
from ssm_tune.kernels.runtime_compile import Kernel, compiled

# As in scan_common.cuh.
THREADS, CHANNELS, CHUNK, SEGMENT = 128, 32, 96, 8
STATES = (4, 8, 16, 32)
_BLOCKS = 4  # of a multiprocessor
_CAPABILITY = (8, 0)  # copies without waiting, TF32


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.selective_scan`; everything is computed in float32.

    In bfloat16 and float16 the terms of dB and dC are cut to 11 bits before they are summed (TF32), which is finer
    than the result. Inputs of several dtypes are all read as float32.

    Raises:
        Unsupported: a dtype, a number of states or channels that the kernel is not written for, or nothing to do.
    """
    given = [t for t in (x, dt, B, C, z) if t is not None]
    _check(given, A.shape[-1])
    dtype = x.dtype
    if len({t.dtype for t in given}) > 1:
        x, dt, B, C = (t.float() for t in (x, dt, B, C))
        z = None if z is None else z.float()
    marks = None if seq_idx is None else find_marks(seq_idx)
    outputs = ByProduct()
    y, state, kept = _Scan.apply(x, dt, A, B, C, D, z, dt_bias, initial_state, marks, dt_softplus, outputs)
    if recomputing() and y.requires_grad:
        vectors = [None if t is None else t.detach() for t in (A, D, dt_bias)]
        tokens = [None if t is None else reference_to(t) for t in (x, dt, B, C, z)]

        def scan_again() -> list[Tensor]:
            again = [None if tensor is None else tensor() for tensor in tokens]
            return [_outputs_again(_row(*again, *vectors, marks, dt_softplus), kept)]

        recomputable([y], scan_again, by_product=outputs)
    y = y.to(dtype)
    return (y, state) if return_final_state else y


def _check(given: list[Tensor], states: int) -> None:
    batch, _, dim = given[0].shape
    for tensor in given:
        if tensor.dtype not in ELEMENTS:
            raise Unsupported(f"{tensor.dtype} is computed by the reference only")
    if given[0].is_cuda and torch.cuda.get_device_capability(given[0].device) < _CAPABILITY:
        raise Unsupported("needs a GPU of compute capability 8.0")
    if states not in STATES:
        raise Unsupported(f"{states} states, not one of {', '.join(map(str, STATES))}")
    if dim % 4:
        raise Unsupported(f"{dim} channels, no multiple of 4")
    if batch > MOST_ROWS or given[0].numel() == 0:
        raise Unsupported(f"x is {tuple(given[0].shape)}")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        marks: Tensor | None,
        dt_softplus: bool,
        outputs: ByProduct,
    ) -> tuple[Tensor, ...]:
        keep = any(ctx.needs_input_grad)
        row = _row(x, dt, B, C, z, A, D, dt_bias, marks, dt_softplus)
        first = None if initial_state is None else wide(initial_state)
        with device_of(x):
            y, kept, last = run_forward(row, first, keep)
        if keep:
            ctx.save_for_backward(*row[:-1], kept)
            ctx.dt_softplus, ctx.outputs = dt_softplus, outputs
            ctx.gradient_of_z = None if z is None else gradient_of(z)
            ctx.dtypes = [None if t is None else t.dtype for t in (A, D, dt_bias, initial_state)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept)
        return y, last, kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        row = _Row(*tensors, ctx.dt_softplus)
        with device_of(row.x):
            dy = torch.zeros_like(row.x, memory_format=torch.contiguous_format) if dy is None else aligned(dy)
            dlast = None if dlast is None else wide(dlast)
            dz = None if row.z is None else ctx.gradient_of_z(row.z)
            wanted = row.z is not None and ctx.outputs.is_expected()
            y = torch.empty(row.x.shape, dtype=row.x.dtype, device=row.x.device) if wanted else None
            dx, ddt, dBC, dA, dD, dbias, dfirst = run_backward(row, kept, dy, dlast, dz, y)
        if y is not None:
            ctx.outputs.give([y])
        states, needed = row.A.shape[1], ctx.needs_input_grad
        *dtypes, state_dtype = ctx.dtypes
        with added_together(row.x.device):
            dBC = add_up(dBC.flatten(1), row.B.dtype).view(dBC.shape[1:])
            dA, dD, dbias = (
                add_up(parts.flatten(1), dtype).view(parts.shape[1:]) if need else None
                for parts, dtype, need in zip((dA, dD, dbias), dtypes, (needed[2], needed[5], needed[7]), strict=True)
            )
        dB, dC = dBC[..., :states], dBC[..., states:]
        gradients = [dx, ddt, dA, dB, dC, dD, dz, dbias, dfirst.to(state_dtype) if needed[8] else None]
        return (*(g if need else None for g, need in zip(gradients, needed, strict=False)), None, None, None)


class _Row(NamedTuple):
    """The inputs of a scan as the kernels read them: tokens of one dtype, aligned; A, D and the bias float32."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None
    A: Tensor
    D: Tensor | None
    bias: Tensor | None
    marks: Tensor | None
    softplus: bool

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return -(-self.x.shape[2] // CHANNELS)

    @property
    def chunks(self) -> int:
        return -(-self.x.shape[1] // CHUNK)

    def kernel(self, direction: str) -> Kernel:
        states = self.A.shape[1]
        shared = shared_bytes(states, self.x.element_size()) if direction == "backward" else 0
        defines = {"STATES": states, "ELEMENT": ELEMENTS[self.x.dtype], "HAS_Z": int(self.z is not None)}
        files = ("intrinsics.cuh", "tokens.cuh", "scan_common.cuh", f"scan_{direction}.cu")
        defines |= {"SOFTPLUS": int(self.softplus), "SHARED_BYTES": shared}
        return compiled(f"scan_{direction}", files, defines, self.x.device, THREADS, shared)

    def common(self) -> dict[str, Any]:
        """The arguments that both kernels take."""
        names = ("x", "dt", "B", "C", "z")
        return {name: tokens_of(getattr(self, name)) for name in names} | {
            "A": pointer(self.A),
            "D": pointer(self.D),
            "bias": pointer(self.bias),
            "marks": pointer(self.marks),
            "length": self.x.shape[1],
            "dim": self.x.shape[2],
        }


def shared_bytes(states: int, element_size: int) -> int:
    """The size of `Shared` in scan_backward.cu."""
    before = (CHUNK // SEGMENT - 1) * THREADS * states
    lines = TILE * 4 * max(32, 2 * states) * 4
    sums, wide = 3 * TILE * CHANNELS * 4, TILE * 2 * states * 4
    own, vectors = 4 * THREADS * 16, 2 * CHANNELS * 4
    raw = (2 * 4 * THREADS + TILE * 2 * states // 4) * 4 * element_size
    pointers_and_marks = 10 * 8 * 8 + 16
    return before + lines + sums + wide + own + vectors + raw + pointers_and_marks


_Forward = structure(
    "ForwardArguments",
    "x dt z B C y",
    "A D bias marks first kept last",
    "first_row first_piece",
    "length dim piece",
)
_Backward = structure(
    "BackwardArguments",
    "x dt z B C dy dx ddt dz y",
    "A D bias marks kept dlast dBC dA dfirst dD dbias",
    "",
    "length dim",
)


def _row(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    marks: Tensor | None,
    softplus: bool,
) -> _Row:
    tokens = [None if t is None else aligned(t) for t in (x, dt, B, C, z)]
    vectors = [None if t is None else wide(t) for t in (A, D, dt_bias)]
    return _Row(*tokens, *vectors, marks, softplus)


def run_forward(row: _Row, first: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (batch, length, dim); if `keep`, the state before every CHUNK tokens (batch, chunks, dim, states); the state
    after the row (batch, dim, states)."""
    batch, length, dim = row.x.shape
    y = torch.empty(batch, length, dim, device=row.x.device, dtype=row.x.dtype)
    kept = row.A.new_empty((batch, row.chunks, *row.A.shape) if keep else (0,))
    last = row.A.new_empty(batch, *row.A.shape)
    more = {"first": pointer(first), "first_row": row.A.numel(), "piece": row.chunks * CHUNK}
    more |= {"kept": kept.data_ptr() if keep else None, "last": last.data_ptr()}
    row.kernel("forward").launch((row.blocks, batch, 1), _Forward(y=tokens_of(y), **row.common(), **more))
    return y, kept, last


def _outputs_again(row: _Row, kept: Tensor) -> Tensor:
    """y again, from the states that were kept: pieces of rows side by side, as many as fill the GPU."""
    batch, length, dim = row.x.shape
    wanted = max(1, _BLOCKS * multiprocessors(row.x.device) // (batch * row.blocks))
    chunks = -(-row.chunks // wanted)  # of a piece
    y = torch.empty(batch, length, dim, device=row.x.device, dtype=row.x.dtype)
    more = {"first": kept.data_ptr(), "first_row": kept.stride(0), "first_piece": chunks * kept.stride(1)}
    arguments = _Forward(y=tokens_of(y), **row.common(), **more, piece=chunks * CHUNK)
    with device_of(row.x):
        row.kernel("forward").launch((row.blocks, batch, -(-row.chunks // chunks)), arguments)
    return y


def run_backward(
    row: _Row, kept: Tensor, dy: Tensor, dlast: Tensor | None, dz: Tensor | None, y: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients by x, dt, B and C side by side (blocks, batch, length, 2 states), A, D, the bias (these four still
    to be summed over their first dimension) and the state before the row. That by z is written to `dz`, and the outputs
    again to `y`."""
    batch, length, dim = row.x.shape
    dx = torch.empty(batch, length, dim, device=dy.device, dtype=dy.dtype)
    # Over dt, if nobody else wants that: of a token the kernel has read all when it writes.
    over = row.dt.is_contiguous() and row.dt.dtype == dx.dtype and is_ours_alone(row.dt)
    ddt = row.dt if over else torch.empty_like(dx)
    dBC = row.A.new_empty(row.blocks, batch, length, 2 * row.A.shape[1])
    dA, dfirst = (row.A.new_empty(batch, *row.A.shape) for _ in range(2))
    dD, dbias = (None if t is None else row.A.new_empty(batch, dim) for t in (row.D, row.bias))
    outputs = {"dx": tokens_of(dx), "ddt": tokens_of(ddt), "dz": tokens_of(dz), "dy": tokens_of(dy), "y": tokens_of(y)}
    pointers = {"kept": kept, "dlast": dlast, "dBC": dBC, "dA": dA, "dfirst": dfirst, "dD": dD, "dbias": dbias}
    arguments = _Backward(**row.common(), **outputs, **{name: pointer(t) for name, t in pointers.items()})
    row.kernel("backward").launch((row.blocks, batch, 1), arguments)
    return dx, ddt, dBC, dA, dD, dbias, dfirst
