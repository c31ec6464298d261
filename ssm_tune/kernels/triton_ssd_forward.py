"""The forward pass of the Triton scan of Mamba-2: one kernel, which keeps nothing between chunks in memory.

A program walks over the chunks of a row for one head (or some of its channels), its state in registers. At the sizes of
mamba2-1.3b, 4 rows of 64 heads, that is 256 programs, all at work at once; B and C, which the heads of a group share,
come from the second-level cache. Shapes and names: `triton_ssd_common`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.triton_scan_steps import _LOG2_E
from ssm_tune.kernels.triton_ssd_common import (
    CHUNK,
    PRECISION,
    Steps,
    block_sizes,
    find_reach,
    is_even,
    read_tokens,
    within_chunk,
    write_tokens,
)
from ssm_tune.kernels.triton_ssd_forward_tma import (
    HEAD_DIM,
    can_copy,
    copied_output_kernel,
    tiles_of_states,
    tiles_of_tokens,
)


@triton.jit
def read_chunk(
    x, B, C, place, p, n, remaining, head_dims, state_dims, x_token, B_token, EVEN: tl.constexpr
):  # fmt: skip
    """x, B and C of the chunk that they point at."""
    values = read_tokens(x, place, p, remaining, head_dims, x_token, EVEN)
    b = read_tokens(B, place, n, remaining, state_dims, B_token, EVEN)
    return values, b, read_tokens(C, place, n, remaining, state_dims, B_token, EVEN)


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def output_kernel(
    x, B, C, D, step, decay, reach, initial, y, final, states, length, heads, chunks, heads_of_group, head_dims,
    state_dims, x_row, x_token, x_head, B_row, B_token, B_group, D_head, D_channel,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    HAS_D: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_STATES: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a row, and the state after it, for one head and HEAD_DIM of its channels. Grid: (heads, blocks, batch).

    The state before every chunk is written too, if HAS_STATES, as `states_kernel` does.

    Tiles are turned, channels or tokens j first, so that the state and what enters it are factors in registers. The
    next chunk is read into registers before the products of this one, if AHEAD. C lies as B does.
    """
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    place, n = tl.arange(0, CHUNK), tl.arange(0, STATE)
    p = tl.program_id(1) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    group = (head // heads_of_group).to(tl.int64)
    x += row * x_row + head.to(tl.int64) * x_head
    B += row * B_row + group * B_group
    C += row * B_row + group * B_group
    y_token = heads * head_dims
    y += row * length * y_token + head * head_dims
    step += (row * heads + head) * chunks * CHUNK
    decay += (row * heads + head) * chunks * CHUNK
    if HAS_DOCUMENTS:
        reach += row * chunks * CHUNK
    if HAS_STATES:
        states += (row * heads + head) * chunks * state_dims * head_dims
    inside = (p < head_dims)[:, None] & (n < state_dims)[None, :]
    # As initial and final states, (batch, heads, head_dim, state).
    tile = (row * heads + head) * head_dims * state_dims + p[:, None] * state_dims + n[None, :]
    state = tl.zeros([HEAD_DIM, STATE], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + tile, mask=inside, other=0.0)
    if HAS_D:
        skip = tl.load(D + head * D_head + p * D_channel, mask=p < head_dims, other=0.0)
    if AHEAD:
        next_x, next_b, next_c = read_chunk(
            x, B, C, place, p, n, length, head_dims, state_dims, x_token, B_token, EVEN
        )  # fmt: skip
    for chunk in range(chunks):
        if HAS_STATES:
            before = tl.trans(state.to(states.dtype.element_ty))
            write_tokens(states, before, n, p, state_dims, head_dims, head_dims, EVEN)
            states += state_dims * head_dims
        remaining = length - chunk * CHUNK
        if AHEAD:
            values, b, c = next_x, next_b, next_c
        else:
            values, b, c = read_chunk(
                x, B, C, place, p, n, remaining, head_dims, state_dims, x_token, B_token, EVEN
            )  # fmt: skip
        values = tl.trans(values)
        steps, decays = tl.load(step + place), tl.load(decay + place) * _LOG2_E
        total = tl.load(decay + CHUNK - 1) * _LOG2_E
        scores = tl.dot(b, tl.trans(c), input_precision=PRECISION)
        onward = tl.where(chunk + 1 < chunks, CHUNK, 0)  # after the last chunk that again, which nobody uses
        x += onward * x_token
        B += onward * B_token
        C += onward * B_token
        if AHEAD:
            next_x, next_b, next_c = read_chunk(
                x, B, C, place, p, n, remaining - CHUNK, head_dims, state_dims, x_token, B_token, EVEN
            )  # fmt: skip
        fading, weight, through = tl.exp2(decays), tl.exp2(total - decays) * steps, tl.exp2(total)
        reaches = 0
        if HAS_DOCUMENTS:
            reaches, last = tl.load(reach + place), tl.load(reach + CHUNK - 1)
            fading = tl.where(reaches < 0, fading, 0.0)
            weight = tl.where(place >= last, weight, 0.0)
            through = tl.where(last < 0, through, 0.0)
            reach += CHUNK
        mixing = within_chunk(scores, steps, decays, reaches, place, HAS_DOCUMENTS).to(values.dtype)
        out = tl.dot(state.to(c.dtype), tl.trans(c), input_precision=PRECISION) * fading[None, :]
        out = tl.dot(values, mixing, acc=out, input_precision=PRECISION)
        if HAS_D:
            out += skip[:, None] * values.to(tl.float32)
        out = tl.trans(out.to(y.dtype.element_ty))
        write_tokens(y, out, place, p, remaining, head_dims, y_token, EVEN)
        entering = (values.to(tl.float32) * weight[None, :]).to(values.dtype)
        state = tl.dot(entering, b, acc=state * through, input_precision=PRECISION)
        y += CHUNK * y_token
        step += CHUNK
        decay += CHUNK
    if HAS_FINAL:
        tl.store(final + tile, state, mask=inside)


def scan_forward(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    steps: Steps,
    number: Tensor | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y, like x, and the state after the row, (batch, heads, head_dim, state), float32, if asked for.

    D: (heads,) or (heads, head_dim), float32. number: (batch, length), int32. initial_state: as the final
    state. states: `empty_states`, which is then filled with what `states_before` gives.
    """
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    if B.stride() != C.stride():
        B, C = B.contiguous(), C.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = x.new_empty((batch, heads, head_dim, state), dtype=torch.float32) if return_final_state else None
    chunks, reach = steps.step.shape[2], None if number is None else find_reach(number)
    initial = None if initial_state is None else initial_state.contiguous()
    D_strides = (0, 0) if D is None else (*D.stride(), 0)[:2]
    kinds = {
        "HAS_D": D is not None, "HAS_INITIAL": initial is not None, "HAS_FINAL": return_final_state,
        "HAS_STATES": states is not None, "HAS_DOCUMENTS": reach is not None,
    }  # fmt: skip
    with device_of(x):
        if can_copy(x, B, C):
            copied_output_kernel[heads, head_dim // HEAD_DIM, batch](
                x, tiles_of_tokens(B, state), tiles_of_tokens(C, state), D, *steps, reach, initial,
                tiles_of_tokens(y, HEAD_DIM), final, None if states is None else tiles_of_states(states),
                length, heads, chunks, heads // groups, head_dim, *x.stride()[:3], *D_strides,
                CHUNK=CHUNK, HEAD_DIM=HEAD_DIM, STATE=state, EVEN=length % CHUNK == 0, **kinds,
                num_warps=4, num_stages=2,
            )  # fmt: skip
            return y, final
        sizes = block_sizes(head_dim, state, 64)
        output_kernel[heads, -(-head_dim // sizes["HEAD_DIM"]), batch](
            x, B, C, D, *steps, reach, initial, y, final, states,
            length, heads, chunks, heads // groups, head_dim, state, *x.stride()[:3], *B.stride()[:3], *D_strides,
            CHUNK=CHUNK, EVEN=is_even(length, head_dim, state, sizes), AHEAD=x.dtype != torch.float32,
            PRECISION=PRECISION, **kinds, num_warps=4, num_stages=1, **sizes,
        )  # fmt: skip
    return y, final
