"""H3's two systems: long convolutions equal the recurrences, documents, padding and states included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_tune.kernels import linear_ssm
from ssm_tune.kernels.linear_ssm import DiagonalSSM
from ssm_tune.kernels.long_conv import long_conv

DIM, STATE, COPIES = 3, 6, 2
SEQ_IDX = torch.tensor(
    [
        [0] * 3 + [1] * 1 + [2] * 8,
        [-1, -1, 0, 0, -1, 0, 1, 1, -1, 1, -1, -1],  # padding before, within and after documents
        [0] * 12,
        [-1] * 12,
    ],
    dtype=torch.int32,
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def systems() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Each scan and step, with parameters."""
    system = DiagonalSSM(
        log_dt=draw(DIM) - 1,
        inv_A_real=draw(DIM, STATE // 2) - 1,
        A_imag=draw(DIM, STATE // 2) * 3,
        B=draw(DIM, STATE // 2, 2),
        C=draw(DIM, STATE // 2, 2),
    )
    B, C = draw(DIM, STATE), draw(DIM, STATE)
    return {
        "diagonal": (
            lambda u, **options: linear_ssm.diagonal_scan(u, system, **options),
            lambda u, state: linear_ssm.diagonal_step(u, system, state),
        ),
        "shift": (
            lambda u, **options: linear_ssm.shift_scan(u, B, C, **options),
            lambda u, state: linear_ssm.shift_step(u, B, C, state),
        ),
    }


def before_anything(kind: str, batch: int) -> Tensor:
    shape = (STATE // 2, 2) if kind == "diagonal" else (STATE - 1,)
    return torch.zeros(batch, COPIES, DIM, *shape, dtype=torch.float64)


def recur(kind: str, step: Callable[..., Any], u: Tensor, state: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """One row (length, copies, dim), one token at a time; numbers: the document of each token."""
    outputs, last = [], None
    for token, number in zip(u, numbers.tolist(), strict=True):
        if number == -1:
            outputs.append(torch.zeros_like(token))
            continue
        if last is not None and number != last:
            state = before_anything(kind, 1)
        last = number
        y, state = step(token[None], state)
        outputs.append(y[0])
    return torch.stack(outputs), state


@pytest.mark.parametrize("kind", ["diagonal", "shift"])
@pytest.mark.parametrize("continued", [False, True])
def test_scan_equals_the_recurrence(kind: str, continued: bool) -> None:
    scan, step = systems()[kind]
    u = draw(4, 12, COPIES, DIM)
    state = before_anything(kind, 4)
    if continued:
        state = scan(draw(4, 7, COPIES, DIM), return_final_state=True)[1]
    y, final = scan(u, seq_idx=SEQ_IDX, initial_state=state if continued else None, return_final_state=True)
    for row in range(4):
        expected = recur(kind, step, u[row], state[row : row + 1], SEQ_IDX[row])
        torch.testing.assert_close((y[row], final[row : row + 1]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["diagonal", "shift"])
def test_a_plain_row_equals_the_recurrence(kind: str) -> None:
    scan, step = systems()[kind]
    u = draw(2, 9, COPIES, DIM)
    y, final = scan(u, return_final_state=True)
    for row in range(2):
        expected = recur(kind, step, u[row], before_anything(kind, 1), torch.zeros(9))
        torch.testing.assert_close((y[row], final[row : row + 1]), expected, rtol=1e-9, atol=1e-9)


def test_shift_step_is_the_state_space_model() -> None:
    """h moves on by one place, B takes the input in, C reads out (H3, section 3.2)."""
    B, C, u = draw(DIM, STATE), draw(DIM, STATE), draw(1, 10, 1, DIM)
    state, expected = torch.zeros(DIM, STATE, dtype=torch.float64), []
    for t in range(10):
        state = torch.nn.functional.pad(state[:, :-1], (1, 0)) + B * u[0, t, 0, :, None]
        expected.append((C * state).sum(-1))
    torch.testing.assert_close(linear_ssm.shift_scan(u, B, C)[0, :, 0], torch.stack(expected))


def test_gradients_stay_within_documents() -> None:
    u = draw(1, 12, 1, DIM).requires_grad_()
    kernel = draw(DIM, 12)
    y = long_conv(u, kernel, SEQ_IDX[:1])
    (gradient,) = torch.autograd.grad(y[:, 4:].sum(), u)
    assert (gradient[:, :4] == 0).all() and (gradient[:, 4:] != 0).all()
    alone = long_conv(u[:, 4:].detach(), kernel)
    torch.testing.assert_close(y[:, 4:], alone, rtol=1e-9, atol=1e-9)


def test_where_a_document_lies_does_not_show_in_float32() -> None:
    """A system that turns fast, as H3's do at birth: all its powers are as right in long rows as in short."""
    states, lengths = 32, [1100, 331, 617]
    ones = torch.ones(DIM, states)
    system = DiagonalSSM(
        log_dt=torch.full((DIM,), 0.1).log(),
        inv_A_real=ones * math.log(0.5),
        A_imag=math.pi * torch.arange(states).expand(DIM, states),
        B=torch.stack([ones, 0 * ones], dim=-1),
        C=torch.randn(DIM, states, 2),
    )
    u = torch.randn(1, sum(lengths), 1, DIM)
    seq_idx = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    packed = linear_ssm.diagonal_scan(u, system, seq_idx=seq_idx)
    alone = torch.cat([linear_ssm.diagonal_scan(part, system) for part in u.split(lengths, dim=1)], dim=1)
    assert (packed - alone).abs().max() <= 2e-6 * alone.abs().max()
