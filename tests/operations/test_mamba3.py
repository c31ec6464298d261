"""Mamba-3's scan: chunks equal tokens, tokens equal the paper's equations, documents and padding are kept apart."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_tune.kernels import mamba3, mamba3_chunked, mamba3_reference
from ssm_tune.kernels.backends import Unsupported
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


def scan(backend: Any, arguments: dict[str, Any], **options: Any) -> Any:
    return backend.mamba3_scan(**arguments["inputs"]._asdict(), **_others(arguments), **options)


def _others(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "inputs"}


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
    y = scan(backend, arguments, chunk_size=4 * RANK[kind])
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
    before = scan(mamba3_reference, make_inputs(kind, 3, 5), return_final_state=True)[1]
    options = {"seq_idx": seq_idx, "initial_state": before, "return_final_state": True}
    y, state = scan(mamba3, arguments, **options, chunk_size=chunk * RANK[kind])
    expected_y, expected_state = scan(mamba3_reference, arguments, **options)
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
    y = scan(mamba3, arguments, seq_idx=seq_idx, chunk_size=4 * RANK[kind])
    packed = torch.autograd.grad(y, tuple(arguments["inputs"]), grad)
    for tokens in (slice(0, 5), slice(5, 6), slice(6, 10)):
        alone = part_of(arguments, 0, tokens)
        y_alone = scan(mamba3_reference, alone)
        torch.testing.assert_close(y[:, tokens], y_alone, rtol=1e-9, atol=1e-9)
        gradients = torch.autograd.grad(y_alone, tuple(alone["inputs"]), grad[:, tokens])
        for whole, part in zip(packed, gradients, strict=True):
            torch.testing.assert_close(whole[:, tokens], part, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", RANK)
def test_a_row_in_pieces_and_by_steps_equals_the_row(kind: str) -> None:
    arguments = make_inputs(kind, 2, 9)
    whole = scan(mamba3, arguments)
    inputs = arguments["inputs"]
    state, pieces = None, []
    for tokens in (slice(0, 4), slice(4, 6)):
        piece = {**arguments, "inputs": Mamba3Inputs(*(tensor[:, tokens] for tensor in inputs))}
        y, state = scan(mamba3, piece, initial_state=state, return_final_state=True)
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
    y = scan(mamba3, arguments)
    expected = scan(mamba3, wide)
    assert ((y - expected).abs().max() / expected.abs().max()) < 1e-5


def test_mimo_gives_each_rank_for_a_norm_before_the_output_factors() -> None:
    arguments = make_inputs("mimo", 1, 5)
    mimo = arguments["mimo"]
    arguments["mimo"] = MimoFactors(mimo.x, mimo.z, None)
    arguments["inputs"] = arguments["inputs"]._replace(z=None)
    ranks = scan(mamba3, arguments)
    assert ranks.shape == (1, 5, RANK["mimo"], HEADS, HEAD_DIM)
    arguments["mimo"] = mimo
    torch.testing.assert_close((ranks * mimo.out.transpose(0, 1)).sum(2), scan(mamba3, arguments))


def test_shapes_that_do_not_belong_together_are_named() -> None:
    arguments = make_inputs("siso", 1, 3)
    with pytest.raises(ValueError, match=r"mamba3_scan: D is \(3,\), expected \(4,\)"):
        scan(mamba3, {**arguments, "D": torch.zeros(3)})
    with pytest.raises(ValueError, match="needs the factors of MIMO"):
        scan(mamba3, {**make_inputs("mimo", 1, 3), "mimo": None})


def stand_in(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor,
    Z: Tensor | None,
    Input_States: Any,
    chunk_size: int,
    return_final_states: bool,
    cu_seqlens: Tensor | None,
) -> Any:
    """mamba_ssm's mamba3_siso_combined by its documented shapes, on any device: each sequence by itself."""
    rows = [(row, 0, V.shape[1]) for row in range(V.shape[0])]
    if cu_seqlens is not None:
        assert V.shape[0] == 1 and cu_seqlens.dtype == torch.int32
        borders = cu_seqlens.tolist()
        rows = [(0, begin, end) for begin, end in itertools.pairwise(borders)]
    outputs, states = [], []
    for number, (row, begin, end) in enumerate(rows):
        part = (slice(row, row + 1), slice(begin, end))
        dt = DT.transpose(1, 2)[part]
        state = None
        if Input_States is not None:
            angle, ssm, k, x = (tensor[number : number + 1] for tensor in Input_States)
            state = mamba3.Mamba3State(angle, ssm, k[:, None], x)
        y, state = mamba3_reference.mamba3_scan(
            V[part].float(),
            dt,
            ADT.transpose(1, 2)[part] / dt,
            Trap.transpose(1, 2)[part],
            K[part][:, :, None].float(),
            Q[part][:, :, None].float(),
            Angles[part][:, :, 0],
            K_bias[:, None],
            Q_bias[:, None],
            D,
            None if Z is None else Z[part].float(),
            initial_state=state,
            return_final_state=True,
        )
        outputs.append(y.to(V.dtype))
        states.append((state.angle, state.ssm, state.k[:, 0], state.x))
    y = torch.cat(outputs, dim=1 if cu_seqlens is not None else 0)
    return (y, *(torch.cat(parts) for parts in zip(*states, strict=True))) if return_final_states else y


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_the_kernel_is_given_and_gives(packed: bool, continued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to mamba_ssm's kernel and back, with a stand-in for it: documents as sequences, states of rows."""
    name = "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined"
    for index, _ in enumerate(name.split(".")):
        monkeypatch.setitem(sys.modules, name.rsplit(".", index)[0], ModuleType("package"))
    sys.modules[name].mamba3_siso_combined = stand_in
    monkeypatch.delitem(sys.modules, "ssm_tune.kernels.mamba3_triton", raising=False)
    kernel = importlib.import_module("ssm_tune.kernels.mamba3_triton")
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 16)
    monkeypatch.setattr(sys.modules[__name__], "STATE", 16)
    arguments, earlier = make_inputs("siso", 3, 12, torch.float32), make_inputs("siso", 3, 4, torch.float32)
    low = {"x", "z", "B", "C", "trap", "angles"}
    fields = arguments["inputs"]._asdict().items()
    arguments["inputs"] = Mamba3Inputs(**{key: value.bfloat16() if key in low else value for key, value in fields})
    seq_idx = torch.tensor([[0] * 4 + [1] * 8, [-1, 0, 0, -1, 0, 1, 1, 1, 2, 2, -1, -1], [-1] * 12]).int()
    before = scan(mamba3_reference, earlier, return_final_state=True)[1] if continued else None
    options = {"seq_idx": seq_idx if packed else None, "initial_state": before, "return_final_state": True}
    y, state = scan(kernel, arguments, **options)
    expected, expected_state = scan(mamba3_chunked, arguments, **options)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(tuple(state), tuple(expected_state), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scan(kernel, arguments, **{**options, "return_final_state": False}), y)
    with pytest.raises(Unsupported, match="rounds everything to bfloat16"):
        scan(kernel, earlier)


# -- on a GPU ------------------------------------------------------------------------------------------------------


def gpu_inputs(batch: int, length: int) -> dict[str, Any]:
    """Sizes that the kernel takes: bfloat16 where it rounds, float32 where it does not."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    heads, head_dim, state = 4, 64, 64
    wide = {"dtype": torch.float32}
    inputs = Mamba3Inputs(
        x=draw(batch, length, heads, head_dim),
        z=draw(batch, length, heads, head_dim),
        B=draw(batch, length, 1, 2, state),
        C=draw(batch, length, 1, 2, state),
        dt=(draw(batch, length, heads, **wide) - 3).exp().detach().requires_grad_(),
        A=(-draw(batch, length, heads, **wide).exp()).detach().requires_grad_(),
        trap=draw(batch, length, heads),
        angles=draw(batch, length, 16),
    )
    biases = {name: draw(heads, 1, state, **wide) for name in ("B_bias", "C_bias")}
    return {"inputs": inputs, **biases, "D": draw(heads, **wide), "mimo": None}


def flat_tensors(arguments: dict[str, Any]) -> list[Tensor]:
    return [*arguments["inputs"], arguments["B_bias"], arguments["C_bias"], arguments["D"]]


def assert_near(found: Tensor, expected: Tensor, name: str) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 2e-2, (name, error.item())


@pytest.mark.gpu
@pytest.mark.parametrize("documents", ["whole", "packed", "gaps"])
def test_the_kernel_equals_chunks_in_float32(documents: str) -> None:
    pytest.importorskip("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined")
    from ssm_tune.kernels import mamba3_triton

    torch.manual_seed(0)
    length = 200
    seq_idx = None
    if documents != "whole":
        seq_idx = torch.arange(length, device="cuda")[None].expand(3, -1) // torch.tensor([[70], [33], [200]]).cuda()
        seq_idx = seq_idx.int().contiguous()
    if documents == "gaps":
        seq_idx[0, :9] = seq_idx[0, 30:41] = seq_idx[1, 190:] = -1
    arguments = gpu_inputs(3, length)
    before = scan(mamba3_chunked, gpu_inputs(3, 7), return_final_state=True)[1]
    options = {"seq_idx": seq_idx, "initial_state": tuple_state(before), "return_final_state": True}
    y, state = scan(mamba3_triton, arguments, **options)
    wide = {name: value if value is None else value.float() for name, value in _others(arguments).items()}
    wide["inputs"] = Mamba3Inputs(*(tensor.float() for tensor in arguments["inputs"]))
    expected, expected_state = scan(mamba3_chunked, wide, **options)
    grad = torch.randn_like(expected)
    assert_near(y, expected, "y")
    for name in ("ssm", "k", "x"):
        assert_near(getattr(state, name), getattr(expected_state, name), name)
    turn = torch.polar(torch.ones_like(state.angle), state.angle - expected_state.angle)
    assert (turn - 1).abs().max() < 2e-2
    found = torch.autograd.grad(y, flat_tensors(arguments), grad.to(y.dtype))
    wanted = torch.autograd.grad(expected, flat_tensors(arguments), grad)
    names = (*Mamba3Inputs._fields, "B_bias", "C_bias", "D")
    for name, got, true in zip(names, found, wanted, strict=True):
        assert_near(got, true, name)


def tuple_state(state: Any) -> Any:
    return type(state)(*(part.detach() for part in state))
