"""Mamba-3's scan token by token: the truth that its other backends are tested against.

Documents and padding as in `kernels/reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssm_tune.kernels.mamba3 import Mamba3Inputs, Mamba3State, MimoFactors, empty_state, mamba3_step
from ssm_tune.kernels.reference import starts_and_padding


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
    """As `kernels.mamba3.mamba3_scan`."""
    inputs = Mamba3Inputs(x, dt, A, trap, B, C, angles, z)
    batch, length = x.shape[:2]
    starts, padding = starts_and_padding(seq_idx, batch, length, inputs.x.device)
    state = empty_state(inputs) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        token = Mamba3Inputs(*(None if tensor is None else tensor[:, t] for tensor in inputs))
        before = Mamba3State(*(_where(starts[:, t], torch.zeros_like(part), part) for part in state))
        y, after = mamba3_step(token, B_bias, C_bias, D, before, mimo)
        state = Mamba3State(*(_where(padding[:, t], old, new) for old, new in zip(state, after, strict=True)))
        outputs.append(_where(padding[:, t], torch.zeros_like(y), y))
    y = torch.stack(outputs, dim=1)
    return (y, state) if return_final_state else y


def _where(rows: Tensor, chosen: Tensor, otherwise: Tensor) -> Tensor:
    """`chosen` in the rows (batch,) that are marked, `otherwise` in the others."""
    return torch.where(rows.view(-1, *[1] * (otherwise.dim() - 1)), chosen, otherwise)
