"""Mamba-3's scan on mamba_ssm's Triton kernel: SISO, CUDA, bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.mamba3 import Mamba3Inputs, Mamba3State, MimoFactors, empty_state
from ssm_tune.kernels.reference import starts_and_padding

_LARGEST = 2**31 - 1  # the kernel counts elements in 32 bits


def _check(inputs: Mamba3Inputs, mimo: MimoFactors | None) -> None:
    """Raise Unsupported for what the kernel does not compute, or less precisely than the inputs are."""
    if mimo is not None:
        raise Unsupported("it is for SISO; MIMO's kernel needs TileLang and is not used")
    if inputs.x.dtype != torch.bfloat16:
        raise Unsupported(f"it rounds everything to bfloat16, and x is {str(inputs.x.dtype).removeprefix('torch.')}")
    heads, head_dim = inputs.x.shape[2:]
    state, angles = inputs.B.shape[4], inputs.angles.shape[-1]
    if not (_is_power_of_two(head_dim) and _is_power_of_two(state)) or min(head_dim, state) < 16 or angles % 2:
        raise Unsupported(
            f"head_dim {head_dim} and state {state} must be powers of two from 16 on, and the {angles} angles even"
        )
    if inputs.x.shape[0] * inputs.x.shape[1] * heads * max(head_dim, state) > _LARGEST:
        raise Unsupported("it counts elements in 32 bits, and there are more in this batch")


def mamba3_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    trap: Tensor,
    B: Tensor,
    C: Tensor,
    angles: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    mimo: MimoFactors | None = None,
    *,
    chunk_size: int = 64,
    seq_idx: Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    """As `kernels.mamba3.mamba3_scan`.

    With seq_idx the real tokens of all rows are laid end to end, each document a sequence of its own: this waits for
    the device once, to know their number, and computes nothing for padding.
    """
    inputs = Mamba3Inputs(x, dt, A, trap, B, C, angles, z)
    _check(inputs, mimo)
    with torch.autocast(x.device.type, enabled=False):
        if seq_idx is None:
            result = _call(inputs, B_bias, C_bias, D, initial_state, None, return_final_state)
            return (result[0], _as_state(result[1:])) if return_final_state else result
        return _scan_documents(inputs, B_bias, C_bias, D, seq_idx, initial_state, return_final_state)


def _scan_documents(
    inputs: Mamba3Inputs,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    seq_idx: Tensor,
    initial_state: Mamba3State | None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Mamba3State]:
    batch, length = seq_idx.shape
    starts, padding = starts_and_padding(seq_idx, batch, length, seq_idx.device)
    real = (~padding).flatten().nonzero()[:, 0]
    before = empty_state(inputs) if initial_state is None else initial_state
    if real.numel() == 0:
        y = torch.zeros_like(inputs.x)
        return (y, before) if return_final_state else y
    row = real // length  # of each real token
    begins = starts.flatten()[real].clone()
    begins[0] = True
    begins[1:] |= row[1:] != row[:-1]
    first = begins.nonzero()[:, 0]
    borders = torch.cat([first, first.new_tensor([real.numel()])]).to(torch.int32)
    flat = Mamba3Inputs(*(None if part is None else part.flatten(0, 1).index_select(0, real)[None] for part in inputs))
    states = None
    if initial_state is not None:
        row_of_first = row[first]
        leads = torch.ones_like(row_of_first, dtype=torch.bool)  # the first document of its row
        leads[1:] = row_of_first[1:] != row_of_first[:-1]
        states = Mamba3State(*(part[row_of_first] * _like(leads, part) for part in before))
    result = _call(flat, B_bias, C_bias, D, states, borders, return_final_state)
    y = result[0] if return_final_state else result
    spread = y.new_zeros(batch * length, *y.shape[2:]).index_copy(0, real, y[0]).unflatten(0, (batch, length))
    if not return_final_state:
        return spread
    # The last document of each row is written last, and rows without real tokens keep what they had.
    rows = row[first]
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    after = _as_state(result[1:])
    kept = (old.float().index_copy(0, rows[last], new[last]) for old, new in zip(before, after, strict=True))
    return spread, Mamba3State(*kept)


def _call(
    inputs: Mamba3Inputs,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    state: Mamba3State | None,
    borders: Tensor | None,
    return_final_state: bool,
) -> Any:
    heads = inputs.x.shape[2]
    states = None if state is None else (state.angle, state.ssm, state.k.squeeze(1), state.x)
    return mamba3_siso_combined(
        Q=inputs.C.squeeze(2),
        K=inputs.B.squeeze(2),
        V=inputs.x,
        ADT=(inputs.A * inputs.dt).float().transpose(1, 2),
        DT=inputs.dt.float().transpose(1, 2),
        Trap=inputs.trap.transpose(1, 2),
        Q_bias=C_bias.squeeze(1).float(),
        K_bias=B_bias.squeeze(1).float(),
        Angles=inputs.angles[:, :, None].expand(-1, -1, heads, -1),
        D=D.float(),
        Z=inputs.z,
        Input_States=states,
        chunk_size=64,  # the one that the kernel is tuned for
        return_final_states=return_final_state,
        cu_seqlens=borders,
    )


def _as_state(parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> Mamba3State:
    angle, ssm, k, x = parts
    return Mamba3State(angle.float(), ssm.float(), k.float()[:, None], x.float())


def _like(rows: Tensor, part: Tensor) -> Tensor:
    return rows.to(part.dtype).view(-1, *[1] * (part.dim() - 1))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
