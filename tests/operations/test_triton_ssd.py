"""Mamba-2's scan in Triton: interpreted on a CPU, and on a GPU, against the float64 reference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import (
    DOCUMENTS,
    assert_equals_reference,
    block_tensors,
    seq_idx_of,
    ssd_tensors,
    without_state,
)

pytest.importorskip("triton")

import interpreted_ssd

from ssm_tune.kernels import backends
from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import recorded_launches

HERE = Path(__file__).parent
WIDE = interpreted_ssd.WIDE
EXACT, BFLOAT16 = 2e-5, 2e-2
# Sums of dt A within a chunk, in float32, see test_gpu_kernels.py.
DECAYS = {"gradient of A": 1e-4}
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
Scan = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What became of each case in a process of its own."""
    paths = [str(HERE), str(HERE.parents[1])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "interpreted_ssd.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", interpreted_ssd.CASES)
def test_interpreted(interpreted: dict[str, str], case: str) -> None:
    assert interpreted[case] == ""


@pytest.fixture
def float32_on_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of these tests it works there; at heads of 16 channels and 16 states a kernel left its memory."""
    from ssm_tune.kernels import triton_ssd

    monkeypatch.setattr(triton_ssd, "_RUN_ON_GPUS", (torch.float32, *triton_ssd._RUN_ON_GPUS))


@pytest.fixture
def scan() -> Scan:
    from ssm_tune.kernels.triton_ssd import ssd_scan

    return ssd_scan


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        ({}, torch.float64, "float64 is computed in PyTorch only"),
        ({"state": 129}, torch.float32, "heads of 129 states and 6 channels, at most 128 and 128"),
        ({"length": 0}, torch.float32, "2 rows of 0 tokens"),
    ],
)
def test_what_it_cannot_do_is_refused(sizes: dict[str, int], dtype: torch.dtype, message: str, scan: Scan) -> None:
    tensors = {name: t.to(dtype) for name, t in ssd_tensors(**sizes).items()}
    with pytest.raises(Unsupported, match=message):
        scan(**tensors)


def test_of_some_backends_the_preferred_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    device, names = torch.device("cpu"), ("reference", "chunked")
    assert backends.first_that_works("ssd_scan", device, names) == "chunked"
    backends.set_kernel_order(["reference"])
    assert backends.first_that_works("ssd_scan", device, names) == "reference"
    assert backends.first_that_works("ssd_scan", device, ("mamba_ssm",)) is None


@pytest.mark.gpu
@pytest.mark.usefixtures("float32_on_gpus_too")
@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_on_a_gpu(documents: str, dtype: torch.dtype, scan: Scan) -> None:
    tensors = ssd_tensors(heads=4, head_dim=64, groups=2, state=128)
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    settings = {"seq_idx": seq_idx_of(documents), "wide": WIDE, "device": "cuda", "looser": DECAYS}
    assert_equals_reference("ssd_scan", scan, tensors, dtype, tolerance, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state"),
    [
        (2, 16, 1, 16),
        (6, 64, 3, 64),
        (2, 128, 1, 128),
        (2, 96, 2, 48),
        (3, 80, 1, 100),
        (160, 64, 1, 128),
    ],
)
def test_sizes_on_a_gpu(heads: int, head_dim: int, groups: int, state: int, scan: Scan) -> None:
    tensors = ssd_tensors(1 if heads > 100 else 2, 150, heads, head_dim, groups, state)
    assert_equals_reference("ssd_scan", scan, tensors, torch.bfloat16, BFLOAT16, wide=WIDE, device="cuda")


@pytest.mark.gpu
def test_float32_is_refused_on_a_gpu(scan: Scan) -> None:
    tensors = {name: t.to("cuda", torch.float32) for name, t in ssd_tensors().items() if t is not None}
    with pytest.raises(Unsupported, match=r"torch\.float32: these kernels have not been run with it on a GPU"):
        scan(**tensors)


@pytest.mark.gpu
@pytest.mark.usefixtures("float32_on_gpus_too")
@pytest.mark.parametrize("dt_limit", [(0.0, math.inf), (0.01, 0.2)])
@pytest.mark.parametrize(("length", "without"), [(1, ()), (300, ("D", "dt_bias", "initial_state")), (1024, ())])
def test_lengths_on_a_gpu(length: int, without: tuple[str, ...], dt_limit: tuple[float, float], scan: Scan) -> None:
    tensors = ssd_tensors(length=length, heads=4, head_dim=64, state=128, without=without)
    seq_idx = torch.arange(length).div(100, rounding_mode="floor").int().expand(2, -1).contiguous()
    settings = {"seq_idx": seq_idx, "dt_limit": dt_limit, "wide": WIDE, "device": "cuda", "looser": DECAYS}
    assert_equals_reference("ssd_scan", scan, tensors, torch.float32, EXACT, **settings)


@pytest.mark.gpu
@pytest.mark.usefixtures("float32_on_gpus_too")
@both_dtypes
@pytest.mark.parametrize("documents", ["no documents", "start in the middle", "padding left"])
@pytest.mark.parametrize("without", [(), ("norm_weight",)], ids=["norm", "gate alone"])
@pytest.mark.parametrize("convolution", ["cuda", "triton"])
def test_block_on_a_gpu(
    documents: str, convolution: str, without: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssm_tune.kernels.triton_ssd_block import ssd_block

    monkeypatch.setattr(backends, "first_that_works", lambda *_: convolution)
    tensors = block_tensors(heads=8, head_dim=64, groups=2, state=128, without=without)
    settings = {"head_dim": 64, "groups": 2, "group_size": 256, "seq_idx": seq_idx_of(documents)}
    looser = DECAYS if dtype == torch.float32 else {}
    if dtype == torch.bfloat16 and without and documents == "start in the middle":
        # Of the head that forgets slowest what its tokens give all but cancels: a ninth of what it is without
        # documents. Rounding of the convolution's output and of the gradients by and in front of the gate, all else in
        # float64, brings 5.2e-2; mamba_ssm's block is off by 5.2e-2 too, this one by 5.17e-2 (on an H200).
        looser = {"gradient of A": 6e-2}
    settings |= {"wide": WIDE, "device": "cuda", "looser": looser}
    tolerance = 3 * EXACT if dtype == torch.float32 else 2 * BFLOAT16  # the norm enlarges rounding
    assert_equals_reference("ssd_block", without_state(ssd_block), tensors, dtype, tolerance, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "head_dim", "state"), [(2048, 64, 128), (150, 64, 128), (150, 96, 48)])
def test_the_scan_again_leaves_its_states_on_a_gpu(length: int, head_dim: int, state: int) -> None:
    from ssm_tune.kernels import triton_ssd, triton_ssd_common

    tensors = ssd_tensors(2, length, 4, head_dim, 2, state, without=("initial_state",))
    kinds = {name: torch.float32 if name in WIDE else torch.bfloat16 for name in tensors}
    given = {name: t.to("cuda", kinds[name]) for name, t in tensors.items() if t is not None}
    number = torch.arange(length, device="cuda").div(100, rounding_mode="floor").int().expand(2, -1).contiguous()
    arguments = (*given.values(), number, None, True, triton_ssd_common.NO_LIMIT)
    y, left = triton_ssd.scan_again(*arguments)
    once, _ = triton_ssd.scan(*arguments)
    assert (y - once).float().norm() <= 1e-3 * once.float().norm()
    states = triton_ssd_common.states_before(given["x"], given["B"], left["steps"], number, None)
    assert (left["states"] - states).float().norm() <= 4e-3 * states.float().norm() > 0
    with recorded_launches():
        y, found = triton_ssd.scan_again(*arguments)
    assert (y - once).float().norm() <= 1e-3 * once.float().norm()
    assert (found["states"] - left["states"]).float().norm() <= 1e-3 * states.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("documents", ["no documents", "start in the middle", "padding left"])
@pytest.mark.parametrize(("heads", "head_dim", "groups", "state"), [(4, 64, 2, 128), (2, 128, 1, 64)])
def test_copied_tiles_on_a_gpu(
    documents: str, heads: int, head_dim: int, groups: int, state: int, monkeypatch: pytest.MonkeyPatch, scan: Scan
) -> None:
    from ssm_tune.kernels import triton_ssd_forward

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("tiles are copied on Hopper GPUs")
    chosen, can_copy = [], triton_ssd_forward.can_copy
    monkeypatch.setattr(triton_ssd_forward, "can_copy", lambda *t: chosen.append(can_copy(*t)) or chosen[-1])
    tensors = ssd_tensors(heads=heads, head_dim=head_dim, groups=groups, state=state)
    settings = {"seq_idx": seq_idx_of(documents), "wide": WIDE, "device": "cuda"}
    with recorded_launches():
        assert_equals_reference("ssd_scan", scan, tensors, torch.bfloat16, BFLOAT16, **settings)
    assert chosen and all(chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("without", [(), ("norm_weight",)], ids=["norm", "gate alone"])
def test_a_block_that_computes_its_scan_again_on_a_gpu(without: tuple[str, ...]) -> None:
    from ssm_tune.kernels.recompute import recomputed
    from ssm_tune.kernels.triton_ssd_block import ssd_block

    tensors = block_tensors(length=300, heads=8, head_dim=64, groups=2, state=128, without=without)
    leaves = {
        name: None if t is None else t.to("cuda", torch.float32 if name in WIDE else torch.bfloat16).requires_grad_()
        for name, t in tensors.items()
    }
    seq_idx = torch.arange(300, device="cuda").div(70, rounding_mode="floor").int().expand(2, -1).contiguous()
    settings = {"head_dim": 64, "groups": 2, "group_size": 256, "seq_idx": seq_idx}
    given = [t for t in leaves.values() if t is not None]

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(y.float().sin().sum(), given, retain_graph=True))

    wanted = gradients(ssd_block(**leaves, **settings))
    with recomputed(given[0]):
        y = ssd_block(**leaves, **settings)
    for _ in range(2):
        for one, truth in zip(gradients(y), wanted, strict=True):
            assert (one - truth).float().norm() <= 1e-2 * truth.float().norm()
