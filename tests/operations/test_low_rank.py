"""A product with a low-rank matrix and the gradients through it, on a CPU; Triton's interpreted, and on a GPU."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import draw
from torch import Tensor

from ssm_tune import kernels
from ssm_tune.kernels import backends, low_rank_gradients, low_rank_product, products, reference, trials

HERE = Path(__file__).parent
# A block of columns that is cut, ranks that are filled up, tokens that no block divides.
SIZES = [(100, 80, 16), (37, 48, 8), (130, 96, 20), (1, 16, 1)]


def tensors(tokens: int, out: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """dy, a part of something wider, B and h."""
    return draw(tokens, 2 * out)[:, :out], draw(out, rank), draw(tokens, rank)


def check(found: Any, dy: Tensor, B: Tensor, h: Tensor, A: Tensor | None, rounding: float) -> None:
    """Sums in float32, each rounded once."""
    dh = found[0].double()
    expected = 0.5 * dy.double() @ B.double(), dy.double().t() @ h.double(), None if A is None else dh @ A.double()
    for value, truth, tolerance in zip(found, expected, (rounding, 1e-5, rounding), strict=True):
        if truth is None:
            assert value is None
            continue
        assert value.dtype == (torch.float32 if truth is expected[1] else dy.dtype)
        assert (value.double() - truth).norm() <= tolerance * truth.norm()


def check_weight(function: Any, dy: Tensor, x: Tensor, rounding: float) -> None:
    truth = dy.double().t() @ x.double()
    found = function(dy, x)
    assert found.dtype == torch.float32 and (found.double() - truth).norm() <= rounding * truth.norm()


def check_product(found: tuple[Tensor, Tensor], x: Tensor, A: Tensor, B: Tensor, rounding: float) -> None:
    h, y = found
    expected = 0.5 * x.double() @ A.double().t(), h.double() @ B.double().t()
    for value, truth in zip((h, y), expected, strict=True):
        assert value.dtype == x.dtype and (value.double() - truth).norm() <= rounding * truth.norm()


@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_cpu(sizes: tuple[int, int, int]) -> None:
    dy, B, h = (tensor.float() for tensor in tensors(*sizes))
    A = draw(B.shape[1], dy.shape[1]).float()
    for module in (kernels, reference):
        check(module.low_rank_gradients(dy, B, h, 0.5), dy, B, h, None, 1e-6)
        check(module.low_rank_gradients(dy, B, h, 0.5, A=A), dy, B, h, A, 1e-6)
    with pytest.raises(ValueError, match=r"low_rank_gradients: h is"):
        low_rank_gradients(dy, B, h[1:], 0.5)
    check_product(low_rank_product(dy, A, B, 0.5), dy, A, B, 1e-6)
    check_product(reference.low_rank_product(dy, A, B, 0.5), dy, A, B, 1e-6)
    for module in (kernels, reference):
        check_weight(module.narrow_weight_gradient, h, dy, 1e-6)
    with pytest.raises(ValueError, match=r"narrow_weight_gradient: x is"):
        kernels.narrow_weight_gradient(h, dy[:, 1:][1:])
    with pytest.raises(ValueError, match=r"low_rank_product: x is"):
        low_rank_product(dy[:, 1:], A, B, 0.5)


def test_what_no_kernel_is_for_asks_for_none() -> None:
    """Nothing is said then of a kernel that cannot serve."""
    with backends.recorded_calls() as calls:
        for tokens, rank, dtype in ((0, 4, torch.bfloat16), (3, 33, torch.bfloat16), (3, 4, torch.float32)):
            h, y = low_rank_product(
                *(torch.ones(n, 8, dtype=dtype) for n in (tokens, rank)), torch.ones(6, rank).to(dtype), 1.0
            )
            assert h.shape == (tokens, rank) and y.shape == (tokens, 6)
        assert not calls
        low_rank_product(*(torch.ones(size).bfloat16() for size in ((3, 8), (32, 8), (6, 32))), 1.0)
    assert len(calls) == 1


def test_all_backends_are_called_alike() -> None:
    """As the trials call them: by names, and without what has a default."""
    pytest.importorskip("triton")
    from ssm_tune.kernels import low_rank_triton

    for name in (
        "low_rank_product",
        "low_rank_gradients",
        "narrow_weight_gradient",
    ):
        wanted = inspect.signature(vars(kernels)[name]).parameters
        for module in (low_rank_triton, products, reference):
            found = list(inspect.signature(vars(module)[name]).parameters.values())[: len(wanted)]
            assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in wanted.values()], module


def test_the_trial_finds_what_is_wrong() -> None:
    device = torch.device("cpu")
    trials.run_trial("low_rank_gradients", reference.low_rank_gradients, device)
    for wrong in (lambda dh, dB, dx: (dh / 2, dB, dx), lambda dh, dB, dx: (dh, dB.roll(1, 0), dx)):
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


def check_narrow(tensors: dict[str, Tensor], rounding: float) -> None:
    x, A, B, weight = (tensors[name] for name in ("x", "A", "B", "weight"))
    h, y = products.narrow_linear(x, weight, A, B, 0.5)
    dx = products.narrow_gradient(x, weight.t().contiguous(), h, B.t().contiguous())
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    low, of_weight = 0.5 * wide["x"] @ wide["A"].t(), wide["x"] @ wide["weight"].t()
    for found, truth in ((h, low), (y, of_weight + h.double() @ wide["B"].t()), (dx, y.double())):
        assert found.dtype == x.dtype and (found.double() - truth).norm() <= rounding * truth.norm()


def narrow_tensors(tokens: int, out: int, rank: int) -> dict[str, Tensor]:
    sizes = {"x": (tokens, 80), "A": (rank, 40), "B": (out, rank), "weight": (out, 40)}
    tensors = {name: draw(*size) for name, size in sizes.items()}
    return tensors | {"x": tensors["x"][:, :40]}


@pytest.mark.parametrize("sizes", SIZES)
def test_narrow_layers_on_a_cpu(sizes: tuple[int, int, int]) -> None:
    tensors = {name: tensor.float() for name, tensor in narrow_tensors(*sizes).items()}
    check_narrow(tensors, 1e-6)


def compute(device: str, dtype: torch.dtype, rounding: float, sizes: list[tuple[int, int, int]]) -> None:
    from ssm_tune.kernels import low_rank_triton

    for size, tile in itertools.product(sizes, (None, low_rank_triton.Tile(32, 32, programs=16))):
        dy, B, h = (tensor.to(device, dtype) for tensor in tensors(*size))
        A = None if tile is None else draw(size[2], 300).to(device, dtype)
        found, again = (low_rank_triton.low_rank_gradients(dy, B, h, 0.5, torch.float32, A, tile) for _ in range(2))
        check(found, dy, B, h, A, rounding)
        check_weight(partial(low_rank_triton.narrow_weight_gradient, tile=tile), h, dy, 1e-5)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_the_triton_kernels_interpreted() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported. In float16: it has no bfloat16."""
    pytest.importorskip("triton")
    code = "import torch, test_low_rank as t; torch.manual_seed(0)\n"
    code += "t.compute('cpu', torch.float16, 5e-4, t.SIZES)\n"
    code += "t.compute_product('cpu', torch.float16, 5e-4, t.SIZES[1:2])"
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
