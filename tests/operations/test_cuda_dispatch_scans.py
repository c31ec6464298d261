"""What is done around the scans for a GPU, and Mamba-2's block: on a CPU, with stand-ins for their kernels."""

from __future__ import annotations

import sys

import pytest
import stand_ins
import torch
from comparison import (
    DOCUMENTS,
    assert_equals_reference,
    block_tensors,
    scan_tensors,
    seq_idx_of,
    ssd_tensors,
    without_state,
)
from stand_ins import ours

from ssm_tune import kernels
from ssm_tune.kernels.backends import Unsupported

pytestmark = pytest.mark.usefixtures("stand_in_packages")
WIDE = ("A", "D", "dt_bias", "initial_state")
WHOLE = "_mamba_chunk_scan_combined_fwd"  # called where a block is not done in parts
BLOCK = {"head_dim": 8, "groups": 2, "group_size": 32, "chunk_size": 16}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_selective_scan(documents: str) -> None:
    check_selective_scan(documents, ())


@pytest.mark.parametrize("without", [("initial_state",), ("z", "initial_state"), ("D",), ("D", "z", "dt_bias")])
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_selective_scan_with_optional_arguments(without: tuple[str, ...], dt_softplus: bool) -> None:
    check_selective_scan("padding on both sides and between", without, dt_softplus)


def check_selective_scan(documents: str, without: tuple[str, ...], dt_softplus: bool = True) -> None:
    tensors = scan_tensors(dim=6, state=4, without=without)
    if not dt_softplus:  # positive step sizes
        tensors |= {name: t.abs() * 0.1 for name, t in tensors.items() if name in ("dt", "dt_bias") and t is not None}
    settings = {"seq_idx": seq_idx_of(documents), "dt_softplus": dt_softplus}

    def scan(return_final_state: bool, **given: object) -> tuple[torch.Tensor, torch.Tensor]:
        y = ours("mamba_ssm_scan").selective_scan(**given)
        with torch.no_grad():
            state = ours("mamba_ssm_scan").selective_scan(**given, return_final_state=True)[1]
        # Not differentiated by this backend: the reference's gradient, so that the rest can be compared.
        exact = kernels.reference.selective_scan(**given, return_final_state=True)[1]
        return y, exact + (state - exact.detach())

    assert_equals_reference("selective_scan", scan, tensors, **settings)
    assert "selective_scan_fn" in stand_ins.CALLS


@pytest.mark.parametrize("documents", ["no documents", "padding on both sides and between"])
def test_selective_scan_in_bfloat16(documents: str) -> None:
    seq_idx = seq_idx_of(documents)
    tensors = {name: t.float() if name in WIDE else t.bfloat16() for name, t in scan_tensors().items()}
    with torch.no_grad():
        y, state = ours("mamba_ssm_scan").selective_scan(**tensors, seq_idx=seq_idx, return_final_state=True)
        exact = kernels.reference.selective_scan(
            **{name: t.double() for name, t in tensors.items()}, seq_idx=seq_idx, return_final_state=True
        )
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - exact[0]).norm() / exact[0].norm() < 5e-3
    assert (state.double() - exact[1]).norm() / exact[1].norm() < 5e-3


def test_selective_scan_does_not_write_into_its_inputs() -> None:
    # Of this shape the turned tensor is the tensor itself.
    tensors = {name: t.float() for name, t in scan_tensors(dim=1, without=("initial_state",)).items() if t is not None}
    kept = {name: t.clone() for name, t in tensors.items()}
    ours("mamba_ssm_scan").selective_scan(**tensors, seq_idx=seq_idx_of("padding on both sides and between"))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("largest", [67 * 20 * 2, 67 * 20 - 1, 67 * 7, 67 + 1])
def test_selective_scan_in_parts_within_32_bit_offsets(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours("mamba_ssm_scan")
    monkeypatch.setattr(module, "_LARGEST", largest)
    monkeypatch.setattr(module, "_PIECE", 10**9)
    seen = []

    def checked(u: torch.Tensor, *rest: object) -> object:
        seen.append(u.numel())
        return stand_ins.selective_scan_fn(u, *rest)

    monkeypatch.setattr(sys.modules["mamba_ssm.ops.selective_scan_interface"], "selective_scan_fn", checked)
    tensors = {name: t.float() for name, t in scan_tensors().items()}
    y, state = module.selective_scan(**tensors, return_final_state=True)
    expected = kernels.reference.selective_scan(**tensors, return_final_state=True)
    torch.testing.assert_close(y, expected[0])
    torch.testing.assert_close(state, expected[1])
    assert max(seen) < largest
    assert len(seen) > 1
    monkeypatch.setattr(module, "_LARGEST", 67)
    with pytest.raises(Unsupported, match="67 tokens in a row, beyond 32-bit offsets"):
        module.selective_scan(**tensors)


def test_the_step_that_forgets_counts_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a step of 64 a bias of -2 is a part that shows; of the real one it is two millionths.
    monkeypatch.setattr(ours("mamba_ssm_scan"), "_FORGETTING_STEP", 64.0)
    tensors = scan_tensors(dim=6, state=4, without=("initial_state",))
    tensors["A"] = tensors["A"] - 2
    given = {name: None if t is None else t.float() for name, t in tensors.items()}
    given["seq_idx"] = seq_idx_of("start in the middle")
    y = ours("mamba_ssm_scan").selective_scan(**given)
    torch.testing.assert_close(y, kernels.reference.selective_scan(**given))


def test_selective_scan_refuses_what_the_kernel_cannot_do() -> None:
    module = ours("mamba_ssm_scan")
    with pytest.raises(Unsupported, match="float64"):
        module.selective_scan(**scan_tensors(length=3))
    tensors = {name: t.float() for name, t in scan_tensors(length=3, state=257).items()}
    with pytest.raises(Unsupported, match="257 states, at most 256"):
        module.selective_scan(**tensors)
    tensors = {name: t.float() for name, t in scan_tensors(length=3).items()}
    tensors["x"].requires_grad_()
    with pytest.raises(Unsupported, match="a gradient through the final state"):
        module.selective_scan(**tensors, return_final_state=True)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_ssd_scan(documents: str) -> None:
    scan, seq_idx = ours("mamba_ssm_ssd").ssd_scan, seq_idx_of(documents)
    assert_equals_reference("ssd_scan", scan, ssd_tensors(), seq_idx=seq_idx)
    assert "mamba_chunk_scan_combined" in stand_ins.CALLS


@pytest.mark.parametrize("without", [("initial_state",), ("D",), ("D", "dt_bias", "initial_state")])
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.05, 0.3)])
@pytest.mark.parametrize("documents", ["no documents", "padding on both sides and between"])
def test_ssd_scan_with_optional_arguments(
    without: tuple[str, ...], dt_limit: tuple[float, float], documents: str
) -> None:
    settings = {"seq_idx": seq_idx_of(documents), "dt_limit": dt_limit}
    assert_equals_reference("ssd_scan", ours("mamba_ssm_ssd").ssd_scan, ssd_tensors(without=without), **settings)


@pytest.mark.parametrize("documents", ["no documents", "padding on both sides and between", "numbers that return"])
@pytest.mark.parametrize("largest", [5000, 1500, 700])
def test_ssd_scan_in_parts_within_32_bit_offsets(documents: str, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours("mamba_ssm_ssd")
    monkeypatch.setattr(module, "_LARGEST", largest)
    seen = []

    def checked(x: torch.Tensor, *rest: object, **settings: object) -> object:
        seen.append(x.shape)
        assert x.numel() < largest
        return stand_ins.mamba_chunk_scan_combined(x, *rest, **settings)

    monkeypatch.setattr(sys.modules["mamba_ssm.ops.triton.ssd_combined"], "mamba_chunk_scan_combined", checked)
    assert_equals_reference("ssd_scan", module.ssd_scan, ssd_tensors(), chunk_size=8, seq_idx=seq_idx_of(documents))
    assert len(seen) > 1
    monkeypatch.setattr(module, "_LARGEST", 8)
    with pytest.raises(Unsupported, match="beyond 32-bit offsets"):
        module.ssd_scan(**{name: t.float() for name, t in ssd_tensors().items()})


def test_ssd_scan_counts_its_output_where_the_input_is_repeated() -> None:
    module = ours("mamba_ssm_ssd")
    token = ssd_tensors(batch=1, length=1, heads=64, head_dim=64, groups=1, state=1)
    x, dt, B, C = (token[name].expand(1, 2**20, *token[name].shape[2:]) for name in ("x", "dt", "B", "C"))
    assert module.piece_that_fits(x, dt, B, C, 256) == (1, (2**31 - 1) // (64 * 64) // 256 * 256)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_ssd_block(documents: str) -> None:
    check_ssd_block(documents)
    whole = documents != "padding on both sides and between"  # over which the convolution's kernel cannot reach
    assert (WHOLE in stand_ins.CALLS) == whole


@pytest.mark.parametrize(
    ("without", "settings"),
    [
        ((), {"norm_before_gate": True}),
        (("norm_weight",), {}),
        (("conv_bias",), {"dt_limit": (0.01, 0.2)}),
        ((), {"group_size": None}),  # a norm over more than the heads of a group of B and C
        ((), {"group_size": 16}),
    ],
)
def test_ssd_block_with_other_arguments(without: tuple[str, ...], settings: dict[str, object]) -> None:
    check_ssd_block("padding right", without, **settings)
    assert WHOLE in stand_ins.CALLS
    assert ("normalise" in stand_ins.CALLS) == ("norm_weight" not in without)


def test_ssd_block_with_a_norm_of_wide_groups_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[stand_ins.OUR_NORM], "WIDEST", 31)
    check_ssd_block("start in the middle")
    assert WHOLE not in stand_ins.CALLS


def test_ssd_block_of_a_frozen_norm_gives_its_weight_no_gradient() -> None:
    tensors = {name: t.float().requires_grad_(name != "norm_weight") for name, t in block_tensors().items()}
    ours("mamba_ssm_block").ssd_block(**tensors, **BLOCK).square().sum().backward()
    assert [name for name, t in tensors.items() if t.grad is None] == ["norm_weight"]


@pytest.mark.parametrize("heads", [4, 3])
def test_ssd_block_of_widths_that_are_not_multiples_of_eight(heads: int) -> None:
    check_ssd_block("start in the middle", heads=heads, groups=1, group_size=heads * 8)
    assert WHOLE not in stand_ins.CALLS


def test_ssd_block_beyond_32_bit_offsets_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours("mamba_ssm_block"), "_LARGEST", 2 * 67 * 168)
    check_ssd_block("start in the middle")
    assert WHOLE not in stand_ins.CALLS


def check_ssd_block(
    documents: str, without: tuple[str, ...] = (), heads: int = 8, groups: int = 2, **more: object
) -> None:
    tensors = block_tensors(heads=heads, groups=groups, without=without)
    settings = BLOCK | {"seq_idx": seq_idx_of(documents), "groups": groups} | more
    function = without_state(ours("mamba_ssm_block").ssd_block)
    assert_equals_reference("ssd_block", function, tensors, tolerance=5e-5, **settings)  # the norm enlarges rounding


@pytest.mark.parametrize(
    ("order", "expected"),
    [(None, "mamba_ssm"), (["chunked"], "parts"), (["pytorch"], "parts"), (["reference"], "reference")],
)
def test_an_order_for_a_part_holds_for_the_block(as_if_cuda: None, order: list[str] | None, expected: str) -> None:
    kernels.set_kernel_order(order)
    assert kernels.kernel_report("cpu", ["ssd_block"])[0].backend == expected
