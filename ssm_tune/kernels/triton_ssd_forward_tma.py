"""The kernel of the forward pass of Mamba-2's scan where Hopper's tensor memory accelerator copies its tiles.

It computes what `output_kernel` of `triton_ssd_forward` does. Tiles come into shared memory, and leave it, without
passing through registers, of which that kernel has too few: 0.10 ms for its 0.12 on an H200, and 0.13 for 0.16 with the
states. But a launch takes the host twice as long, so that it is for launches that are recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ssm_tune.kernels.devices import launches_are_recorded
from ssm_tune.kernels.triton_scan_steps import _LOG2_E
from ssm_tune.kernels.triton_ssd_common import CHUNK, within_chunk

HEAD_DIM = 64  # channels of a program
_STATES = (64, 128)
_HOPPER = 9
_ALIGNED = 16  # bytes


@triton.jit(do_not_specialize=["heads", "chunks"])
def copied_output_kernel(
    x, B, C, D, step, decay, reach, initial, y, final, states, heads, chunks, heads_of_group, head_dims, D_head,
    D_channel, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, HAS_D: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_STATES: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """y of a row, the state after it, and those before every chunk, for one head and HEAD_DIM of its channels.

    x, B, C and y are `tiles_of_tokens`, states `tiles_of_states`. Grid: (heads, blocks, batch).
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
    for chunk in range(chunks):
        token = chunk * CHUNK
        values = x.load([row, head, token, first]).reshape(CHUNK, HEAD_DIM)
        b = B.load([row, group, token, 0]).reshape(CHUNK, STATE)
        c = C.load([row, group, token, 0]).reshape(CHUNK, STATE)
        values = tl.trans(values)
        steps, decays = tl.load(step + token + place), tl.load(decay + token + place) * _LOG2_E
        total = tl.load(decay + token + CHUNK - 1) * _LOG2_E
        fading, weight, through = tl.exp2(decays), tl.exp2(total - decays) * steps, tl.exp2(total)
        reaches = 0
        if HAS_DOCUMENTS:
            reaches, last = tl.load(reach + token + place), tl.load(reach + token + CHUNK - 1)
            fading = tl.where(reaches < 0, fading, 0.0)
            weight = tl.where(place >= last, weight, 0.0)
            through = tl.where(last < 0, through, 0.0)
        if HAS_STATES:
            before = tl.trans(state.to(states.dtype))
            states.store([of_head * chunks + chunk, 0, first], before.reshape(1, STATE, HEAD_DIM))
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
