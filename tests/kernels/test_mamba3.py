"""Mamba-3's scan: chunks equal tokens, tokens equal the paper's equations, documents and padding are kept apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_tune.kernels import mamba3, mamba3_chunked, mamba3_reference
from ssm_tune.kernels.mamba3 import Mamba3Inputs, MimoFactors

HEADS, HEAD_DIM, STATE, GROUPS, ANGLES = 4, 6, 8, 2, 2
RANK = {"siso": 1, "mimo": 3}


def make_inputs(kind: str, batch: int, length: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    rank = RANK[kind]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    inputs = Mamba3Inputs(
        x=draw(batch, length, HEADS, HEAD_DIM),
        z=draw(batch, length, HEADS, HEAD_DIM),
        B=draw(batch, length, rank, GROUPS, STATE),
        C=draw(batch, length, rank, GROUPS, STATE),
        dt=draw(batch, length, HEADS).exp(),
        A=-draw(batch, length, HEADS).exp(),
        trap=draw(batch, length, HEADS),
        angles=draw(batch, length, ANGLES),
    )
    factors = [draw(HEADS, rank, HEAD_DIM) for _ in range(3)]
    return {
        "inputs": inputs,
        "B_bias": draw(HEADS, rank, STATE),
        "C_bias": draw(HEADS, rank, STATE),
        "D": draw(HEADS),
        "mimo": MimoFactors(*factors) if kind == "mimo" else None,
    }


def part_of(arguments: dict[str, Any], row: int, tokens: slice | Tensor) -> dict[str, Any]:
    inputs = Mamba3Inputs(*(tensor[row : row + 1, tokens] for tensor in arguments["inputs"]))
    return {**arguments, "inputs": inputs}


def equations(arguments: dict[str, Any]) -> Tensor:
    """The paper's recurrence with complex numbers, one head and pair of channels at a time, for one row.

    A pair of real channels turned by theta is a complex channel times exp(i theta); others have theta 0.
    """
    inputs, mimo = arguments["inputs"], arguments["mimo"]
    length, rank = inputs.x.shape[1], inputs.B.shape[2]
    y = torch.zeros(length, rank, HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        theta = torch.zeros(STATE // 2, dtype=torch.float64)
        state = torch.zeros(HEAD_DIM, STATE // 2, dtype=torch.complex128)
        last = torch.zeros_like(state)  # sum over ranks of x k of the token before
        for t in range(length):
            dt = inputs.dt[0, t, head]
            theta[:ANGLES] += math.pi * dt * torch.tanh(inputs.angles[0, t])
            turn = torch.polar(torch.ones_like(theta), theta)
            added, queries, values = torch.zeros_like(state), [], []
            for r in range(rank):
                k = inputs.B[0, t, r, group] + arguments["B_bias"][head, r]
                q = inputs.C[0, t, r, group] + arguments["C_bias"][head, r]
                k, q = (torch.complex(v[0::2], v[1::2]) if mimo is None else torch.complex(*v.chunk(2)) for v in (k, q))
                x = inputs.x[0, t, head] * (1 if mimo is None else mimo.x[head, r])
                added = added + x[:, None] * (k * turn)
                queries.append(q * turn)
                values.append(x)
            mix = torch.sigmoid(inputs.trap[0, t, head])
            alpha = torch.exp(dt * inputs.A[0, t, head])
            state = alpha * state + alpha * (1 - mix) * dt * last + mix * dt * added
            last = added
            for r in range(rank):
                y[t, r, head] = (state * queries[r].conj()).real.sum(-1) + arguments["D"][head] * values[r]
    z = inputs.z[0]
    if mimo is None:
        return y[:, 0] * torch.nn.functional.silu(z)
    gated = y * torch.nn.functional.silu(z[:, None] * mimo.z.transpose(0, 1))
    return (gated * mimo.out.transpose(0, 1)).sum(1)


@pytest.mark.parametrize("kind", RANK)
@pytest.mark.parametrize("backend", [mamba3_reference, mamba3_chunked])
def test_equals_the_papers_equations(kind: str, backend: Any) -> None:
    arguments = make_inputs(kind, 1, 11)
    y = backend.mamba3_scan(**arguments, chunk_size=4 * RANK[kind])
    torch.testing.assert_close(y[0], equations(arguments), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", RANK)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_equal_tokens_with_documents_padding_and_states(kind: str, chunk: int) -> None:
    arguments = make_inputs(kind, 3, 13)
    seq_idx = torch.tensor(
        [
            [0] * 4 + [1] * 5 + [2] * 4,
            [-1, -1, 0, 0, -1, 0, 0, 1, 1, -1, 1, -1, -1],  # padding before, within and after documents
            [-1] * 13,
        ],
        dtype=torch.int32,
    )
    before = mamba3_reference.mamba3_scan(**make_inputs(kind, 3, 5), return_final_state=True)[1]
    options = {"seq_idx": seq_idx, "initial_state": before, "return_final_state": True}
    y, state = mamba3.mamba3_scan(**arguments, **options, chunk_size=chunk * RANK[kind])
    expected_y, expected_state = mamba3_reference.mamba3_scan(**arguments, **options)
    torch.testing.assert_close(y, expected_y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tuple(state), tuple(expected_state), rtol=1e-9, atol=1e-9)
    assert (y[seq_idx == -1] == 0).all()


@pytest.mark.parametrize("kind", RANK)
def test_packed_documents_equal_each_alone_in_gradients_too(kind: str) -> None:
    arguments = make_inputs(kind, 1, 12)
    for tensor in arguments["inputs"]:
        tensor.requires_grad_()
    seq_idx = torch.tensor([[0] * 5 + [1] * 1 + [2] * 4 + [-1] * 2], dtype=torch.int32)
    grad = torch.randn(1, 12, HEADS, HEAD_DIM, dtype=torch.float64)
    y = mamba3.mamba3_scan(**arguments, seq_idx=seq_idx, chunk_size=4 * RANK[kind])
    packed = torch.autograd.grad(y, tuple(arguments["inputs"]), grad)
    for tokens in (slice(0, 5), slice(5, 6), slice(6, 10)):
        alone = part_of(arguments, 0, tokens)
        y_alone = mamba3_reference.mamba3_scan(**alone)
        torch.testing.assert_close(y[:, tokens], y_alone, rtol=1e-9, atol=1e-9)
        gradients = torch.autograd.grad(y_alone, tuple(alone["inputs"]), grad[:, tokens])
        for whole, part in zip(packed, gradients, strict=True):
            torch.testing.assert_close(whole[:, tokens], part, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", RANK)
def test_a_row_in_pieces_and_by_steps_equals_the_row(kind: str) -> None:
    arguments = make_inputs(kind, 2, 9)
    whole = mamba3.mamba3_scan(**arguments)
    inputs = arguments["inputs"]
    state, pieces = None, []
    for tokens in (slice(0, 4), slice(4, 6)):
        piece = {**arguments, "inputs": Mamba3Inputs(*(tensor[:, tokens] for tensor in inputs))}
        y, state = mamba3.mamba3_scan(**piece, initial_state=state, return_final_state=True)
        pieces.append(y)
    for t in range(6, 9):
        token = {**arguments, "inputs": Mamba3Inputs(*(tensor[:, t] for tensor in inputs))}
        y, state = mamba3.mamba3_step(**token, state=state)
        pieces.append(y[:, None])
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_float32_is_float32_over_a_long_row() -> None:
    """Angles are sums over the whole row, of which only the remainder by 2 pi counts: float32 sums would lose it."""
    arguments = make_inputs("siso", 1, 600, torch.float32)
    wide = {name: arguments[name].double() for name in ("B_bias", "C_bias", "D")}
    wide["inputs"] = Mamba3Inputs(*(tensor.double() for tensor in arguments["inputs"]))
    y = mamba3.mamba3_scan(**arguments)
    expected = mamba3.mamba3_scan(**wide)
    assert ((y - expected).abs().max() / expected.abs().max()) < 1e-5


def test_mimo_gives_each_rank_for_a_norm_before_the_output_factors() -> None:
    arguments = make_inputs("mimo", 1, 5)
    mimo = arguments["mimo"]
    arguments["mimo"] = MimoFactors(mimo.x, mimo.z, None)
    arguments["inputs"] = arguments["inputs"]._replace(z=None)
    ranks = mamba3.mamba3_scan(**arguments)
    assert ranks.shape == (1, 5, RANK["mimo"], HEADS, HEAD_DIM)
    arguments["mimo"] = mimo
    torch.testing.assert_close((ranks * mimo.out.transpose(0, 1)).sum(2), mamba3.mamba3_scan(**arguments))


def test_shapes_that_do_not_belong_together_are_named() -> None:
    arguments = make_inputs("siso", 1, 3)
    with pytest.raises(ValueError, match=r"mamba3_scan: D is \(3,\), expected \(4,\)"):
        mamba3.mamba3_scan(**{**arguments, "D": torch.zeros(3)})
    with pytest.raises(ValueError, match="needs the factors of MIMO"):
        mamba3.mamba3_scan(**{**make_inputs("mimo", 1, 3), "mimo": None})
