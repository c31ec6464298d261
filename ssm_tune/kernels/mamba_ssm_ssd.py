"""Mamba-2's scan and its step form through the Triton kernels of the package mamba_ssm.

In float32 their products run in TF32 unless the environment has TRITON_F32_DEFAULT=ieee: expect 1e-3, relative.
`package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import find_documents
from ssm_tune.kernels.packages import MAMBA_SSM, Package
from ssm_tune.kernels.reference import time_step

# Offsets within a tensor are 32-bit in the kernels: beyond, they crash or give finite wrong values.
_LARGEST = 2**31
_NO_LIMIT = (0.0, math.inf)


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
    dt_limit: tuple[float, float] = _NO_LIMIT,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    package: Package = MAMBA_SSM,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.ssd_scan`; x, B and C are used in the dtype of x, the rest in float32.

    Rows too large for 32-bit offsets are done one by one, and cut where one is too long, with the state carried over.

    Raises:
        Unsupported: float64, or a single chunk beyond 32-bit offsets.
    """
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed in PyTorch only")
    kernel = package.function("ops.triton.ssd_combined.mamba_chunk_scan_combined")
    batch = x.shape[0]
    documents = None if seq_idx is None else find_documents(seq_idx)
    number, padding = (None, None) if documents is None else (documents.number, documents.is_padding)
    A, D, dt_bias = (None if t is None else t.float() for t in (A, D, dt_bias))
    B, C = B.to(x.dtype), C.to(x.dtype)
    if padding is not None:
        # No step: the state passes, and nothing enters. The kernel's own limits would make a step of it.
        dt = time_step(dt.masked_fill(padding[..., None], 0.0), dt_bias, dt_softplus, dt_limit)
        dt = dt.masked_fill(padding[..., None], 0.0)
        dt_bias, dt_softplus, dt_limit = None, False, _NO_LIMIT
        x = x.masked_fill(padding[..., None, None], 0.0)
    settings = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    rows, tokens = piece_that_fits(x, dt, B, C, chunk_size)
    with device_of(x):
        done = []
        for row in range(0, batch, rows):
            some = slice(row, row + rows)
            inputs = [None if t is None else t[some] for t in (x, dt, B, C, number, initial_state)]
            done.append(_scan_rows(kernel, *inputs, A, chunk_size, tokens, return_final_state, settings))
    y = _join([y for y, _ in done], 0)
    if padding is not None:
        y = y.masked_fill(padding[..., None, None], 0.0)
    return (y, _join([state for _, state in done], 0)) if return_final_state else y


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _scan_rows(
    kernel: Callable[..., Tensor | tuple[Tensor, Tensor]],
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    number: Tensor | None,
    state: Tensor | None,
    A: Tensor,
    chunk_size: int,
    tokens: int,
    return_final_state: bool,
    settings: dict[str, object],
) -> tuple[Tensor, Tensor | None]:
    """The kernel on pieces of at most `tokens` tokens, each from the state of the one before it."""
    length = x.shape[1]
    done = []
    for first in range(0, length, tokens):
        some = slice(first, first + tokens)
        documents = None
        if number is not None:
            # To the kernel, the state that it is given is of document 0.
            documents = number[:, some] - (number[:, first - 1 : first] if first else 0)
            documents = documents.contiguous()
        carry = return_final_state or first + tokens < length
        found = kernel(
            x[:, some],
            dt[:, some],
            A,
            B[:, some],
            C[:, some],
            chunk_size,
            initial_states=state,
            seq_idx=documents,
            return_final_states=carry,
            **settings,
        )
        y, state = found if carry else (found, None)
        done.append(y)
    return _join(done, 1), state


def piece_that_fits(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> tuple[int, int]:
    """Rows, and tokens of each, that can go to the kernel at once."""
    batch, length, heads, head_dim = x.shape
    groups, states = B.shape[-2:]
    heads_of_group = heads // groups
    # Numbers for each token of a row: the inputs as they lie in memory, the states before chunks, and, in the
    # backward, one grad_B for every split of a group's heads, and one product of B and C for every split. There are
    # as many splits as heads at worst, and one where the rows are long enough to fill the device.
    chunks = batch * -(-length // chunk_size)
    splits = -(-heads_of_group // max(1, min(chunks * heads // _multiprocessors(x), heads_of_group)))
    a_token = max(
        x.stride(1),
        dt.stride(1),
        B.stride(1),
        C.stride(1),
        heads * head_dim,
        -(-heads * head_dim * states // chunk_size),
        splits * groups * max(states, chunk_size),
    )
    whole_chunks = -(-length // chunk_size) * chunk_size
    if batch * whole_chunks * a_token < _LARGEST:
        return batch, length
    tokens = (_LARGEST - 1) // a_token // chunk_size * chunk_size
    if tokens == 0:
        raise Unsupported(f"a chunk of {chunk_size} tokens is beyond 32-bit offsets")
    return 1, min(tokens, length)


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    *,
    package: Package = MAMBA_SSM,
) -> Tensor:
    """The operation of `ssm_tune.kernels.ssd_step`.

    Raises:
        Unsupported: float64.
    """
    if torch.float64 in {x.dtype, state.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    update = package.function("ops.triton.selective_state_update.selective_state_update")
    _, heads, head_dim = x.shape
    if tuple(dt_limit) != _NO_LIMIT:  # the kernel has none
        dt, dt_bias, dt_softplus = time_step(dt, dt_bias, dt_softplus, dt_limit), None, False
    # The kernel's launch fails without a D and a bias.
    D, dt_bias = (x.new_zeros(heads, dtype=torch.float32) if t is None else t for t in (D, dt_bias))
    # One number a head, seen as one for each channel: the kernel recognises it by the strides of zero.
    D = D if D.dim() == 2 else D[:, None].expand(heads, head_dim)
    spread = (dt[..., None].expand(x.shape), A[:, None, None].expand(heads, head_dim, B.shape[-1]))
    with device_of(x):
        return update(state, x, *spread, B, C, D, None, dt_bias[:, None].expand(heads, head_dim), dt_softplus)
