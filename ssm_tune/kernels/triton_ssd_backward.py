"""The backward pass of the Triton scan of Mamba-2. Shapes and names: `triton_ssd_common`.

The gradients of the states between chunks are walked from the last chunk to the first, as the states before chunks are
walked forward. Then chunks are computed side by side (`triton_ssd_chunk_gradients`): a program takes one chunk and some
heads of a group, over which it adds up the gradients of B and C. What follows from sums over tokens, the gradients of
dt, A, D and dt_bias, comes last (`triton_ssd_last_gradients`). All sums are in the same order in every run on one kind
of GPU.

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
)
from ssm_tune.kernels.triton_ssd_forward_tma import HEAD_DIM, can_copy, tiles_of_states, tiles_of_tokens
from ssm_tune.kernels.triton_ssd_last_gradients import last_gradients_kernel

_HEADS, _TOKENS = 8, 16  # of a program of the last kernel


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def state_gradients_kernel(
    dy, C, decay, reach, dfinal, dstates, dinitial, length, heads, chunks, heads_of_group, head_dims, state_dims,
    dy_row, dy_token, dy_head, C_row, C_token, C_group,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, EVEN: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
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
    for after in tl.range(0, chunks, num_stages=STAGES):
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


class Arrangement(NamedTuple):
    """Of a launch: channels of a head at a time, warps, how many heads or chunks are in shared memory at a time,
    programs that share a multiprocessor, and states of a program at most."""

    head_dim: int
    warps: int
    stages: int
    programs: int = 2
    states: int = 256


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
    # Half of 128 states leave room for two programs, which wait for memory in turn.
    across = Arrangement(64, 4, 3, programs=1, states=64)
    return Arrangements(Arrangement(64, 8, 3), across, Arrangement(64, 4, 3))


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
    reach = None if number is None else find_reach(number)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    with device_of(x):
        steps = prepare_steps(dt, A, dt_bias, dt_softplus, dt_limit) if steps is None else steps
        states = states_before(x, B, steps, number, initial_state) if states is None else states
        dstates, dinitial = _state_gradients(dy, C, steps, reach, dfinal, initial_state is not None)
        found = _chunk_gradients(dy, x, B, C, D, steps, reach, states, dstates, dx, dB, dC)
        shares = _last_gradients(dt, A, D, dt_bias, dt_softplus, dt_limit, steps, found, ddt, dB, dC)
    if not need_sums:
        return None, None, None, dinitial
    dA, dbias, dD = add_up(shares).unbind()
    if D is None:
        return dA, None, dbias, dinitial
    return dA, found.of_tokens.by_skip.sum((0, 2)) if D.dim() == 2 else dD, dbias, dinitial


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
        STAGES=arrangement.stages, num_warps=arrangement.warps, **sizes,
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


class _OfChunks(NamedTuple):
    """The same, and parts of the gradients of B and C, (parts, batch, length, groups, state), float32, if these are
    not finished."""

    of_tokens: _OfTokens
    parts_of_B: Tensor
    parts_of_C: Tensor


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
) -> _OfChunks:
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    chunks = steps.step.shape[2]
    wide = D is not None and D.dim() == 2
    by_step, sent = (torch.empty_like(steps.step) for _ in range(2))
    mixed = by_step.new_empty((batch, heads, chunks, CHUNK // 16, CHUNK))
    by_skip = None if D is None else by_step.new_empty((batch, heads, chunks, head_dim if wide else CHUNK))
    _, across, within = arrangements_of(x.dtype, head_dim, state)
    first, second = (_parts(batch * chunks, heads // groups, groups, a.programs, x.device) for a in (across, within))
    whole = first.parts == second.parts == 1
    parts = first.parts + (0 if whole else second.parts)
    parts_of_B, parts_of_C = by_step.new_empty((2, parts, batch, length, groups, state))
    common = {"CHUNK": CHUNK, "HAS_DOCUMENTS": reach is not None, "PRECISION": PRECISION}
    shape = batch, length, heads, chunks, heads // groups
    sizes = _sizes(across, length, head_dim, state)
    blocks = -(-state // sizes["STATE"])
    read = by_step.new_empty((blocks, *by_step.shape))
    carried = read.new_empty(read.shape[:-1])
    across_chunks_kernel[(blocks * first.parts * groups * batch * chunks,)](
        dy, x, C, *steps, reach, states, dstates, parts_of_B, parts_of_C, read, carried, *shape, first.heads,
        first.parts, head_dim, state, blocks, *dy.stride()[:3], *x.stride()[:3], *C.stride()[:3],
        *parts_of_B.stride()[:4], **common, **sizes,
    )  # fmt: skip
    rest_of_B, rest_of_C = (dB[None], dC[None]) if whole else (parts_of_B[first.parts :], parts_of_C[first.parts :])
    skips = (0, 0) if D is None else (*D.stride(), 0)[:2]
    copied = all(can_copy(t, B, C) for t in (dy, x, dx))
    tiles = tuple(tiles_of_tokens(t, HEAD_DIM) for t in (dy, x, dx)) if copied else (dy, x, dx)
    within_chunk_kernel[(second.parts * groups * batch * chunks,)](
        *tiles[:2], B, C, D, *steps, reach, tiles_of_states(dstates) if copied else dstates, parts_of_B, parts_of_C,
        tiles[2], rest_of_B, rest_of_C, by_step, mixed, sent, by_skip, *shape, second.heads, second.parts, head_dim,
        state, *dy.stride()[:3], *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *skips, *dx.stride()[:3],
        *parts_of_B.stride()[1:4], *rest_of_B.stride()[:4], *rest_of_C.stride()[:4],
        HAS_D=D is not None, WIDE_D=wide, WHOLE=whole, COPIED=copied, **common,
        **_sizes(within, length, head_dim, state),
    )  # fmt: skip
    if whole:
        parts_of_B, parts_of_C = parts_of_B[:0], parts_of_C[:0]
    return _OfChunks(_OfTokens(by_step, read, mixed, sent, carried, by_skip), parts_of_B, parts_of_C)


def _last_gradients(
    dt: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    steps: Steps,
    found: _OfChunks,
    ddt: Tensor,
    dB: Tensor,
    dC: Tensor,
) -> Tensor:
    """Writes ddt, dB and dC; gives the shares of the gradients of A, dt_bias and D, (3, batch * chunks, heads)."""
    batch, length, heads = dt.shape
    groups, state = dB.shape[2:]
    chunks = steps.step.shape[2]
    shares = torch.empty((3, batch * chunks, heads), dtype=torch.float32, device=dt.device)
    low, high = dt_limit
    parts = len(found.parts_of_B)
    programs = batch * (chunks * triton.cdiv(heads, _HEADS) + (groups * triton.cdiv(length, _TOKENS) if parts else 0))
    last_gradients_kernel[(programs,)](
        dt, A, dt_bias, steps.step, *found.of_tokens, ddt, shares, found.parts_of_B, found.parts_of_C, dB, dC,
        batch, length, heads, chunks, groups, parts, state, len(found.of_tokens.read), float(low), float(high),
        *dt.stride(), *ddt.stride(), *dB.stride()[:3], *dC.stride()[:3],
        CHUNK=CHUNK, HEADS=_HEADS, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, LIMITED=(low, high) != NO_LIMIT,
        SUM_SKIP=D is not None and D.dim() == 1, TOKENS=_TOKENS, STATE=block_sizes(16, state, 16)["STATE"], num_warps=4,
    )  # fmt: skip
    return shares


def _sizes(arrangement: Arrangement, length: int, head_dim: int, state: int) -> dict[str, int]:
    """What a kernel for chunks is told by its arrangement."""
    sizes = block_sizes(head_dim, state, arrangement.head_dim)
    sizes["STATE"] = min(sizes["STATE"], arrangement.states)
    even = length % CHUNK == head_dim % sizes["HEAD_DIM"] == state % sizes["STATE"] == 0
    given = {"BLOCKS": -(-head_dim // sizes["HEAD_DIM"]), "EVEN": even}
    return sizes | given | {"STAGES": arrangement.stages, "num_warps": arrangement.warps}


class _Split(NamedTuple):
    """Of the heads of a group over programs."""

    parts: int
    heads: int


def _parts(chunks: int, heads: int, groups: int, at_once: int, device: torch.device) -> _Split:
    """So that all programs run at the same time, or nearly: in as few parts as fill the device twice over at most."""
    programs = max(1, at_once * multiprocessors(device) // (chunks * groups))
    each = -(-heads // min(heads, programs))
    return _Split(-(-heads // each), each)
