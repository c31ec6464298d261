"""Mamba-1's selective scan in Triton: channel-last, documents built in, forward and backward.

It needs no compiled extension. Against the kernel of mamba_ssm: inputs and outputs are (batch, length, dim) as the
projections beside it give and take them, so that nothing is turned round; documents, an initial state and a gradient
through the final state are parts of it; offsets are 64-bit. Importing this module imports Triton.

One lane works through one channel. There are too few channels to fill a GPU with a warp for every 32 of them, so rows
are cut into pieces: a first pass finds what each piece does to the state (`triton_scan_pieces.py`), then all pieces are
computed side by side. How many are worth it, and the other sizes, were measured (benchmarks/NOTES.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of, multiprocessors
from ssm_tune.kernels.recompute import recomputable, recomputing, reference_to
from ssm_tune.kernels.triton_scan_backward import backward_kernel
from ssm_tune.kernels.triton_scan_documents import FLAGGED_TOKENS, find_codes
from ssm_tune.kernels.triton_scan_forward import forward_kernel
from ssm_tune.kernels.triton_scan_pieces import carry_kernel, ends_kernel, reverse_ends_kernel
from ssm_tune.kernels.triton_scan_steps import prepare_kernel

_MOST_STATES = 64  # more would not fit into registers


class Arrangement(NamedTuple):
    """How a pass is laid out on the GPU.

    group: tokens whose loads are issued together. block: channels of a program (a warp). spread: four lanes share the
    states of four channels, so that sums over channels need fewer shuffles and scalars more. warps: programs wanted
    for each multiprocessor; rows are cut into as many pieces as that takes. piece: tokens of a piece, instead. segment:
    tokens between the states that the forward pass keeps. registers: at most so many for each lane.
    """

    group: int = 4
    block: int = 32
    spread: bool = False
    warps: int = 12
    piece: int | None = None
    segment: int = 32
    registers: int | None = None


# The fastest of a sweep on an H200 (benchmarks/NOTES.md).
FORWARD = Arrangement(spread=True, warps=64)
BACKWARD = Arrangement(group=2, spread=True, warps=32, registers=128)


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

    Raises:
        Unsupported: float64, or more than 64 states.
    """
    if torch.float64 in {x.dtype, dt.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    if A.shape[-1] > _MOST_STATES:
        raise Unsupported(f"{A.shape[-1]} states, at most {_MOST_STATES}")
    codes, flags = find_codes(seq_idx, x.shape[0], x.shape[1], x.device)
    y, state, BC, kept = _Scan.apply(x, dt, A, B, C, D, z, dt_bias, initial_state, codes, flags, dt_softplus)
    if recomputing() and y.requires_grad:
        vectors = [None if t is None else t.detach() for t in (A, D, dt_bias)]
        given = [None if t is None else reference_to(t) for t in (x, dt, z)]

        def scan_again() -> list[Tensor]:
            again = [None if tensor is None else tensor() for tensor in given]
            return [outputs_again(_row(*again, *vectors, codes, flags, dt_softplus), BC, kept)]

        recomputable([y], scan_again)
    return (y, state) if return_final_state else y


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
        codes: Tensor | None,
        flags: Tensor | None,
        dt_softplus: bool,
    ) -> tuple[Tensor, ...]:
        keep = any(ctx.needs_input_grad)
        row = _row(x, dt, z, A, D, dt_bias, codes, flags, dt_softplus)
        with device_of(x):
            BC = _prepare(B, C, row)
            first = row.no_state() if initial_state is None else _turn(initial_state)
            y, kept, last = run_forward(row, BC, first, keep, FORWARD, BACKWARD.segment)
        if keep:
            ctx.save_for_backward(row.x, row.dt, row.z, row.A, row.D, row.bias, codes, flags, BC, kept)
            ctx.dt_softplus = dt_softplus
            ctx.dtypes = [None if t is None else t.dtype for t in (A, B, C, D, dt_bias, initial_state)]
            ctx.states = A.shape[1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(BC, kept)
        return y, _turn_back(last, A.shape[1]), BC, kept

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, dt, z, A, D, bias, codes, flags, BC, kept = ctx.saved_tensors
        row = _Row(x, dt, z, A, D, bias, codes, flags, ctx.dt_softplus)
        needed = ctx.needs_input_grad
        with device_of(x):
            dy = torch.zeros_like(x, memory_format=torch.contiguous_format) if dy is None else dy.contiguous()
            last = row.no_state() if dlast is None else _turn(dlast)
            dx, ddt, dz, dBC, dA, dD, dbias, dfirst = run_backward(row, BC, kept, dy, last, needed[2], BACKWARD)
        length, states = x.shape[1], ctx.states
        A_dtype, B_dtype, C_dtype, D_dtype, bias_dtype, state_dtype = ctx.dtypes
        gradients = [
            dx,
            ddt,
            dA.sum((0, 1))[:states].t().to(A_dtype) if needed[2] else None,
            dBC[:, :length, 0, :states].to(B_dtype),
            dBC[:, :length, 1, :states].to(C_dtype),
            None if D is None else dD.sum((0, 1)).to(D_dtype),
            dz,
            None if bias is None else dbias.sum((0, 1)).to(bias_dtype),
            _turn_back(dfirst, states).to(state_dtype) if needed[8] else None,
        ]
        return (*(g if need else None for g, need in zip(gradients, needed, strict=False)), None, None, None)


class _Row(NamedTuple):
    """The inputs of a scan as the kernels read them, B and C excepted (`_prepare`)."""

    x: Tensor
    dt: Tensor
    z: Tensor | None
    A: Tensor  # (STATES, dim)
    D: Tensor | None
    bias: Tensor | None
    codes: Tensor | None
    flags: Tensor | None
    softplus: bool

    @property
    def padded(self) -> int:
        """Tokens of a row, whole groups."""
        return -(-self.x.shape[1] // FLAGGED_TOKENS) * FLAGGED_TOKENS

    def no_state(self) -> Tensor:
        """The state before a row, or its gradient: zero. Given always, so that no other kernel has to be compiled."""
        return self.A.new_zeros(self.x.shape[0], *self.A.shape)

    def strides(self, *names: str) -> dict[str, int]:
        """For each tensor named, or x in its place, the distance between rows and between tokens."""
        found = {}
        for name in names:
            tensor = getattr(self, name)
            found[f"{name}_row"], found[f"{name}_token"] = (self.x if tensor is None else tensor).stride()[:2]
        return found

    def settings(self, arrangement: Arrangement) -> dict[str, Any]:
        """What every kernel of a pass is compiled for."""
        return {
            "STATES": self.A.shape[0],
            "BLOCK": arrangement.block,
            "GROUP": self.group(arrangement),
            "EVEN": self.x.shape[2] % arrangement.block == 0,
            "HAS_BIAS": self.bias is not None,
            "SOFTPLUS": self.softplus,
            "HAS_CODES": self.codes is not None,
            "SPREAD": arrangement.spread,
            "unit": 1,
            "num_warps": 1,
            **({} if arrangement.registers is None else {"maxnreg": arrangement.registers}),
        }

    def group(self, arrangement: Arrangement) -> int:
        """Tokens of a group: fewer where there are many states, all of which are kept in registers for each."""
        return max(1, min(arrangement.group, 64 // self.A.shape[0]))

    def pieces(self, arrangement: Arrangement, segment: int) -> tuple[int, int]:
        """How many pieces a row is cut into, and the tokens of each (whole segments)."""
        batch, _, dim = self.x.shape
        padded = self.padded
        tokens = arrangement.piece
        if tokens is None:
            programs = batch * triton.cdiv(dim, arrangement.block)
            wanted = max(1, arrangement.warps * multiprocessors(self.x.device) // programs)
            tokens = triton.cdiv(padded, wanted)
        tokens = triton.cdiv(tokens, segment) * segment
        return triton.cdiv(padded, tokens), tokens


def _row(
    x: Tensor,
    dt: Tensor,
    z: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    codes: Tensor | None,
    flags: Tensor | None,
    softplus: bool,
) -> _Row:
    vectors = [None if t is None else t.float().contiguous() for t in (D, dt_bias)]
    return _Row(_side_by_side(x), _side_by_side(dt), _side_by_side(z), _turn(A), *vectors, codes, flags, softplus)


def _side_by_side(tensor: Tensor | None) -> Tensor | None:
    """The tensor with channels side by side; rows and tokens may be apart, as in a part of a projection."""
    return tensor if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _turn(tensor: Tensor) -> Tensor:
    """(..., dim, state) as (..., STATES, dim), float32, STATES a power of two: more are zero and stay so."""
    states = tensor.shape[-1]
    turned = tensor.float().transpose(-1, -2)
    more = triton.next_power_of_2(states) - states
    return F.pad(turned, (0, 0, 0, more)) if more else turned.contiguous()


def _turn_back(tensor: Tensor, states: int) -> Tensor:
    return tensor[..., :states, :].transpose(-1, -2).contiguous()


def _prepare(B: Tensor, C: Tensor, row: _Row) -> Tensor:
    batch, length, states = B.shape
    padded, most = row.padded, row.A.shape[0]
    BC = torch.empty(batch, padded, 2, most, device=B.device, dtype=torch.float32)
    tokens = 32
    prepare_kernel[(triton.cdiv(padded, tokens), batch)](
        B, C, _or(row.codes, BC), BC, length, padded, states, *B.stride(), *C.stride(),
        STATES=most, TOKENS=tokens, HAS_CODES=row.codes is not None,
    )  # fmt: skip
    return BC


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that is not used."""
    return other if tensor is None else tensor


def run_forward(
    row: _Row, BC: Tensor, first: Tensor, keep: bool, arrangement: Arrangement, segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y (batch, length, dim); if `keep`, the state before every `segment` tokens, (batch, segments, STATES, dim); the
    state after the row, (batch, STATES, dim)."""
    batch, _, dim = row.x.shape
    pieces, tokens = row.pieces(arrangement, segment)
    if pieces > 1:
        states = row.A.new_empty(batch, pieces, row.A.shape[0], dim)
        sums = row.A.new_empty(batch, pieces, dim)
        ends_kernel[(triton.cdiv(dim, arrangement.block), pieces - 1, batch)](
            row.x, row.dt, row.A, BC, _or(row.bias, BC), _or(row.codes, BC), _or(row.flags, BC), states, sums,
            dim, row.padded, pieces, tokens, **row.strides("x", "dt"), **row.settings(arrangement),
        )  # fmt: skip
        _carry(states, sums, row.A, first, reverse=False)
        first = states
    return _outputs(row, BC, first, keep, arrangement, segment)


def outputs_again(row: _Row, BC: Tensor, kept: Tensor) -> Tensor:
    """y again, from the states that were kept: no piece waits for another."""
    arrangement, segment = FORWARD, BACKWARD.segment
    with device_of(row.x):
        first = kept[:, :: row.pieces(arrangement, segment)[1] // segment].contiguous()
        return _outputs(row, BC, first, False, arrangement, segment)[0]


def _outputs(
    row: _Row, BC: Tensor, first: Tensor, keep: bool, arrangement: Arrangement, segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `run_forward`, from the state before each piece."""
    batch, length, dim = row.x.shape
    pieces, tokens = row.pieces(arrangement, segment)
    segments, most = triton.cdiv(row.padded, segment), row.A.shape[0]
    y = torch.empty(batch, length, dim, device=row.x.device, dtype=row.x.dtype)
    kept = row.A.new_empty((batch, segments, most, dim) if keep else (1,))
    last = row.A.new_empty(batch, most, dim)
    forward_kernel[(triton.cdiv(dim, arrangement.block), pieces, batch)](
        row.x, row.dt, _or(row.z, row.x), row.A, BC, _or(row.D, BC), _or(row.bias, BC), _or(row.codes, BC),
        _or(row.flags, BC), first, y, kept, last, dim, length, row.padded, pieces, tokens, segments,
        **row.strides("x", "dt", "z"), **row.settings(arrangement),
        SEGMENT=segment, HAS_Z=row.z is not None, HAS_D=row.D is not None, KEEP=keep,
    )  # fmt: skip
    return y, kept, last


def run_backward(
    row: _Row,
    BC: Tensor,
    kept: Tensor,
    dy: Tensor,
    last: Tensor,
    need_A: bool,
    arrangement: Arrangement,
) -> tuple[Tensor | None, ...]:
    """The gradients by x, dt, z, B and C (batch, padded, 2, STATES), A, D, the bias (each still to be summed over batch
    and pieces) and the state before the row."""
    batch, length, dim = row.x.shape
    most, padded, settings = row.A.shape[0], row.padded, row.settings(arrangement)
    blocks, segment = triton.cdiv(dim, arrangement.block), arrangement.segment
    pieces, tokens = row.pieces(arrangement, segment)
    common = (_or(row.codes, BC), _or(row.flags, BC))
    bias, D, z, has_z = _or(row.bias, BC), _or(row.D, BC), _or(row.z, row.x), row.z is not None
    if pieces > 1:
        states, sums = row.A.new_empty(batch, pieces, most, dim), row.A.new_empty(batch, pieces, dim)
        reverse_ends_kernel[(blocks, pieces - 1, batch)](
            row.dt, z, dy, row.A, BC, bias, *common, states, sums, dim, length, padded, pieces, tokens,
            **row.strides("dt", "z"), **settings, HAS_Z=has_z,
        )  # fmt: skip
        _carry(states, sums, row.A, last, reverse=True)
        last = states
    dx, ddt = (torch.empty(batch, length, dim, device=dy.device, dtype=t.dtype) for t in (row.x, row.dt))
    dz = torch.empty(batch, length, dim, device=dy.device, dtype=row.z.dtype) if has_z else None
    dBC = row.A.new_empty(blocks, batch, padded, 2, most)
    dA = row.A.new_empty((batch, pieces, most, dim) if need_A else (1,))
    dD, dbias = row.A.new_empty(batch, pieces, dim), row.A.new_empty(batch, pieces, dim)
    dfirst = row.A.new_empty(batch, most, dim)
    scratch = row.A.new_empty(batch * pieces * blocks, segment // row.group(arrangement), most, arrangement.block)
    backward_kernel[(blocks, pieces, batch)](
        row.x, row.dt, z, dy, row.A, BC, D, bias, *common, kept, last, scratch,
        dx, ddt, _or(dz, dx), dBC, dA, dD, dbias, dfirst,
        dim, length, padded, pieces, tokens, triton.cdiv(padded, segment), **row.strides("x", "dt", "z"), **settings,
        SEGMENT=segment, HAS_Z=has_z, HAS_D=row.D is not None, NEED_A=need_A,
    )  # fmt: skip
    return dx, ddt, dz, dBC.sum(0), dA, dD, dbias, dfirst


def _carry(states: Tensor, sums: Tensor, A: Tensor, edge: Tensor, reverse: bool) -> None:
    """From what each piece adds to the state to the state carried into each, in place."""
    batch, pieces, most, dim = states.shape
    block = 32
    carry_kernel[(triton.cdiv(dim, block), batch)](
        states, sums, A, edge, dim, pieces,
        STATES=most, BLOCK=block, REVERSE=reverse, num_warps=1,
    )  # fmt: skip
