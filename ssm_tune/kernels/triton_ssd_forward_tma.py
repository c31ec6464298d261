"""The kernel of the forward pass of Mamba-2's scan where Hopper's tensor memory accelerator copies its tiles.

It computes what `output_kernel` of `triton_ssd_forward` does, to the bit. Tiles of B, C, y and states come into shared
memory, and leave it, without passing through registers, of which that kernel has too few; x and the steps are read a
chunk ahead. 0.098 ms for its 0.122 on an H200, and 0.109 for 0.158 with the states; but a launch takes the host longer,
so that it is for launches that are recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ssm_tune.kernels.devices import launches_are_recorded
from ssm_tune.kernels.triton_scan_steps import _LOG2_E
from ssm_tune.kernels.triton_ssd_common import CHUNK, read_tokens, within_chunk

HEAD_DIM = 64  # channels of a program
_STATES = (64, 128)
_HOPPER = 9
_ALIGNED = 16  # bytes


@triton.jit
def read_steps(step, decay, reach, place, CHUNK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Steps, decays and reaches of the chunk that they point at, and its last decay and reach."""
    steps, decays, total = tl.load(step + place), tl.load(decay + place), tl.load(decay + CHUNK - 1)
    reaches, last = 0, 0
    if HAS_DOCUMENTS:
        reaches, last = tl.load(reach + place), tl.load(reach + CHUNK - 1)
    return steps, decays, total, reaches, last


@triton.jit(do_not_specialize=["length", "heads", "chunks"])
def copied_output_kernel(
    x, B, C, D, step, decay, reach, initial, y, final, states, length, heads, chunks, heads_of_group, head_dims,
    x_row, x_token, x_head, D_head, D_channel,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, EVEN: tl.constexpr, HAS_D: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_STATES: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """y of a row, the state after it, and those before every chunk, for one head and HEAD_DIM of its channels.

    B, C and y are `tiles_of_tokens`, states `tiles_of_states`. x and the steps of the next chunk are read before this
    one is computed. Grid: (heads, blocks, batch).
    """
    head, row = tl.program_id(0), tl.program_id(2)
    first, group = tl.program_id(1) * HEAD_DIM, head // heads_of_group
    place, n = tl.arange(0, CHUNK), tl.arange(0, STATE)
    p = first + tl.arange(0, HEAD_DIM)
    of_head = row * heads + head
    step += of_head.to(tl.int64) * chunks * CHUNK
    decay += of_head.to(tl.int64) * chunks * CHUNK
    if HAS_DOCUMENTS:
        reach += row.to(tl.int64) * chunks * CHUNK
    tile = of_head.to(tl.int64) * head_dims * STATE + p[:, None] * STATE + n[None, :]
    state = tl.zeros([HEAD_DIM, STATE], tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + tile)
    if HAS_D:
        skip = tl.load(D + head * D_head + p * D_channel)
    x += row.to(tl.int64) * x_row + head.to(tl.int64) * x_head
    next_values = read_tokens(x, place, p, length, head_dims, x_token, EVEN)
    ahead = read_steps(step, decay, reach, place, CHUNK, HAS_DOCUMENTS)
    for chunk in range(chunks):
        token = chunk * CHUNK
        if HAS_STATES:
            before = tl.trans(state.to(states.dtype))
            states.store([of_head * chunks + chunk, 0, first], before.reshape(1, STATE, HEAD_DIM))
        values = next_values
        steps, decays, total, reaches, last = ahead
        after = tl.minimum(chunk + 1, chunks - 1) * CHUNK  # after the last chunk that again, which nobody uses
        next_values = read_tokens(x + after * x_token, place, p, length - after, head_dims, x_token, EVEN)
        b = B.load([row, group, token, 0]).reshape(CHUNK, STATE)
        c = C.load([row, group, token, 0]).reshape(CHUNK, STATE)
        ahead = read_steps(
            step + after, decay + after, reach + after if HAS_DOCUMENTS else reach, place, CHUNK, HAS_DOCUMENTS
        )
        values = tl.trans(values)
        decays, total = decays * _LOG2_E, total * _LOG2_E
        fading, weight, through = tl.exp2(decays), tl.exp2(total - decays) * steps, tl.exp2(total)
        if HAS_DOCUMENTS:
            fading = tl.where(reaches < 0, fading, 0.0)
            weight = tl.where(place >= last, weight, 0.0)
            through = tl.where(last < 0, through, 0.0)
        scores = tl.dot(b, tl.trans(c))
        mixing = within_chunk(scores, steps, decays, reaches, place, HAS_DOCUMENTS).to(values.dtype)
        out = tl.dot(state.to(c.dtype), tl.trans(c)) * fading[None, :]
        out = tl.dot(values, mixing, acc=out)
        if HAS_D:
            out += skip[:, None] * values.to(tl.float32)
        entering = (values.to(tl.float32) * weight[None, :]).to(values.dtype)
        state = tl.dot(entering, b, acc=state * through)
        y.store([row, head, token, first], tl.trans(out.to(y.dtype)).reshape(1, 1, CHUNK, HEAD_DIM))
    if HAS_FINAL:
        tl.store(final + tile, state)


def can_copy(x: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether the kernel is the one to be launched, for x, B and C as `scan_forward` has them."""
    if not launches_are_recorded() or not _has_engine(x.device):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[3] % HEAD_DIM or B.shape[3] not in _STATES:
        return False
    return all(_is_aligned(t) for t in (x, B, C))


def _has_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def _is_aligned(tensor: Tensor) -> bool:
    size = tensor.element_size()
    return tensor.data_ptr() % _ALIGNED == 0 and all(s > 0 and s * size % _ALIGNED == 0 for s in tensor.stride()[:3])


def tiles_of_tokens(tensor: Tensor, width: int) -> TensorDescriptor:
    """Of (batch, length, heads or groups, ...): a chunk of one head or group; zero, or not written, beyond the last
    token."""
    batch, length, heads, channels = tensor.shape
    row, token, head, _ = tensor.stride()
    return TensorDescriptor(tensor, [batch, heads, length, channels], [row, head, token, 1], [1, 1, CHUNK, width])


def tiles_of_states(states: Tensor) -> TensorDescriptor:
    """Of (batch, heads, chunks, state, head_dim), contiguous: all states of HEAD_DIM channels."""
    shape = [states.shape[:3].numel(), *states.shape[3:]]
    return TensorDescriptor(states, shape, [shape[1] * shape[2], shape[2], 1], [1, shape[1], HEAD_DIM])
