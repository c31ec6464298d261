"""The causal convolution: the compiled loops and the whole-row form against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import DOCUMENTS, EXACT, ROUNDED, assert_equals_reference, conv_tensors, seq_idx_of

from ssm_tune.kernels import causal_conv1d, causal_conv1d_step, conv_gathered, cpu_conv, reference

Conv = Callable[..., Any]
both = pytest.mark.parametrize("conv", [cpu_conv.causal_conv1d, conv_gathered.causal_conv1d], ids=["numba", "gathered"])


@both
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("activation", ["silu", None])
def test_documents(documents: str, activation: str | None, conv: Conv) -> None:
    assert_equals_reference("causal_conv1d", conv, conv_tensors(), activation=activation, seq_idx=seq_idx_of(documents))


@both
@pytest.mark.parametrize("without", [(), ("bias",), ("initial_state",), ("bias", "initial_state")])
@pytest.mark.parametrize("documents", ["no documents", "padding on both sides and between"])
def test_optional_arguments(without: tuple[str, ...], documents: str, conv: Conv) -> None:
    assert_equals_reference("causal_conv1d", conv, conv_tensors(without=without), seq_idx=seq_idx_of(documents))


@both
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_rows_shorter_than_the_window(length: int, width: int, conv: Conv) -> None:
    tensors = conv_tensors(length=length, width=width)
    assert_equals_reference("causal_conv1d", conv, tensors)
    seq_idx = torch.tensor([[0, 0, 1, 1][:length], [-1, 2, -1, 2][:length]], dtype=torch.int32)
    assert_equals_reference("causal_conv1d", conv, tensors, seq_idx=seq_idx)


@both
@pytest.mark.parametrize("dim", [1, 127, 129, 300])
def test_sizes_around_a_block_of_channels(dim: int, conv: Conv) -> None:
    assert_equals_reference("causal_conv1d", conv, conv_tensors(length=9, dim=dim))


@both
def test_inputs_that_are_not_contiguous(conv: Conv) -> None:
    def lose_contiguity(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    assert_equals_reference("causal_conv1d", conv, conv_tensors(), view=lose_contiguity)


@both
def test_bfloat16_inputs_are_computed_in_float32(conv: Conv) -> None:
    seq_idx = seq_idx_of("start in the middle")
    assert_equals_reference("causal_conv1d", conv, conv_tensors(), torch.bfloat16, ROUNDED, seq_idx=seq_idx)
    half = {name: t.bfloat16() for name, t in conv_tensors().items()}
    y, state = conv(**half, return_final_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)
    wide = conv(**{name: t.float() for name, t in half.items()})
    torch.testing.assert_close(y, wide.bfloat16(), rtol=0.0, atol=0.0)


@both
def test_a_state_of_another_dtype_keeps_it(conv: Conv) -> None:
    tensors = {name: t.bfloat16() for name, t in conv_tensors().items()}
    tensors["initial_state"] = tensors["initial_state"].float()
    assert conv(**tensors, return_final_state=True)[1].dtype == torch.float32


@both
def test_a_row_in_two_calls_is_the_row_in_one(conv: Conv) -> None:
    tensors = {name: t.float() for name, t in conv_tensors().items()}
    y, last = conv(**tensors, return_final_state=True)
    y_head, middle = conv(**(tensors | {"x": tensors["x"][:, :40]}), return_final_state=True)
    y_tail, end = conv(**(tensors | {"x": tensors["x"][:, 40:], "initial_state": middle}), return_final_state=True)
    torch.testing.assert_close(torch.cat([y_head, y_tail], 1), y, rtol=EXACT, atol=EXACT)
    assert torch.equal(end, last)


def test_steps_are_the_convolution() -> None:
    for activation in ("silu", None):
        tensors = {name: t.float() for name, t in conv_tensors(length=6).items()}
        y, last = causal_conv1d(**tensors, activation=activation, return_final_state=True)
        state = tensors["initial_state"].clone()
        for i in range(6):
            step = causal_conv1d_step(tensors["x"][:, i], state, tensors["weight"], tensors["bias"], activation)
            torch.testing.assert_close(step, y[:, i], rtol=EXACT, atol=EXACT)
        assert torch.equal(state, last)


@both
def test_padding_may_hold_anything(conv: Conv) -> None:
    tensors = {name: t.float() for name, t in conv_tensors(batch=1).items()}
    seq_idx = torch.tensor([[-1] * 3 + [0] * 27 + [-1] * 7 + [0] * 30], dtype=torch.int32)
    clean = conv(**tensors, seq_idx=seq_idx)
    tensors["x"][seq_idx == -1] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    y = conv(**leaves, seq_idx=seq_idx)
    assert torch.equal(y, clean)
    for name, gradient in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
        assert gradient.isfinite().all(), name


def test_public_function_uses_the_compiled_loops_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "causal_conv1d", None)
    monkeypatch.setattr(conv_gathered, "causal_conv1d", None)
    tensors = {name: t.float() for name, t in conv_tensors(length=3).items()}
    assert torch.equal(causal_conv1d(**tensors), cpu_conv.causal_conv1d(**tensors))


def test_mistakes_are_named() -> None:
    tensors = {name: t.float() for name, t in conv_tensors(length=3).items()}
    with pytest.raises(ValueError, match="activation 'gelu' is not known"):
        causal_conv1d(**tensors, activation="gelu")
    with pytest.raises(ValueError, match=r"initial_state is \(2, 20, 4\), expected \(2, 20, 3\)"):
        causal_conv1d(**(tensors | {"initial_state": torch.zeros(2, 20, 4)}))
