"""The kernels for a GPU, on a GPU, against the float64 reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import (
    DOCUMENTS,
    assert_equals_reference,
    block_tensors,
    conv_tensors,
    draw,
    scan_tensors,
    seq_idx_of,
    ssd_tensors,
    without_state,
)
from torch import Tensor

from ssm_tune import kernels
from ssm_tune.kernels import backends, reference
from ssm_tune.kernels.recompute import recomputed

pytestmark = pytest.mark.gpu

WIDE = ("A", "D", "dt_bias", "initial_state")
# Of float32: exact kernels; products in TF32 (unless TRITON_F32_DEFAULT=ieee). Of bfloat16: inputs and outputs rounded.
EXACT, TF32, BFLOAT16 = 2e-5, 2e-5 if os.environ.get("TRITON_F32_DEFAULT") == "ieee" else 3e-3, 2e-2
# The gradient of A in float32: mamba_ssm's kernels take decays between tokens from a sum of dt A that runs over the
# chunk, up to -1200 for the numbers here, where float32 has steps of 1e-4; and its contributions, tokens by heads,
# cancel to about 1 % of their absolute sum. That sum alone, in float32 within exact arithmetic, moves the gradient by
# 7e-5 of itself (2e-6 of the absolute sum); measured on an H200: 5e-5. Models have a sum of 1 to 30 in a chunk.
DECAYS = {"gradient of A": 1e-4}
# Padding inside a document, which the convolution's kernel cannot reach over.
GAPS = "padding on both sides and between"
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def required_kernels() -> Iterator[None]:
    """A fallback is an error: what passes here was computed by the packages' kernels."""
    kernels.set_kernel_order(("installed",), required=True)
    yield
    kernels.set_kernel_order(None)


def test_every_operation_has_its_kernel() -> None:
    for choice in kernels.kernel_report("cuda"):
        assert choice.backend in ("mamba_ssm", "causal_conv1d", "cuda", "triton"), choice
        assert choice.reason == "", choice


def scan_without_state_gradient(return_final_state: bool, **given: Any) -> tuple[Tensor, Tensor]:
    """The scan's output with its gradients; its final state with the reference's, since the kernel gives none."""
    y = kernels.selective_scan(**given)
    with torch.no_grad():
        state = kernels.selective_scan(**given, return_final_state=True)[1]
    exact = reference.selective_scan(**given, return_final_state=True)[1]
    return y, exact + (state - exact.detach())


@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_selective_scan(documents: str, dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    settings = {"seq_idx": seq_idx_of(documents), "wide": WIDE, "device": "cuda"}
    tensors = scan_tensors(dim=64)
    assert_equals_reference("selective_scan", scan_without_state_gradient, tensors, dtype, tolerance, **settings)


OPTIONAL = [("initial_state",), ("z", "initial_state"), ("D",), ("D", "z", "dt_bias")]
# The reference goes token by token: few long rows.
LONG = [(2049, OPTIONAL[1]), (2049, OPTIONAL[2]), (4100, OPTIONAL[0])]


@pytest.mark.parametrize(("length", "without"), [*((n, without) for n in (1, 67) for without in OPTIONAL), *LONG])
def test_selective_scan_with_optional_arguments(length: int, without: tuple[str, ...]) -> None:
    tensors = scan_tensors(length=length, dim=24, without=without)
    seq_idx = torch.arange(length).div(400, rounding_mode="floor").int().expand(2, -1).contiguous()
    settings = {"seq_idx": seq_idx, "wide": WIDE, "device": "cuda"}
    if length > 100:
        seq_idx[:, -5:] = -1
    assert_equals_reference("selective_scan", scan_without_state_gradient, tensors, torch.float32, EXACT, **settings)


@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_ssd_scan(documents: str, dtype: torch.dtype) -> None:
    tolerance = TF32 if dtype == torch.float32 else BFLOAT16
    settings = {"seq_idx": seq_idx_of(documents), "wide": WIDE, "device": "cuda", "chunk_size": 32}
    tensors = ssd_tensors(heads=4, head_dim=64, groups=2, state=64)
    assert_equals_reference("ssd_scan", kernels.ssd_scan, tensors, dtype, tolerance, **settings)


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.01, 0.2)])
@pytest.mark.parametrize(
    ("length", "without"),
    [
        (1, ("initial_state",)),
        (300, ("D", "dt_bias", "initial_state")),
        (300, ("initial_state",)),
        (300, ()),
        (1025, ()),
    ],
)
def test_ssd_scan_over_several_chunks(length: int, without: tuple[str, ...], dt_limit: tuple[float, float]) -> None:
    tensors = ssd_tensors(length=length, heads=4, head_dim=64, groups=1, state=128, without=without)
    seq_idx = torch.arange(length).div(120, rounding_mode="floor").int().expand(2, -1).contiguous()
    settings = {"seq_idx": seq_idx, "wide": WIDE, "device": "cuda", "dt_limit": dt_limit}
    if length > 100:
        seq_idx[:, -5:] = -1
    assert_equals_reference("ssd_scan", kernels.ssd_scan, tensors, torch.float32, TF32, looser=DECAYS, **settings)


def test_ssd_scan_in_pieces_with_the_state_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssm_tune.kernels import mamba_ssm_ssd

    tensors = ssd_tensors(length=1000, heads=4, head_dim=64, groups=1, state=64)
    seq_idx = torch.arange(1000).div(300, rounding_mode="floor").int().expand(2, -1).contiguous()
    settings = {"seq_idx": seq_idx, "wide": WIDE, "device": "cuda"}
    monkeypatch.setattr(mamba_ssm_ssd, "piece_that_fits", lambda *inputs: (1, 256))
    assert_equals_reference("ssd_scan", kernels.ssd_scan, tensors, torch.float32, TF32, looser=DECAYS, **settings)


@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_ssd_block(documents: str, dtype: torch.dtype) -> None:
    if documents == GAPS:
        kernels.set_kernel_order(None)  # done in parts, the convolution in PyTorch
    check_ssd_block(seq_idx_of(documents), dtype, heads=8, head_dim=16, groups=2, state=32)


@pytest.mark.parametrize(
    ("without", "more"),
    [
        (("norm_weight",), {}),
        (("conv_bias",), {"norm_before_gate": True}),
        ((), {"dt_limit": (0.01, 0.2)}),
        ((), {"chunk_size": 16}),
    ],
)
def test_ssd_block_over_several_chunks(without: tuple[str, ...], more: dict[str, Any]) -> None:
    seq_idx = torch.arange(300).div(70, rounding_mode="floor").int().expand(2, -1).contiguous()
    seq_idx[:, -5:] = -1
    sizes = {"length": 300, "heads": 8, "head_dim": 64, "groups": 1, "state": 128, "without": without}
    check_ssd_block(seq_idx, torch.float32, **sizes, more=more)


@pytest.mark.parametrize("heads", [4, 3])
def test_ssd_block_of_widths_that_are_not_multiples_of_eight(heads: int) -> None:
    """Four heads: the row's width alone. Three of four channels: the convolution's too, which PyTorch does then."""
    kernels.set_kernel_order(None)
    sizes = {"heads": heads, "head_dim": 16 if heads == 4 else 4, "groups": 1, "state": 16}
    check_ssd_block(seq_idx_of("start in the middle"), torch.float32, **sizes)


def check_ssd_block(
    seq_idx: Tensor | None, dtype: torch.dtype, more: dict[str, Any] | None = None, **sizes: Any
) -> None:
    settings = {"head_dim": sizes["head_dim"], "groups": sizes["groups"], "seq_idx": seq_idx, "chunk_size": 64}
    settings |= {"group_size": sizes["heads"] * sizes["head_dim"] // sizes["groups"]} | (more or {})
    function = without_state(kernels.ssd_block)
    # The norm enlarges rounding.
    tolerance = 3 * TF32 if dtype == torch.float32 else 2 * BFLOAT16
    settings |= {"wide": WIDE, "device": "cuda"}
    looser = DECAYS if dtype == torch.float32 else None
    assert_equals_reference("ssd_block", function, block_tensors(**sizes), dtype, tolerance, looser=looser, **settings)


def test_ssd_block_of_a_row_beyond_32_bit_offsets() -> None:
    """Done in parts: the last document of a row of more than 2^31 numbers is what it is alone, forward and backward."""
    heads, head_dim, state, tail = 64, 64, 64, 1000
    dim, channels = heads * head_dim, heads * head_dim + 2 * state
    width = dim + channels + heads
    length = 2**31 // width + 3 * tail
    row = torch.randn(1, length, width, device="cuda", dtype=torch.bfloat16)
    vectors = {"conv_weight": torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16) / 2, "conv_bias": None}
    vectors |= {"A": -torch.rand(heads, device="cuda") - 0.1, "D": torch.rand(heads, device="cuda")}
    vectors |= {"dt_bias": torch.rand(heads, device="cuda") - 2, "norm_weight": torch.rand(dim, device="cuda")}
    seq_idx = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    seq_idx[:, -tail:] = 1
    alone = row[:, -tail:].clone().requires_grad_()
    expected = kernels.ssd_block(alone, **vectors, head_dim=head_dim, groups=1)
    y = kernels.ssd_block(row.requires_grad_(), **vectors, head_dim=head_dim, groups=1, seq_idx=seq_idx)[:, -tail:]
    assert worst_token(y, expected) <= BFLOAT16
    slope = torch.randn_like(expected)
    (gradient,), (truth,) = torch.autograd.grad(y, row, slope), torch.autograd.grad(expected, alone, slope)
    assert worst_token(gradient[:, -tail:], truth) <= 2 * BFLOAT16
    assert not gradient[:, :-tail].any()


def worst_token(found: Tensor, expected: Tensor) -> float:
    """The largest error of a token's numbers, over their norm."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


@both_dtypes
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("documents", [name for name in DOCUMENTS if name != GAPS])
def test_causal_conv1d(documents: str, activation: str | None, dtype: torch.dtype) -> None:
    seq_idx = seq_idx_of(documents)
    tensors = conv_tensors(dim=64, without=() if seq_idx is None else ("initial_state",))
    settings = {"activation": activation, "seq_idx": seq_idx, "device": "cuda"}
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    assert_equals_reference("causal_conv1d", kernels.causal_conv1d, tensors, dtype, tolerance, **settings)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 130])
def test_causal_conv1d_of_any_length_and_width(length: int, width: int) -> None:
    tensors = conv_tensors(length=length, dim=16, width=width)
    assert_equals_reference("causal_conv1d", kernels.causal_conv1d, tensors, torch.float32, EXACT, device="cuda")


def test_causal_conv1d_of_a_part_of_a_wider_projection() -> None:
    weight, wide = draw(16, 4).float().cuda(), draw(2, 9, 43).float().cuda()
    for first in (0, 3):
        part = wide[..., first : first + 16]
        torch.testing.assert_close(kernels.causal_conv1d(part, weight), reference.causal_conv1d(part, weight))


def test_padding_inside_a_document_goes_to_pytorch() -> None:
    kernels.set_kernel_order(None)
    tensors = conv_tensors(dim=16, without=("initial_state",))
    settings = {"seq_idx": seq_idx_of(GAPS), "device": "cuda"}
    assert_equals_reference("causal_conv1d", kernels.causal_conv1d, tensors, torch.float32, EXACT, **settings)


@both_dtypes
def test_step_forms_are_the_scans(dtype: torch.dtype) -> None:
    tolerance = {"rtol": BFLOAT16, "atol": BFLOAT16} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}

    def moved(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {n: t.to("cuda", torch.float32 if n in WIDE else dtype) for n, t in tensors.items()}

    def check(scan: Callable[..., Any], step: Callable[..., Any], tensors: dict[str, Tensor], per_token: tuple) -> None:
        exact = {name: t.double() for name, t in tensors.items()}
        y, last = scan(**exact, return_final_state=True)
        state = tensors.pop("initial_state").clone()
        for i in range(y.shape[1]):
            token = {name: t[:, i] if name in per_token else t for name, t in tensors.items()}
            torch.testing.assert_close(step(**token, state=state).double(), y[:, i], **tolerance)
        torch.testing.assert_close(state.double(), last, **tolerance)

    scan, ssd = moved(scan_tensors(length=5, dim=32)), moved(ssd_tensors(length=5, head_dim=16))
    check(reference.selective_scan, kernels.selective_scan_step, scan, ("x", "dt", "B", "C", "z"))
    check(reference.ssd_scan, kernels.ssd_step, ssd, ("x", "dt", "B", "C"))
    conv = {name: t.to("cuda", dtype) for name, t in conv_tensors(length=5, dim=32).items()}
    check(reference.causal_conv1d, kernels.causal_conv1d_step, conv, ("x",))


@both_dtypes
@pytest.mark.parametrize("settings", [(None, False), (32, False), (64, True)])
def test_norms(settings: tuple[int | None, bool], dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    inputs = [draw(2, 9, 128).to(dtype), draw(2, 9, 128).to(dtype), draw(128).to(dtype)]
    for function, exact, some in (
        (kernels.gated_rms_norm, reference.gated_rms_norm, slice(0, 3)),
        (kernels.rms_norm, reference.rms_norm, slice(0, 3, 2)),
    ):
        more = settings if some.step is None else ()
        leaves = [t.cuda().requires_grad_() for t in inputs[some]]
        truth = [t.double().requires_grad_() for t in inputs[some]]
        y, expected = function(*leaves, 1e-5, *more), exact(*truth, 1e-5, *more)
        slope = draw(*y.shape).to(dtype)
        pairs = [(y, expected)]
        found = torch.autograd.grad(y, leaves, slope.cuda())
        pairs += zip(found, torch.autograd.grad(expected, truth, slope.double()), strict=True)
        for ours, theirs in pairs:
            assert (ours.cpu().double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    ssd = ssd_tensors(heads=4, head_dim=64, state=64)
    settings = {"wide": WIDE, "device": "cuda:1"}
    assert_equals_reference("ssd_scan", kernels.ssd_scan, ssd, torch.float32, TF32, **settings)
    scan = scan_tensors(dim=32)
    assert_equals_reference("selective_scan", scan_without_state_gradient, scan, torch.float32, EXACT, **settings)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 100e9, reason="needs 100 GB"
)
@pytest.mark.parametrize("operation", ["selective_scan", "ssd_scan"])
def test_rows_beyond_32_bit_offsets(operation: str) -> None:
    """The last document of a row of more than 2^31 numbers is what it is alone, forward and backward."""
    dim, tail = 8192, 1000
    length = 2**31 // dim + 3 * tail

    def on_gpu(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.5

    if operation == "selective_scan":
        vectors = {"A": -torch.rand(dim, 16, device="cuda") - 0.1}
        tokens = {"x": on_gpu(1, length, dim), "dt": on_gpu(1, length, dim)}
        tokens |= {"B": on_gpu(1, length, 16), "C": on_gpu(1, length, 16)}
    else:
        vectors = {"A": -torch.rand(dim // 64, device="cuda") - 0.1}
        tokens = {"x": on_gpu(1, length, dim // 64, 64), "dt": on_gpu(1, length, dim // 64)}
        tokens |= {"B": on_gpu(1, length, 1, 64), "C": on_gpu(1, length, 1, 64)}
    seq_idx = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    seq_idx[:, -tail:] = 1
    function = getattr(kernels, operation)
    tokens["x"].requires_grad_()
    y = function(**tokens, **vectors, seq_idx=seq_idx)
    alone = {name: t.detach()[:, -tail:].clone() for name, t in tokens.items()}
    alone["x"].requires_grad_()
    expected = function(**alone, **vectors)
    torch.testing.assert_close(y[:, -tail:], expected, rtol=BFLOAT16, atol=BFLOAT16)
    slope = torch.randn_like(expected)
    gradient = torch.autograd.grad(y[:, -tail:], tokens["x"], slope)[0]
    truth = torch.autograd.grad(expected, alone["x"], slope)[0]
    torch.testing.assert_close(gradient[:, -tail:], truth, rtol=5e-2, atol=5e-2)
    assert not gradient[:, :-tail].any()


def test_tensors_of_a_cpu_stay_away_from_them() -> None:
    tensors = {name: t.float() for name, t in scan_tensors(length=3).items()}
    assert kernels.selective_scan(**tensors).device.type == "cpu"
    assert {b.name for b in backends._candidates("selective_scan", "cpu")} == {"numba", "reference"}


def test_a_first_call_whose_backward_pass_meets_another_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's gated output is computed again in backward, by a kernel that is tried there: this must end."""
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    sizes = {"head_dim": 16, "groups": 2}
    tensors = {name: t.cuda().bfloat16().requires_grad_() for name, t in block_tensors(**sizes, state=32).items()}
    with recomputed(tensors["projected"]):
        y = kernels.ssd_block(**tensors, **sizes, group_size=64)
        (2 * y).square().sum().backward()
    assert tensors["projected"].grad.isfinite().all()
