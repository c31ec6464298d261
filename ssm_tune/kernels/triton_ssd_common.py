"""What the passes of the Triton scan of Mamba-2 have in common: steps, documents, and the states between chunks.

Rows are cut into chunks of `CHUNK` tokens; the last one is filled up with tokens that take no step. Shapes, here and in
the kernels: x (batch, length, heads, head_dim); B, C (batch, length, groups, state); dt (batch, length, heads); the
last dimension of x, B and C is contiguous, the others lie as they like. Of a chunk, `step` is the step size of each
token, and `decay` the sum of step * A up to it, itself included (Mamba-2, section 6, listing 1):

    y_i    = sum over j <= i of exp(decay_i - decay_j) step_j (C_i B_j) x_j + exp(decay_i) C_i state + D x_i
    state' = exp(decay_last) state + sum over j of exp(decay_last - decay_j) step_j B_j x_j

Documents are the numbers (batch, length) of `ssm_tune.kernels.documents`, from which follows how far each token sees
back (`find_reach`): to the places of its chunk from `reach` on, and to the state before the chunk where it is -1. The
state after a chunk is that of its last token's document.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.triton_scan_steps import softplus

CHUNK = 64
NO_LIMIT = (0.0, math.inf)
PRECISION = "tf32x3"  # of products of float32 tiles: as exact as float32, on the tensor cores
_reaches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_HEADS = 16  # of a program that prepares steps


class Steps(NamedTuple):
    """step and decay of every token, (batch, heads, chunks, CHUNK), float32."""

    step: Tensor
    decay: Tensor


@triton.jit
def step_of(dt, bias, low, high, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):
    """The step size, float32, and its slope by dt."""
    value = dt.to(tl.float32) + bias
    slope = tl.full(value.shape, 1.0, tl.float32)
    if SOFTPLUS:
        value, slope = softplus(value)
    if LIMITED:
        slope = tl.where((value >= low) & (value <= high), slope, 0.0)
        value = tl.minimum(tl.maximum(value, low), high)
    return value, slope


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def steps_kernel(
    dt, A, bias, step, decay, length, heads, chunks, low, high, dt_row, dt_token, dt_head,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Steps and decays of a chunk for some heads. Grid: (chunks, blocks of heads, batch)."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, CHUNK)
    token = chunk.to(tl.int64) * CHUNK + place
    some = head < heads
    inside = (token < length)[:, None] & some[None, :]
    shift = tl.load(bias + head, mask=some, other=0.0) if HAS_BIAS else tl.zeros([HEADS], tl.float32)
    slope = tl.load(A + head, mask=some, other=0.0)
    value = tl.load(dt + row * dt_row + token[:, None] * dt_token + head[None, :] * dt_head, mask=inside, other=0.0)
    value, _ = step_of(value, shift[None, :], low, high, SOFTPLUS, LIMITED)
    value = tl.where(inside, value, 0.0)
    to = ((row * heads + head[None, :]) * chunks + chunk) * CHUNK + place[:, None]
    tl.store(step + to, value, mask=some[None, :])
    tl.store(decay + to, tl.cumsum(value * slope[None, :], axis=0), mask=some[None, :])


@triton.jit
def read_tokens(pointer, place, columns, remaining, width, token_stride, EVEN: tl.constexpr):
    """The tile (tokens, columns) at `pointer`; zero beyond the `remaining` tokens and the last column."""
    tile = place[:, None] * token_stride + columns[None, :]
    if EVEN:
        return tl.load(pointer + tile)
    inside = (place < remaining)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + tile, mask=inside, other=0.0)


@triton.jit
def write_tokens(pointer, values, place, columns, remaining, width, token_stride, EVEN: tl.constexpr):
    """Counterpart of `read_tokens`."""
    tile = place[:, None] * token_stride + columns[None, :]
    values = values.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + tile, values)
    else:
        inside = (place < remaining)[:, None] & (columns < width)[None, :]
        tl.store(pointer + tile, values, mask=inside)


@triton.jit
def within_chunk(scores, step, decay, reach, place, HAS_DOCUMENTS: tl.constexpr):
    """What tokens j give tokens i of their chunk, (j, i), from B_j C_i: exp(decay_i - decay_j) step_j B_j C_i.

    decay is in units of log 2.
    """
    seen = place[:, None] <= place[None, :]
    if HAS_DOCUMENTS:
        seen = seen & (place[:, None] >= reach[None, :])
    return tl.where(seen, scores * tl.exp2(decay[None, :] - decay[:, None]) * step[:, None], 0.0)


def prepare_steps(
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Steps:
    """Step sizes and their sums times A within each chunk, from dt (batch, length, heads); A and dt_bias float32."""
    batch, length, heads = dt.shape
    chunks = -(-length // CHUNK)
    found = Steps(*(torch.empty((batch, heads, chunks, CHUNK), dtype=torch.float32, device=dt.device) for _ in "12"))
    low, high = dt_limit
    with device_of(dt):
        steps_kernel[chunks, -(-heads // _HEADS), batch](
            dt, A, dt_bias, *found, length, heads, chunks, float(low), float(high), *dt.stride(),
            CHUNK=CHUNK, HEADS=_HEADS, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
            LIMITED=(low, high) != NO_LIMIT, num_warps=4,
        )  # fmt: skip
    return found


def find_reach(number: Tensor) -> Tensor:
    """How far tokens see back, (batch, chunks, CHUNK), int32: the place in their chunk of the first token of their
    document, or -1 where that goes on from the chunk before (and at the row's first document, from the initial state).

    number: (batch, length), int32, never less than at the token before. Kept as long as that very tensor lives
    unchanged.
    """
    kept = _reaches.get(number)
    version = None if number.is_inference() else number._version
    if kept is not None and kept[0] == version and version is not None:
        return kept[1]
    batch, length = number.shape
    short = -length % CHUNK
    own = torch.cat([number, number[:, -1:].expand(batch, short)], dim=1).unflatten(1, (-1, CHUNK))
    before = torch.cat([number[:, :1], own[:, :-1, -1]], dim=1)
    reach = (own[..., :, None] > own[..., None, :]).sum(-1, dtype=torch.int32)
    reach = reach.masked_fill(own == before[..., None], -1).contiguous()
    if version is not None:
        _reaches[number] = (version, reach)
    return reach


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def states_kernel(
    x, B, step, decay, reach, initial, states, length, heads, chunks, heads_of_group, head_dims, state_dims,
    x_row, x_token, x_head, B_row, B_token, B_group,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, EVEN: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk, for one head and HEAD_DIM of its channels. Grid: (heads, blocks, batch)."""
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    place, n = tl.arange(0, CHUNK), tl.arange(0, STATE)
    p = tl.program_id(1) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    x += row * x_row + head.to(tl.int64) * x_head
    B += row * B_row + (head // heads_of_group).to(tl.int64) * B_group
    step += (row * heads + head) * chunks * CHUNK
    decay += (row * heads + head) * chunks * CHUNK
    states += (row * heads + head) * chunks * state_dims * head_dims
    inside = (n < state_dims)[:, None] & (p < head_dims)[None, :]
    tile = n[:, None] * head_dims + p[None, :]
    state = tl.zeros([STATE, HEAD_DIM], tl.float32)
    if HAS_INITIAL:  # (batch, heads, head_dim, state)
        initial += (row * heads + head) * head_dims * state_dims
        state = tl.load(initial + p[None, :] * state_dims + n[:, None], mask=inside, other=0.0)
    for chunk in range(chunks):
        remaining = length - chunk * CHUNK
        values = read_tokens(x, place, p, remaining, head_dims, x_token, EVEN)
        b = read_tokens(B, place, n, remaining, state_dims, B_token, EVEN)
        steps, decays = tl.load(step + place), tl.load(decay + place)
        total = tl.load(decay + CHUNK - 1)
        weight, through = tl.exp(total - decays) * steps, tl.exp(total)
        if HAS_DOCUMENTS:
            last = tl.load(reach + (row * chunks + chunk) * CHUNK + CHUNK - 1)
            weight = tl.where(place >= last, weight, 0.0)
            through = tl.where(last < 0, through, 0.0)
        tl.store(states + tile, state.to(x.dtype.element_ty), mask=inside)
        entering = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
        state = tl.dot(tl.trans(b), entering, acc=state * through, input_precision=PRECISION)
        x += CHUNK * x_token
        B += CHUNK * B_token
        step += CHUNK
        decay += CHUNK
        states += state_dims * head_dims


def states_before(x: Tensor, B: Tensor, steps: Steps, number: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """The state before every chunk, (batch, heads, chunks, state, head_dim), in the dtype of x.

    number: (batch, length), int32, contiguous, or None. initial_state: (batch, heads, head_dim, state), float32, or
    None.
    """
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    chunks = steps.step.shape[2]
    width, stages = (32, 1) if x.dtype == torch.float32 else (64, 3)
    sizes = block_sizes(head_dim, state, width)
    states = empty_states(x, B)
    with device_of(x):
        states_kernel[heads, -(-head_dim // sizes["HEAD_DIM"]), batch](
            x, B, *steps, None if number is None else find_reach(number),
            None if initial_state is None else initial_state.contiguous(), states,
            length, heads, chunks, heads // groups, head_dim, state, *x.stride()[:3], *B.stride()[:3],
            CHUNK=CHUNK, EVEN=is_even(length, head_dim, state, sizes), HAS_INITIAL=initial_state is not None,
            HAS_DOCUMENTS=number is not None, PRECISION=PRECISION, num_warps=4, num_stages=stages, **sizes,
        )  # fmt: skip
    return states


def empty_states(x: Tensor, B: Tensor) -> Tensor:
    """Where the states before every chunk are written, (batch, heads, chunks, state, head_dim), in the dtype of x."""
    batch, length, heads, head_dim = x.shape
    shape = batch, heads, -(-length // CHUNK), B.shape[3], head_dim
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def block_sizes(head_dim: int, state: int, widest: int) -> dict[str, int]:
    """Of tiles: powers of two from 16 on, `widest` channels of a head at most."""
    return {
        "HEAD_DIM": min(widest, max(16, triton.next_power_of_2(head_dim))),
        "STATE": max(16, triton.next_power_of_2(state)),
    }


def is_even(length: int, head_dim: int, state: int, sizes: dict[str, int]) -> bool:
    """Whether every tile is full, so that loads need no masks."""
    return length % CHUNK == 0 and head_dim % sizes["HEAD_DIM"] == 0 and state == sizes["STATE"]
