"""A product with a low-rank matrix and the gradients through it, on a CPU; Triton's interpreted, and on a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison import draw
from torch import Tensor

from ssm_tune.kernels import low_rank_gradients, low_rank_product, reference, trials

HERE = Path(__file__).parent
# A block of columns that is cut, ranks that are filled up, tokens that no block divides.
SIZES = [(100, 80, 16), (37, 48, 8), (130, 96, 20), (1, 16, 1)]


def tensors(tokens: int, out: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """dy, a part of something wider, B and h."""
    return draw(tokens, 2 * out)[:, :out], draw(out, rank), draw(tokens, rank)


def check(found: tuple[Tensor, Tensor], dy: Tensor, B: Tensor, h: Tensor, rounding: float) -> None:
    """Sums in float32, each rounded once."""
    expected = 0.5 * dy.double() @ B.double(), dy.double().t() @ h.double()
    assert found[0].dtype == dy.dtype and found[1].dtype == torch.float32
    for value, truth, tolerance in zip(found, expected, (rounding, 1e-5), strict=True):
        assert (value.double() - truth).norm() <= tolerance * truth.norm()


def check_product(found: tuple[Tensor, Tensor], x: Tensor, A: Tensor, B: Tensor, rounding: float) -> None:
    h, y = found
    expected = 0.5 * x.double() @ A.double().t(), h.double() @ B.double().t()
    for value, truth in zip((h, y), expected, strict=True):
        assert value.dtype == x.dtype and (value.double() - truth).norm() <= rounding * truth.norm()


@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_cpu(sizes: tuple[int, int, int]) -> None:
    dy, B, h = (tensor.float() for tensor in tensors(*sizes))
    check(low_rank_gradients(dy, B, h, 0.5), dy, B, h, 1e-6)
    check(reference.low_rank_gradients(dy, B, h, 0.5), dy, B, h, 1e-6)
    with pytest.raises(ValueError, match=r"low_rank_gradients: h is"):
        low_rank_gradients(dy, B, h[1:], 0.5)
    A = draw(B.shape[1], dy.shape[1]).float()
    check_product(low_rank_product(dy, A, B, 0.5), dy, A, B, 1e-6)
    check_product(reference.low_rank_product(dy, A, B, 0.5), dy, A, B, 1e-6)
    with pytest.raises(ValueError, match=r"low_rank_product: x is"):
        low_rank_product(dy[:, 1:], A, B, 0.5)


def test_the_trial_finds_what_is_wrong() -> None:
    device = torch.device("cpu")
    trials.run_trial("low_rank_gradients", reference.low_rank_gradients, device)
    for wrong in (lambda dh, dB: (dh / 2, dB), lambda dh, dB: (dh, dB.roll(1, 0))):
        with pytest.raises(trials.WrongResultError, match="output"):
            trials.run_trial(
                "low_rank_gradients", lambda *a, w=wrong, **k: w(*reference.low_rank_gradients(*a, **k)), device
            )


def compute_product(device: str, dtype: torch.dtype, rounding: float, sizes: list[tuple[int, int, int]]) -> None:
    from ssm_tune.kernels.low_rank_triton import Walk
    from ssm_tune.kernels.low_rank_triton import low_rank_product as by_triton

    # The second goes through the columns in two programs, several times each.
    for (tokens, out, rank), walk in itertools.product(sizes, (None, Walk(32, 32, 16, splits=2))):
        x, B, _ = (tensor.to(device, dtype) for tensor in tensors(tokens, out, rank))
        A, B = draw(rank, out).to(device, dtype), B[: out // 2]
        check_product(by_triton(x, A, B, 0.5, walk), x, A, B, rounding)


def compute(device: str, dtype: torch.dtype, rounding: float, sizes: list[tuple[int, int, int]]) -> None:
    from ssm_tune.kernels import low_rank_triton

    for size in sizes:
        dy, B, h = (tensor.to(device, dtype) for tensor in tensors(*size))
        for tile in (None, low_rank_triton.Tile(32, 32, programs=16)):
            found, again = (low_rank_triton.low_rank_gradients(dy, B, h, 0.5, torch.float32, tile) for _ in range(2))
            check(found, dy, B, h, rounding)
            assert all(map(torch.equal, found, again))


def test_the_triton_kernels_interpreted() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported. In float16: it has no bfloat16."""
    pytest.importorskip("triton")
    code = "import torch, test_low_rank as t; torch.manual_seed(0)\n"
    code += "for compute in (t.compute, t.compute_product): compute('cpu', torch.float16, 5e-4, t.SIZES)"
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_triton_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    large = [(8192, 8512, 16), (4096, 160, 16), (2048, 4096, 8), (1000, 1024, 64)]
    for computed in (compute, compute_product):
        computed("cuda", dtype, 4e-3 if dtype == torch.bfloat16 else 5e-4, [*SIZES, *large])
