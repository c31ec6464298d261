"""The public norms: they are the reference on a CPU, and name what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison import draw

from ssm_tune.kernels import (
    add_rms_norm,
    gated_rms_norm,
    recompute,
    reference,
    residual_rms_norm,
    rms_norm,
    rms_norm_parts,
)


def test_they_are_the_reference() -> None:
    y, z, weight = draw(2, 3, 8).float(), draw(2, 3, 8).float(), draw(8).float()
    assert torch.equal(rms_norm(y, weight, 1e-5), reference.rms_norm(y, weight, 1e-5))
    for settings in ((None, False), (4, False), (2, True)):
        expected = reference.gated_rms_norm(y, z, weight, 1e-5, *settings)
        assert torch.equal(gated_rms_norm(y, z, weight, 1e-5, *settings), expected)


def test_what_does_not_fit_is_named() -> None:
    y, z, weight = torch.ones(2, 3, 8), torch.ones(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"rms_norm: weight is \(8,\), expected \(4,\)"):
        rms_norm(y[..., :4], weight, 1e-5)
    with pytest.raises(ValueError, match=r"z is \(2, 3, 4\), expected \(2, 3, 8\)"):
        gated_rms_norm(y, z[..., :4], weight, 1e-5)
    with pytest.raises(ValueError, match="8 channels are not a multiple of the group size 3"):
        gated_rms_norm(y, z, weight, 1e-5, group_size=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_kept_and_normed(dtype: torch.dtype) -> None:
    x, residual, weight = draw(3, 8).to(dtype), draw(3, 8).float(), draw(8).to(dtype)
    total = residual + x
    y = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(y, reference.rms_norm(total, weight, 1e-5).to(dtype)) and y.dtype == dtype
    with pytest.raises(ValueError, match=r"residual is \(2, 8\), expected \(3, 8\)"):
        add_rms_norm(x, residual[:2], weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_and_its_norm(dtype: torch.dtype) -> None:
    stream, x, weight = draw(2, 3, 8).float(), draw(2, 3, 8).to(dtype), draw(8).to(dtype)
    y, total = residual_rms_norm(stream, x, weight, 1e-5, dtype)
    assert torch.equal(total, stream + x) and total.dtype == torch.float32
    assert torch.equal(y, reference.rms_norm(total, weight, 1e-5).to(dtype)) and y.dtype == dtype
    y, total = residual_rms_norm(stream, None, weight, 1e-5)
    assert total is stream and torch.equal(y, reference.rms_norm(stream, weight, 1e-5))
    rounded = residual_rms_norm(stream.to(dtype), x, weight, 1e-5)
    assert {part.dtype for part in rounded} == {dtype}
    with pytest.raises(ValueError, match=r"residual_rms_norm: x is \(2, 2, 8\), expected \(2, 3, 8\)"):
        residual_rms_norm(stream, x[:, :2], weight, 1e-5)


def test_parts_are_normed_each_by_itself() -> None:
    x = draw(2, 3, 20).float()
    parts = rms_norm_parts(x, (12, 5, 3), 1e-3)
    for part, given in zip(parts, x.split([12, 5, 3], dim=-1), strict=True):
        torch.testing.assert_close(part, rms_norm(given, torch.ones(given.shape[-1]), 1e-3))
    with pytest.raises(ValueError, match=r"sizes are \(12, 5\), their sum should be 20"):
        rms_norm_parts(x, (12, 5), 1e-3)


def check_parts(device: str, dtype: torch.dtype, tolerance: float, sizes: tuple[int, int, int]) -> None:
    """Of rows that lie apart, with gradients that are parts of something wider; a gradient that is not there."""
    from ssm_tune.kernels.norm_parts_triton import rms_norm_parts as by_triton

    x = draw(2, 35, 2 * sum(sizes)).to(device, dtype)[..., : sum(sizes)].requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, expected = by_triton(x, sizes, 1e-3), reference.rms_norm_parts(wide, sizes, 1e-3)
    slopes = [draw(2, 35, 2 * size).to(device, dtype)[..., :size] for size in sizes]
    for used in (3, 2):
        (gradient,) = torch.autograd.grad(found[:used], x, slopes[:used], retain_graph=True)
        doubles = [slope.double() for slope in slopes[:used]]
        (truth,) = torch.autograd.grad(expected[:used], wide, doubles, retain_graph=True)
        assert gradient.dtype == dtype and gradient.is_contiguous()
        assert (gradient.double() - truth).norm() <= tolerance * truth.norm()
    for part, truth in zip(found, expected, strict=True):
        assert part.dtype == dtype and (part.double() - truth).norm() <= tolerance * truth.norm()


def check_that_parts_are_not_kept(device: str) -> None:
    from ssm_tune.kernels.norm_parts_triton import rms_norm_parts as by_triton

    x, kept = draw(2, 35, 24).to(device, torch.float32).requires_grad_(), []
    for devices in ((), (device,)):
        recompute.DEVICES = devices
        with recompute.recomputed(x), recompute.kept_tensors() as seen:
            y = sum(part.square().sum() for part in by_triton(x * 2, (16, 4, 4), 1e-3))
        kept.append((torch.autograd.grad(y, x)[0], len(seen)))
    (expected, _), (found, tensors) = kept
    assert torch.equal(found, expected) and tensors == 1  # 2 x


def test_the_triton_kernels_of_parts_interpreted() -> None:
    pytest.importorskip("triton")
    code = (
        "import torch, test_norm as t\n"
        "for sizes in ((20, 4, 3), (256, 16, 16)): t.check_parts('cpu', torch.float32, 1e-6, sizes)\n"
        "t.check_that_parts_are_not_kept('cpu')"
    )
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (here, here.parents[1]))),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(20, 4, 3), (256, 16, 16), (160, 128, 128)])
def test_the_triton_kernels_of_parts_on_a_gpu(sizes: tuple[int, int, int]) -> None:
    check_parts("cuda", torch.float32, 1e-6, sizes)
    check_parts("cuda", torch.bfloat16, 4e-3, sizes)


@pytest.mark.gpu
def test_parts_are_not_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "DEVICES", recompute.DEVICES)
    check_that_parts_are_not_kept("cuda")


_INTERPRETED = """
import torch
from ssm_tune.kernels import add_norm_triton, reference
kinds = (torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16), (torch.bfloat16,) * 3
for (rows, dim), (of_x, of_residual, of_weight) in zip(((1, 40), (3, 2048), (2, 96)), kinds):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    x, residual = draw(rows, 2 * dim).to(of_x)[:, :dim], draw(rows, dim).to(of_residual)
    weight = draw(dim).to(of_weight)
    kept = residual.clone()
    found = add_norm_triton.add_rms_norm(x, kept, weight, 1e-5)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if of_residual == torch.float32 else {"atol": 0, "rtol": 1 / 128}
    torch.testing.assert_close(kept, residual, **tolerance)
    torch.testing.assert_close(found, expected, atol=0.04 if of_x == torch.bfloat16 else 1e-5, rtol=1e-5)
"""


def test_the_triton_kernel_is_the_reference() -> None:
    """Interpreted, in a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
