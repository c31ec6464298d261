"""Our Triton kernels: interpreted on a CPU, and on a GPU, against the float64 reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comparison import (
    DOCUMENTS,
    ROUNDED,
    assert_equals_reference,
    assert_rounds_as_pytorch,
    conv_tensors,
    gated_norm_tensors,
    norm_tensors,
    residual_norm,
    results,
    scan_tensors,
    seq_idx_of,
    without_state,
)
from torch import Tensor

from ssm_tune.kernels.backends import Unsupported

HERE = Path(__file__).parent
CASES = (
    "scan: documents",
    "scan: pieces",
    "scan: pieces, no documents",
    "scan: one token",
    "scan: nothing optional",
    "scan: without softplus",
    "scan: not contiguous",
    "scan: part of a projection",
    "scan: bfloat16",
    "conv: documents",
    "conv: no documents",
    "conv: one token",
    "conv: width 2",
    "conv: not contiguous",
    "conv: bfloat16",
    "conv: into a half",
    "norm: many tokens",
    "norm: one token",
    "norm: one channel",
    "norm: nothing added",
    "norm: not contiguous",
    "norm: part of a projection",
    "norm: nothing added to a part",
    "norm: bfloat16",
    "norm: bfloat16 from a float32 stream",
    "norm: one reader",
    "norm: of the rounded sum",
    "norm: rounded as PyTorch's",
    "gated norm: many tokens",
    "gated norm: groups",
    "gated norm: one token",
    "gated norm: one channel",
    "gated norm: not contiguous",
    "gated norm: part of a projection",
    "gated norm: bfloat16",
    "gated norm: float16, a float32 weight",
    "gated norm: into a wider tensor",
    "nothing leaks",
    "recomputed outputs",
    "sums over parts",
)
WIDE = ("A", "D", "dt_bias", "initial_state")
EXACT, BFLOAT16 = 2e-5, 2e-2
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What became of each case in a process of its own."""
    pytest.importorskip("triton")
    paths = [str(HERE), str(HERE.parents[1])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "interpreted_triton.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert tuple(found) == CASES
    return found


@pytest.mark.parametrize("case", CASES)
def test_interpreted(interpreted: dict[str, str], case: str) -> None:
    assert interpreted[case] == ""


def test_the_distance_between_channels_is_hidden_from_triton() -> None:
    """Seen as the constant 1 it changes the layout, and the forward pass becomes slower."""
    pytest.importorskip("triton")
    from ssm_tune.kernels import triton_scan_backward, triton_scan_forward, triton_scan_pieces

    pieces = (triton_scan_pieces.ends_kernel, triton_scan_pieces.reverse_ends_kernel)
    for kernel in (triton_scan_forward.forward_kernel, triton_scan_backward.backward_kernel, *pieces):
        assert [p.do_not_specialize for p in kernel.params if p.name == "unit"] == [True]


@pytest.fixture
def triton_scan() -> ModuleType:
    from ssm_tune.kernels import triton_scan

    return triton_scan


@pytest.fixture
def triton_conv() -> ModuleType:
    from ssm_tune.kernels import triton_conv

    return triton_conv


def test_conv_of_more_tokens_than_a_launch_takes_is_refused() -> None:
    pytest.importorskip("triton")
    from ssm_tune.kernels import triton_conv

    x, weight = torch.empty(1, 1, 1).expand(1, 8 * 65535, 1), torch.ones(1, 4)
    with pytest.raises(Unsupported, match="524280 tokens in a row, at most 524277"):
        triton_conv.causal_conv1d(x, weight)


@pytest.mark.parametrize(
    ("block", "dtype", "shared", "stages"),
    [
        (2048, torch.float32, 0, 3),
        (4096, torch.bfloat16, 232448, 1),
        (8192, torch.bfloat16, 232448, 3),
        (8192, torch.bfloat16, 101376, 1),
        (8192, torch.float32, 166912, 1),
    ],
)
def test_rows_of_wide_gated_norms_wait_where_shared_memory_is_large(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype, shared: int, stages: int
) -> None:
    norm = pytest.importorskip("ssm_tune.kernels.triton_gated_norm")
    monkeypatch.setattr(norm, "shared_memory", lambda _: shared)
    assert norm._stages(block, (torch.empty(1, dtype=dtype),) * 3) == stages


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_scan_on_a_gpu(triton_scan: ModuleType, documents: str, dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"seq_idx": seq_idx_of(documents), "wide": WIDE, "device": "cuda"}
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    assert_equals_reference(
        "selective_scan", triton_scan.selective_scan, scan_tensors(dim=64), dtype, tolerance, **settings
    )


@pytest.mark.gpu
@pytest.mark.parametrize("without", [("initial_state",), ("z",), ("D", "z", "dt_bias", "initial_state")])
@pytest.mark.parametrize("length", [1, 67, 2049])
@pytest.mark.parametrize("pieces", [None, 256])
def test_scan_in_pieces_on_a_gpu(
    triton_scan: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int, without: tuple[str, ...], pieces: int | None
) -> None:
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(triton_scan, name, getattr(triton_scan, name)._replace(piece=pieces or 2**20))
    seq_idx = torch.arange(length).div(400, rounding_mode="floor").int().expand(2, -1).contiguous()
    if length > 100:
        seq_idx[:, -5:] = -1
    settings: dict[str, Any] = {"seq_idx": seq_idx, "wide": WIDE, "device": "cuda"}
    tensors = scan_tensors(length=length, dim=37, state=13, without=without)
    assert_equals_reference("selective_scan", triton_scan.selective_scan, tensors, torch.float32, EXACT, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "state"), [(1, 1), (33, 5), (128, 16), (129, 32), (8, 64)])
def test_scan_of_any_size_on_a_gpu(triton_scan: ModuleType, dim: int, state: int) -> None:
    tensors = scan_tensors(batch=1, length=19, dim=dim, state=state)
    settings: dict[str, Any] = {"wide": WIDE, "device": "cuda"}
    assert_equals_reference("selective_scan", triton_scan.selective_scan, tensors, torch.float32, EXACT, **settings)


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_conv_on_a_gpu(triton_conv: ModuleType, documents: str, activation: str | None, dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    settings: dict[str, Any] = {"activation": activation, "seq_idx": seq_idx_of(documents), "device": "cuda"}
    assert_equals_reference(
        "causal_conv1d", triton_conv.causal_conv1d, conv_tensors(dim=64), dtype, tolerance, **settings
    )


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 530])
def test_conv_of_any_length_and_width_on_a_gpu(triton_conv: ModuleType, length: int, width: int) -> None:
    for without in ((), ("bias", "initial_state")):
        tensors = conv_tensors(length=length, dim=70, width=width, without=without)
        assert_equals_reference(
            "causal_conv1d", triton_conv.causal_conv1d, tensors, torch.float32, EXACT, device="cuda"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("without", [(), ("x",)], ids=["added", "nothing added"])
@pytest.mark.parametrize(("length", "dim"), [(1, 1), (1, 768), (67, 37), (67, 1030), (3000, 768), (700, 4096)])
def test_norm_on_a_gpu(length: int, dim: int, without: tuple[str, ...]) -> None:
    """Twice, since the weight's gradient is summed by many programs: to the bit the same."""
    from ssm_tune.kernels.residual_norm_triton import residual_rms_norm

    tensors = norm_tensors(length=length, dim=dim, without=without)
    operation = residual_norm(residual_rms_norm)
    assert_equals_reference("residual_rms_norm", operation, tensors, tolerance=1e-6, device="cuda")
    once, again = (results(operation, tensors, torch.float32, "cuda") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    into = residual_norm(residual_rms_norm, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"wide": ("stream", "weight"), "device": "cuda"}
    assert_equals_reference("residual_rms_norm", into, tensors, torch.bfloat16, ROUNDED, **settings)


@pytest.mark.gpu
def test_norm_rounds_as_pytorch_on_a_gpu() -> None:
    from ssm_tune.kernels.residual_norm_triton import residual_rms_norm

    assert_rounds_as_pytorch(residual_rms_norm, slack=1.02, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize(
    ("length", "dim", "group_size"),
    [
        (1, 7, None),
        (67, 37, None),
        (67, 96, 24),
        (3000, 1536, None),
        (700, 4096, None),
        (700, 8192, 1024),
        (70, 5120, None),
        (70, 16384, None),
    ],
)
def test_gated_norm_on_a_gpu(length: int, dim: int, group_size: int | None, norm_before_gate: bool) -> None:
    """Twice, since the weight's gradient is summed by many programs: to the bit the same. z is part of a projection."""
    from ssm_tune.kernels.triton_gated_norm import gated_rms_norm

    def view(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 1 else torch.cat([tensor, tensor[..., :8]], dim=-1)[..., :dim]

    tensors, operation = gated_norm_tensors(length=length, dim=dim), without_state(gated_rms_norm)
    settings: dict[str, Any] = {"eps": 1e-5, "group_size": group_size, "norm_before_gate": norm_before_gate}
    settings |= {"device": "cuda", "view": view}
    assert_equals_reference("gated_rms_norm", operation, tensors, tolerance=2e-6, **settings)
    once, again = (results(operation, tensors, torch.float32, **settings) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    settings |= {"wide": ("weight",)}
    assert_equals_reference("gated_rms_norm", operation, tensors, torch.bfloat16, ROUNDED, **settings)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 100e9, reason="needs 100 GB"
)
@pytest.mark.gpu
def test_gated_norm_beyond_32_bit_offsets_on_a_gpu() -> None:
    """The last of more than 2^31 numbers are what they are alone, forward and backward."""
    from ssm_tune.kernels.triton_gated_norm import gated_rms_norm

    dim = 4096
    rows = 2**31 // dim + 100
    y, z, dy = (torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.rand(dim, device="cuda")
    alone = [t[-100:].clone().requires_grad_() for t in (y, z)]
    whole = [t.requires_grad_() for t in (y, z)]
    out, expected = gated_rms_norm(*whole, weight, 1e-5), gated_rms_norm(*alone, weight, 1e-5)
    assert torch.equal(out[-100:], expected)
    found, truth = torch.autograd.grad(out, whole, dy), torch.autograd.grad(expected, alone, dy[-100:])
    assert all(torch.equal(one[-100:], other) for one, other in zip(found, truth, strict=True))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 100e9, reason="needs 100 GB"
)
@pytest.mark.gpu
def test_scan_beyond_32_bit_offsets_on_a_gpu(triton_scan: ModuleType) -> None:
    """The last document of a row of more than 2^31 numbers is what it is alone, forward and backward."""
    dim, tail = 8192, 1000
    length = 2**31 // dim + 3 * tail
    vectors = {"A": -torch.rand(dim, 4, device="cuda") - 0.1}
    wide = {name: torch.randn(1, length, dim, device="cuda", dtype=torch.bfloat16) * 0.5 for name in ("x", "dt")}
    tokens = wide | {name: torch.randn(1, length, 4, device="cuda", dtype=torch.bfloat16) for name in ("B", "C")}
    seq_idx = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    seq_idx[:, -tail:] = 1
    alone = {name: t[:, -tail:].clone() for name, t in tokens.items()}
    tokens["x"].requires_grad_()
    alone["x"].requires_grad_()
    y = triton_scan.selective_scan(**tokens, **vectors, seq_idx=seq_idx)
    expected = triton_scan.selective_scan(**alone, **vectors)
    torch.testing.assert_close(y[:, -tail:], expected, rtol=BFLOAT16, atol=BFLOAT16)
    slope = torch.randn_like(expected)
    gradient = torch.autograd.grad(y[:, -tail:], tokens["x"], slope)[0]
    truth = torch.autograd.grad(expected, alone["x"], slope)[0]
    torch.testing.assert_close(gradient[:, -tail:], truth, rtol=5e-2, atol=5e-2)
    assert not gradient[:, :-tail].any()
