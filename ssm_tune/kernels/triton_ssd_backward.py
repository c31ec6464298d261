"""The backward pass of the Triton scan of Mamba-2. Shapes and names: `triton_ssd_common`.

The gradients of the states between chunks are walked from the last chunk to the first, as the states before chunks are
walked forward. Then chunks are computed side by side (`triton_ssd_chunk_gradients`): a program takes one chunk and some
heads of a group, over which it adds up the gradients of B and C. What follows from sums over tokens, the gradients of
dt, A, D and dt_bias, comes last. All sums are in the same order in every run on one kind of GPU.

In a chunk, with G_ij = dy_i x_j, W_ij = exp(decay_i - decay_j) for j <= i of one document, S the state before it, T the
gradient of the state after it, and, where documents let them through, fading = exp(decay) and reaching =
exp(decay_last - decay), else 0:

    dx_j = step_j (sum over i of W_ij (C_i B_j) dy_i + reaching_j B_j T) + D dy_j
    dB_j = sum over i of G_ij W_ij step_j C_i + reaching_j step_j T x_j
    dC_i = sum over j of G_ij W_ij step_j B_j + fading_i S dy_i

The gradient of the sum of step * A has G_ij W_ij (C_i B_j) step_j added at i and taken off at j, for every pair; what
the state before brings is added at i, what goes to the state after is taken off at j and added at the chunk's end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.devices import device_of, multiprocessors
from ssm_tune.kernels.part_sums import add_up
from ssm_tune.kernels.triton_ssd_chunk_gradients import across_chunks_kernel, within_chunk_kernel
from ssm_tune.kernels.triton_ssd_common import (
    CHUNK,
    NO_LIMIT,
    PRECISION,
    Steps,
    block_sizes,
    find_reach,
    is_even,
    prepare_steps,
    read_tokens,
    states_before,
    step_of,
)

_HEADS = 16  # of a program of the last kernel
_TOKENS = 16  # of a program that adds up parts


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def state_gradients_kernel(
    dy, C, decay, reach, dfinal, dstates, dinitial, length, heads, chunks, heads_of_group, head_dims, state_dims,
    dy_row, dy_token, dy_head, C_row, C_token, C_group,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, EVEN: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, for a head and HEAD_DIM of its channels; and of the initial state.

    Grid: (heads, blocks, batch).
    """
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    place, n = tl.arange(0, CHUNK), tl.arange(0, STATE)
    p = tl.program_id(1) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    end = (chunks - 1).to(tl.int64)
    dy += row * dy_row + head.to(tl.int64) * dy_head + end * CHUNK * dy_token
    C += row * C_row + (head // heads_of_group).to(tl.int64) * C_group + end * CHUNK * C_token
    decay += ((row * heads + head) * chunks + end) * CHUNK
    dstates += ((row * heads + head) * chunks + end) * state_dims * head_dims
    inside = (n < state_dims)[:, None] & (p < head_dims)[None, :]
    tile = n[:, None] * head_dims + p[None, :]
    # Initial and final states are (batch, heads, head_dim, state).
    turned = (row * heads + head) * head_dims * state_dims + p[None, :] * state_dims + n[:, None]
    dstate = tl.zeros([STATE, HEAD_DIM], tl.float32)
    if HAS_FINAL:
        dstate = tl.load(dfinal + turned, mask=inside, other=0.0)
    for after in range(chunks):
        chunk = chunks - 1 - after
        remaining = length - chunk * CHUNK
        slope = read_tokens(dy, place, p, remaining, head_dims, dy_token, EVEN)
        c = read_tokens(C, place, n, remaining, state_dims, C_token, EVEN)
        fading, through = tl.exp(tl.load(decay + place)), tl.exp(tl.load(decay + CHUNK - 1))
        if HAS_DOCUMENTS:
            seen = reach + (row * chunks + chunk) * CHUNK
            fading = tl.where(tl.load(seen + place) < 0, fading, 0.0)
            through = tl.where(tl.load(seen + CHUNK - 1) < 0, through, 0.0)
        tl.store(dstates + tile, dstate.to(dstates.dtype.element_ty), mask=inside)
        read = (slope.to(tl.float32) * fading[:, None]).to(slope.dtype)
        dstate = tl.dot(tl.trans(c), read, acc=dstate * through, input_precision=PRECISION)
        dy -= CHUNK * dy_token
        C -= CHUNK * C_token
        decay -= CHUNK
        dstates -= state_dims * head_dims
    if HAS_INITIAL:
        tl.store(dinitial + turned, dstate, mask=inside)


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def step_gradients_kernel(
    dt, A, bias, step, by_step, read, mixed, sent, carried, by_skip, ddt, shares, length, heads, chunks, low, high,
    dt_row, dt_token, dt_head, ddt_row, ddt_token, ddt_head,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr, SUM_SKIP: tl.constexpr,
):  # fmt: skip
    """ddt of a chunk for some heads, and the chunk's shares of the gradients of A, dt_bias and D.

    shares: (3, batch * chunks, heads). Grid: (chunks, blocks of heads, batch).
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, CHUNK)
    token = chunk.to(tl.int64) * CHUNK + place
    some = head < heads
    of_chunk = (row * heads + head) * chunks + chunk
    tile, here = of_chunk[:, None] * CHUNK + place[None, :], some[:, None]
    size = tl.load(step + tile, mask=here, other=0.0)
    direct = tl.load(by_step + tile, mask=here, other=0.0)
    slope = tl.load(read + tile, mask=here, other=0.0) + tl.load(mixed + tile, mask=here, other=0.0) - direct * size
    to_the_end = tl.sum(tl.load(sent + tile, mask=here, other=0.0) * size, axis=1)
    to_the_end += tl.load(carried + of_chunk, mask=some, other=0.0)
    slope = tl.cumsum(slope, axis=1, reverse=True) + to_the_end[:, None]
    value = direct + slope * tl.load(A + head, mask=some, other=0.0)[:, None]
    inside = (token < length)[None, :] & here
    shift = tl.load(bias + head, mask=some, other=0.0) if HAS_BIAS else tl.zeros([HEADS], tl.float32)
    given = tl.load(dt + row * dt_row + token[None, :] * dt_token + head[:, None] * dt_head, mask=inside, other=0.0)
    _, by_dt = step_of(given, shift[:, None], low, high, SOFTPLUS, LIMITED)
    value = tl.where(inside, value * by_dt, 0.0)
    to = ddt + row * ddt_row + token[None, :] * ddt_token + head[:, None] * ddt_head
    tl.store(to, value.to(ddt.dtype.element_ty), mask=inside)
    to = shares + (row * chunks + chunk) * heads + head
    rows = tl.num_programs(2).to(tl.int64) * chunks * heads
    tl.store(to, tl.sum(slope * size, axis=1), mask=some)
    tl.store(to + rows, tl.sum(value, axis=1), mask=some)
    if SUM_SKIP:
        skipped = tl.load(by_skip + tile, mask=here, other=0.0)
        tl.store(to + 2 * rows, tl.sum(skipped, axis=1), mask=some)


@triton.jit(do_not_specialize=["length", "parts"])
def add_parts_kernel(
    parts_of_B, parts_of_C, dB, dC, length, parts, state_dims,
    dB_row, dB_token, dB_group, dC_row, dC_token, dC_group, TOKENS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Sums over parts, (parts, batch, length, groups, state). Grid: (blocks of tokens, groups, batch)."""
    group, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    groups, batch = tl.num_programs(1), tl.num_programs(2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    n = tl.arange(0, STATE)
    inside = (token < length)[:, None] & (n < state_dims)[None, :]
    tile = ((row * length + token) * groups + group)[:, None] * state_dims + n[None, :]
    of_B, of_C = tl.zeros([TOKENS, STATE], tl.float32), tl.zeros([TOKENS, STATE], tl.float32)
    every = batch.to(tl.int64) * length * groups * state_dims
    for _ in range(parts):
        of_B += tl.load(parts_of_B + tile, mask=inside, other=0.0)
        of_C += tl.load(parts_of_C + tile, mask=inside, other=0.0)
        parts_of_B += every
        parts_of_C += every
    dB += row * dB_row + group * dB_group + token[:, None] * dB_token + n[None, :]
    dC += row * dC_row + group * dC_group + token[:, None] * dC_token + n[None, :]
    tl.store(dB, of_B.to(dB.dtype.element_ty), mask=inside)
    tl.store(dC, of_C.to(dC.dtype.element_ty), mask=inside)


class Arrangement(NamedTuple):
    """Of a launch: channels of a head at a time, warps, how many heads or chunks are in shared memory at a time, and
    programs that share a multiprocessor."""

    head_dim: int
    warps: int
    stages: int
    programs: int = 2


class Arrangements(NamedTuple):
    """Of the kernels for the gradients of states, for what comes from states, and for what comes from within chunks."""

    walk: Arrangement
    across: Arrangement
    within: Arrangement


def arrangements_of(dtype: torch.dtype, head_dim: int, state: int) -> Arrangements:
    """By what tiles take in shared memory and in registers."""
    if dtype == torch.float32 or state > 128:
        return Arrangements(Arrangement(32, 4, 1), Arrangement(32, 8, 1), Arrangement(32, 8, 1))
    if head_dim > 64:
        return Arrangements(Arrangement(64, 8, 3), Arrangement(64, 8, 1), Arrangement(64, 4, 1))
    return Arrangements(Arrangement(64, 8, 3), Arrangement(64, 8, 3, programs=1), Arrangement(64, 4, 3))


def scan_backward(
    dy: Tensor,
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
    *,
    dx: Tensor,
    dB: Tensor,
    dC: Tensor,
    ddt: Tensor,
    dfinal: Tensor | None = None,
    steps: Steps | None = None,
    states: Tensor | None = None,
    need_sums: bool = True,
) -> tuple[Tensor | None, ...]:
    """Gradients from dy, and dfinal, that of the final state: (batch, heads, head_dim, state), float32.

    The inputs are those of the forward pass: number (batch, length), int32; initial_state as the final state; A, D and
    dt_bias float32. dx, dB, dC and ddt are written; their last dimensions are contiguous, but that of ddt need not be.
    steps, states: what `prepare_steps` and `states_before` give for these inputs, if known; else worked out here.

    Returns:
        The gradients of A, of D (None without one), of dt_bias, and of the initial state (None without one), float32.
        The first three are sums (`add_up`), and None unless `need_sums`.
    """
    batch, length, heads, _ = x.shape
    reach = None if number is None else find_reach(number)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    with device_of(x):
        steps = prepare_steps(dt, A, dt_bias, dt_softplus, dt_limit) if steps is None else steps
        states = states_before(x, B, steps, number, initial_state) if states is None else states
        dstates, dinitial = _state_gradients(dy, C, steps, reach, dfinal, initial_state is not None)
        found = _chunk_gradients(dy, x, B, C, D, steps, reach, states, dstates, dx, dB, dC)
        chunks = steps.step.shape[2]
        shares = torch.empty((3, batch * chunks, heads), dtype=torch.float32, device=x.device)
        low, high = dt_limit
        wide = D is not None and D.dim() == 2
        step_gradients_kernel[chunks, -(-heads // _HEADS), batch](
            dt, A, dt_bias, steps.step, *found, ddt, shares, length, heads, chunks, float(low), float(high),
            *dt.stride(), *ddt.stride(),
            CHUNK=CHUNK, HEADS=_HEADS, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
            LIMITED=(low, high) != NO_LIMIT, SUM_SKIP=D is not None and not wide, num_warps=4,
        )  # fmt: skip
    if not need_sums:
        return None, None, None, dinitial
    dA, dbias, dD = add_up(shares).unbind()
    if D is None:
        return dA, None, dbias, dinitial
    return dA, found.by_skip.sum((0, 2)) if wide else dD, dbias, dinitial


def _state_gradients(
    dy: Tensor, C: Tensor, steps: Steps, reach: Tensor | None, dfinal: Tensor | None, need_initial: bool
) -> tuple[Tensor, Tensor | None]:
    """Of the state after every chunk, (batch, heads, chunks, state, head_dim), like dy, and of the initial one."""
    batch, length, heads, head_dim = dy.shape
    groups, state = C.shape[2:]
    chunks = steps.step.shape[2]
    arrangement = arrangements_of(dy.dtype, head_dim, state).walk
    sizes = block_sizes(head_dim, state, arrangement.head_dim)
    dstates = torch.empty((batch, heads, chunks, state, head_dim), dtype=dy.dtype, device=dy.device)
    dinitial = dy.new_empty((batch, heads, head_dim, state), dtype=torch.float32) if need_initial else None
    state_gradients_kernel[heads, -(-head_dim // sizes["HEAD_DIM"]), batch](
        dy, C, steps.decay, reach, None if dfinal is None else dfinal.contiguous(), dstates, dinitial,
        length, heads, chunks, heads // groups, head_dim, state, *dy.stride()[:3], *C.stride()[:3],
        CHUNK=CHUNK, EVEN=is_even(length, head_dim, state, sizes), HAS_FINAL=dfinal is not None,
        HAS_INITIAL=need_initial, HAS_DOCUMENTS=reach is not None, PRECISION=PRECISION,
        num_warps=arrangement.warps, num_stages=arrangement.stages, **sizes,
    )  # fmt: skip
    return dstates, dinitial


class _OfTokens(NamedTuple):
    """What the kernels for chunks leave to the last one; see there."""

    by_step: Tensor
    read: Tensor
    mixed: Tensor
    sent: Tensor
    carried: Tensor
    by_skip: Tensor | None


def _chunk_gradients(
    dy: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    steps: Steps,
    reach: Tensor | None,
    states: Tensor,
    dstates: Tensor,
    dx: Tensor,
    dB: Tensor,
    dC: Tensor,
) -> _OfTokens:
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    chunks = steps.step.shape[2]
    wide = D is not None and D.dim() == 2
    by_step, read, mixed, sent = (torch.empty_like(steps.step) for _ in range(4))
    carried = torch.empty_like(steps.step[..., 0], memory_format=torch.contiguous_format)
    by_skip = None if D is None else steps.step.new_empty((batch, heads, chunks, head_dim if wide else CHUNK))
    _, across, within = arrangements_of(x.dtype, head_dim, state)
    first, second = (_parts(batch * chunks, heads // groups, groups, a.programs, x.device) for a in (across, within))
    parts = first.parts + second.parts
    parts_of_B, parts_of_C = steps.step.new_empty((2, parts, batch, length, groups, state))
    common = {"CHUNK": CHUNK, "HAS_DOCUMENTS": reach is not None, "PRECISION": PRECISION}
    shape = batch, length, heads, chunks, heads // groups
    sizes = _sizes(across, length, head_dim, state)
    across_chunks_kernel[(first.parts * groups * batch * chunks,)](
        dy, x, C, *steps, reach, states, dstates, parts_of_B, parts_of_C, read, carried, *shape, first.heads,
        first.parts, head_dim, state, *dy.stride()[:3], *x.stride()[:3], *C.stride()[:3], *parts_of_B.stride()[:4],
        **common, **sizes,
    )  # fmt: skip
    rest_of_B, rest_of_C = parts_of_B[first.parts :], parts_of_C[first.parts :]
    skips = (0, 0) if D is None else (*D.stride(), 0)[:2]
    within_chunk_kernel[(second.parts * groups * batch * chunks,)](
        dy, x, B, C, D, *steps, reach, dstates, dx, rest_of_B, rest_of_C, by_step, mixed, sent, by_skip, *shape,
        second.heads, second.parts, head_dim, state, *dy.stride()[:3], *x.stride()[:3], *B.stride()[:3],
        *C.stride()[:3], *skips, *dx.stride()[:3], *parts_of_B.stride()[:4],
        HAS_D=D is not None, WIDE_D=wide, **common, **_sizes(within, length, head_dim, state),
    )  # fmt: skip
    add_parts_kernel[-(-length // _TOKENS), groups, batch](
        parts_of_B, parts_of_C, dB, dC, length, parts, state, *dB.stride()[:3], *dC.stride()[:3],
        TOKENS=_TOKENS, STATE=sizes["STATE"], num_warps=4,
    )  # fmt: skip
    return _OfTokens(by_step, read, mixed, sent, carried, by_skip)


def _sizes(arrangement: Arrangement, length: int, head_dim: int, state: int) -> dict[str, int]:
    """What a kernel for chunks is told by its arrangement."""
    sizes = block_sizes(head_dim, state, arrangement.head_dim)
    given = {"BLOCKS": -(-head_dim // sizes["HEAD_DIM"]), "EVEN": is_even(length, head_dim, state, sizes)}
    return sizes | given | {"num_warps": arrangement.warps, "num_stages": arrangement.stages}


class _Split(NamedTuple):
    """Of the heads of a group over programs."""

    parts: int
    heads: int


def _parts(chunks: int, heads: int, groups: int, at_once: int, device: torch.device) -> _Split:
    """So that all programs run at the same time, or nearly: in as few parts as fill the device twice over at most."""
    programs = max(1, at_once * multiprocessors(device) // (chunks * groups))
    each = -(-heads // min(heads, programs))
    return _Split(-(-heads // each), each)
