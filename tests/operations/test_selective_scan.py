"""Mamba-1's scan: the compiled loops against the float64 reference, and the public functions."""

from __future__ import annotations

import pytest
import torch
from comparison import DOCUMENTS, EXACT, ROUNDED, assert_equals_reference, scan_tensors, seq_idx_of

from ssm_tune.kernels import reference, selective_scan, selective_scan_step
from ssm_tune.kernels.cpu_scan import selective_scan as compiled_scan

OPTIONAL = ("D", "z", "dt_bias", "initial_state")


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents(documents: str) -> None:
    assert_equals_reference("selective_scan", compiled_scan, scan_tensors(), seq_idx=seq_idx_of(documents))


@pytest.mark.parametrize("without", [(), *[(name,) for name in OPTIONAL], OPTIONAL])
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_optional_arguments(without: tuple[str, ...], dt_softplus: bool) -> None:
    tensors = scan_tensors(without=without)
    if not dt_softplus:  # positive step sizes
        tensors |= {name: t.abs() * 0.1 for name, t in tensors.items() if name in ("dt", "dt_bias") and t is not None}
    seq_idx = seq_idx_of("padding on both sides and between")
    assert_equals_reference("selective_scan", compiled_scan, tensors, dt_softplus=dt_softplus, seq_idx=seq_idx)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_lengths_around_a_segment(length: int) -> None:
    assert_equals_reference("selective_scan", compiled_scan, scan_tensors(length=length))


@pytest.mark.parametrize(("dim", "state"), [(1, 1), (127, 5), (128, 16), (129, 16), (300, 3), (8, 128)])
def test_sizes_around_a_block_of_channels(dim: int, state: int) -> None:
    assert_equals_reference("selective_scan", compiled_scan, scan_tensors(batch=1, length=19, dim=dim, state=state))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_any_number_of_threads_and_rows(threads: int, batch: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equals_reference("selective_scan", compiled_scan, scan_tensors(batch=batch, length=9, dim=300))
    finally:
        torch.set_num_threads(before)


def test_inputs_that_are_not_contiguous() -> None:
    def lose_contiguity(tensor: torch.Tensor) -> torch.Tensor:
        wider = torch.cat([tensor, tensor], dim=-1)[..., ::2] * 0 + tensor  # a gradient passes through
        return wider.transpose(0, -1).contiguous().transpose(0, -1)

    assert_equals_reference("selective_scan", compiled_scan, scan_tensors(), view=lose_contiguity)
    halves = scan_tensors(dim=40)
    assert_equals_reference("selective_scan", compiled_scan, halves, view=lambda t: t.flip(0).flip(0))


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    wide = ("A", "D", "dt_bias", "initial_state")
    tensors, seq_idx = scan_tensors(), seq_idx_of("start in the middle")
    assert_equals_reference(
        "selective_scan", compiled_scan, tensors, torch.bfloat16, ROUNDED, wide=wide, seq_idx=seq_idx
    )
    half = {name: t.float() if name in wide else t.bfloat16() for name, t in tensors.items()}
    y, state = compiled_scan(**half, return_final_state=True)
    y_wide, state_wide = compiled_scan(**{name: t.float() for name, t in half.items()}, return_final_state=True)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(y, y_wide.bfloat16())
    assert torch.equal(state, state_wide)


def test_a_row_in_two_calls_is_the_row_in_one() -> None:
    tensors = {name: t.float() for name, t in scan_tensors().items()}
    y, last = compiled_scan(**tensors, return_final_state=True)
    head = {name: t[:, :40] if name in ("x", "dt", "B", "C", "z") else t for name, t in tensors.items()}
    tail = {name: t[:, 40:] if name in ("x", "dt", "B", "C", "z") else t for name, t in tensors.items()}
    y_head, middle = compiled_scan(**head, return_final_state=True)
    y_tail, end = compiled_scan(**(tail | {"initial_state": middle}), return_final_state=True)
    torch.testing.assert_close(torch.cat([y_head, y_tail], 1), y, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(end, last, rtol=EXACT, atol=EXACT)


def test_steps_are_the_scan() -> None:
    tensors = {name: t.float() for name, t in scan_tensors(length=5).items()}
    y, last = selective_scan(**tensors, return_final_state=True)
    state = tensors["initial_state"].clone()
    for i in range(5):
        x, dt, B, C, z = (tensors[name][:, i] for name in ("x", "dt", "B", "C", "z"))
        step = selective_scan_step(x, dt, tensors["A"], B, C, state, tensors["D"], z, tensors["dt_bias"])
        torch.testing.assert_close(step, y[:, i], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state, last, rtol=EXACT, atol=EXACT)


def test_nothing_of_one_document_reaches_another() -> None:
    tensors = {name: t.float() for name, t in scan_tensors(batch=1).items()}
    seq_idx = torch.tensor([[0] * 30 + [1] * 37], dtype=torch.int32)
    clean = compiled_scan(**tensors, seq_idx=seq_idx)
    tensors["x"][:, 3] = torch.nan
    spoilt = {name: t.requires_grad_() for name, t in tensors.items()}
    y = compiled_scan(**spoilt, seq_idx=seq_idx)
    assert torch.equal(y[:, 30:], clean[:, 30:])
    assert y[:, 3:30].isnan().any()
    gradient = torch.autograd.grad(y[:, 30:].sum(), spoilt["x"])[0]
    assert not gradient[:, :30].any()
    assert gradient[:, 30:].isfinite().all()


def test_padding_may_hold_anything() -> None:
    tensors = {name: t.float() for name, t in scan_tensors(batch=1).items()}
    seq_idx = torch.tensor([[0] * 30 + [-1] * 7 + [0] * 30], dtype=torch.int32)
    clean = compiled_scan(**tensors, seq_idx=seq_idx)
    for name in ("x", "dt", "B", "C", "z"):
        tensors[name][:, 30:37] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    y = compiled_scan(**leaves, seq_idx=seq_idx)
    assert torch.equal(y, clean)
    for name, gradient in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
        assert gradient.isfinite().all(), name


def test_a_nan_is_not_hidden() -> None:
    for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"):
        tensors = {key: t.float() for key, t in scan_tensors().items()}
        tensors[name].view(-1)[0] = torch.nan
        assert compiled_scan(**tensors).isnan().any(), name


def test_saved_for_backward_is_little() -> None:
    """Inputs, and a state for every 16 tokens: states of all tokens would be 16 times the inputs."""
    tensors = {name: t.float().requires_grad_() for name, t in scan_tensors(length=512, dim=128).items()}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        compiled_scan(**tensors)
    given = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    assert sum(saved.values()) < 1.5 * given


def test_public_function_uses_the_compiled_loops_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "selective_scan", None)
    tensors = {name: t.float() for name, t in scan_tensors(length=3).items()}
    assert torch.equal(selective_scan(**tensors), compiled_scan(**tensors))


def test_shapes_that_do_not_belong_together_are_named() -> None:
    tensors = {name: t.float() for name, t in scan_tensors(length=3).items()}
    tensors["B"] = tensors["B"][:, :2]
    with pytest.raises(ValueError, match=r"selective_scan: B is \(2, 2, 16\), expected \(2, 3, 16\)"):
        selective_scan(**tensors)
