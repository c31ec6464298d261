"""Mamba-2's scan: the compiled loops and the chunks against the float64 reference, and the public functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import DOCUMENTS, EXACT, ROUNDED, assert_equals_reference, seq_idx_of, ssd_tensors

from ssm_tune.kernels import cpu_ssd, reference, ssd_chunked, ssd_scan, ssd_step

OPTIONAL = ("D", "dt_bias", "initial_state")
Scan = Callable[..., Any]
both = pytest.mark.parametrize("scan", [cpu_ssd.ssd_scan, ssd_chunked.ssd_scan], ids=["numba", "chunked"])


@both
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents(documents: str, scan: Scan) -> None:
    assert_equals_reference("ssd_scan", scan, ssd_tensors(), seq_idx=seq_idx_of(documents))


@both
@pytest.mark.parametrize("without", [(), *[(name,) for name in OPTIONAL], OPTIONAL])
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_optional_arguments(without: tuple[str, ...], dt_softplus: bool, scan: Scan) -> None:
    tensors = ssd_tensors(without=without)
    if not dt_softplus:  # positive step sizes
        tensors |= {name: t.abs() * 0.1 for name, t in tensors.items() if name in ("dt", "dt_bias") and t is not None}
    seq_idx = seq_idx_of("padding on both sides and between")
    assert_equals_reference("ssd_scan", scan, tensors, dt_softplus=dt_softplus, seq_idx=seq_idx)


@both
@pytest.mark.parametrize("dt_limit", [(0.0, 0.2), (0.1, math.inf), (0.05, 0.3)])
def test_limits_of_the_time_step(dt_limit: tuple[float, float], scan: Scan) -> None:
    seq_idx = seq_idx_of("padding on both sides and between")
    assert_equals_reference("ssd_scan", scan, ssd_tensors(), dt_limit=dt_limit, seq_idx=seq_idx)


@both
def test_a_skip_for_each_channel(scan: Scan) -> None:
    tensors = ssd_tensors() | {"D": torch.randn(4, 6).double()}
    assert_equals_reference("ssd_scan", scan, tensors)


@both
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_lengths_around_a_chunk(length: int, scan: Scan) -> None:
    assert_equals_reference("ssd_scan", scan, ssd_tensors(length=length))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 256])
def test_the_chunk_size_changes_nothing(chunk_size: int) -> None:
    seq_idx = seq_idx_of("start in the middle")
    assert_equals_reference("ssd_scan", ssd_chunked.ssd_scan, ssd_tensors(), chunk_size=chunk_size, seq_idx=seq_idx)


@both
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state"),
    [(1, 1, 1, 1), (4, 6, 1, 3), (6, 4, 3, 8), (8, 64, 8, 128), (2, 128, 1, 256)],
)
def test_sizes(heads: int, head_dim: int, groups: int, state: int, scan: Scan) -> None:
    tensors = ssd_tensors(1, 19, heads, head_dim, groups, state)
    assert_equals_reference("ssd_scan", scan, tensors)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_number_of_threads_and_rows(threads: int, batch: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equals_reference("ssd_scan", cpu_ssd.ssd_scan, ssd_tensors(batch=batch, length=9, heads=6))
    finally:
        torch.set_num_threads(before)


@both
def test_inputs_that_are_not_contiguous(scan: Scan) -> None:
    def lose_contiguity(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    assert_equals_reference("ssd_scan", scan, ssd_tensors(), view=lose_contiguity)


@both
def test_bfloat16_inputs_are_computed_in_float32(scan: Scan) -> None:
    wide = ("A", "D", "dt_bias", "initial_state")
    tensors, seq_idx = ssd_tensors(), seq_idx_of("start in the middle")
    assert_equals_reference("ssd_scan", scan, tensors, torch.bfloat16, ROUNDED, wide=wide, seq_idx=seq_idx)
    half = {name: t.float() if name in wide else t.bfloat16() for name, t in tensors.items()}
    y, state = scan(**half, return_final_state=True)
    y_wide, state_wide = scan(**{name: t.float() for name, t in half.items()}, return_final_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, y_wide.bfloat16())
    assert torch.equal(state, state_wide)


@both
def test_heads_that_forget_fast_keep_their_digits(scan: Scan) -> None:
    tensors = ssd_tensors(length=130)
    tensors["A"] = tensors["A"] * 2
    tensors["dt_bias"] = tensors["dt_bias"] * 0
    assert_equals_reference("ssd_scan", scan, tensors)


@both
def test_a_row_in_two_calls_is_the_row_in_one(scan: Scan) -> None:
    tensors = {name: t.float() for name, t in ssd_tensors().items()}
    y, last = scan(**tensors, return_final_state=True)
    head = {name: t[:, :40] if name in ("x", "dt", "B", "C") else t for name, t in tensors.items()}
    tail = {name: t[:, 40:] if name in ("x", "dt", "B", "C") else t for name, t in tensors.items()}
    y_head, middle = scan(**head, return_final_state=True)
    y_tail, end = scan(**(tail | {"initial_state": middle}), return_final_state=True)
    torch.testing.assert_close(torch.cat([y_head, y_tail], 1), y, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(end, last, rtol=EXACT, atol=EXACT)


def test_steps_are_the_scan() -> None:
    tensors = {name: t.float() for name, t in ssd_tensors(length=5).items()}
    y, last = ssd_scan(**tensors, dt_limit=(0.0, 0.5), return_final_state=True)
    state = tensors["initial_state"].clone()
    for i in range(5):
        x, dt, B, C = (tensors[name][:, i] for name in ("x", "dt", "B", "C"))
        step = ssd_step(x, dt, tensors["A"], B, C, state, tensors["D"], tensors["dt_bias"], dt_limit=(0.0, 0.5))
        torch.testing.assert_close(step, y[:, i], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state, last, rtol=EXACT, atol=EXACT)


@both
def test_padding_may_hold_anything(scan: Scan) -> None:
    tensors = {name: t.float() for name, t in ssd_tensors(batch=1).items()}
    seq_idx = torch.tensor([[-1] * 3 + [0] * 27 + [-1] * 7 + [0] * 30], dtype=torch.int32)
    clean = scan(**tensors, seq_idx=seq_idx)
    for name in ("x", "dt", "B", "C"):
        tensors[name][seq_idx == -1] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    y = scan(**leaves, seq_idx=seq_idx)
    assert torch.equal(y, clean)
    for name, gradient in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
        assert gradient.isfinite().all(), name


def test_nothing_of_one_document_reaches_another() -> None:
    tensors = {name: t.float() for name, t in ssd_tensors(batch=1).items()}
    seq_idx = torch.tensor([[0] * 30 + [1] * 37], dtype=torch.int32)
    clean = ssd_scan(**tensors, seq_idx=seq_idx)
    tensors["x"][:, 3] = torch.inf
    spoilt = {name: t.requires_grad_() for name, t in tensors.items()}
    y = ssd_scan(**spoilt, seq_idx=seq_idx)
    assert torch.equal(y[:, 30:], clean[:, 30:])
    gradient = torch.autograd.grad(y[:, 30:].sum(), spoilt["x"])[0]
    assert not gradient[:, :30].any()
    assert gradient[:, 30:].isfinite().all()


def test_public_function_uses_the_compiled_loops_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ssd_scan", None)
    monkeypatch.setattr(ssd_chunked, "ssd_scan", None)
    tensors = {name: t.float() for name, t in ssd_tensors(length=3).items()}
    assert torch.equal(ssd_scan(**tensors), cpu_ssd.ssd_scan(**tensors))


def test_shapes_that_do_not_belong_together_are_named() -> None:
    tensors = {name: t.float() for name, t in ssd_tensors(length=3).items()}
    with pytest.raises(ValueError, match=r"ssd_scan: D is \(3,\), expected \(4,\) or \(4, 6\)"):
        ssd_scan(**(tensors | {"D": torch.zeros(3)}))
    with pytest.raises(ValueError, match="ssd_scan: 4 heads are not a multiple of 3 groups"):
        ssd_scan(**(tensors | {name: torch.zeros(2, 3, 3, 16) for name in ("B", "C")}))
