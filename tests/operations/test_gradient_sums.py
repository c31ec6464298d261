"""The two gradients of a tensor that is used twice: added by the operation that made it, right in any case."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import draw
from cuda_on_cpu import Compiler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_tune.kernels import cuda_conv
from ssm_tune.kernels.gradient_sums import second_gradient, takes_two, used_twice

SHAPE = (2, 20, 16)


class Additions(TorchDispatchMode):
    """Counts the additions of whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and result.shape == SHAPE
        return result


class Taking(torch.autograd.Function):
    """sin, whose backward takes two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        takes_two(ctx)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        second = second_gradient(ctx)
        return x.cos() * (dy if second is None else torch.stack([dy, second]).sum(0))


def leaf() -> Tensor:
    torch.manual_seed(0)
    return draw(*SHAPE).float().requires_grad_()


def take(x: Tensor) -> Tensor:
    return Taking.apply(x)


# What becomes of the two, and how many additions are left.
USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "both": (lambda one, other: one * other.exp(), 0),
    "the first alone": (lambda one, other: one.exp() + 0 * other.detach(), 0),
    "the second alone": (lambda one, other: one.detach() * other.exp(), 0),
    "neither": (lambda one, other: (one * other).detach() + leaf() * 0, 0),
    "one of them twice": (lambda one, other: one * other * one.exp(), 1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("times", [1, 2])
def test_any_use_is_right(use: str, times: int) -> None:
    function, left = USES[use]
    found = []
    for split in (used_twice, lambda y: (y, y)):
        x = leaf()
        loss = function(*split(take(x))).sum()
        for i in range(times):
            with Additions() as additions:
                (gradient,) = torch.autograd.grad(loss, x, retain_graph=i + 1 < times, allow_unused=True)
        found.append((gradient, additions.count))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == left


def test_what_is_left_of_one_backward_pass_is_not_of_the_next() -> None:
    x = leaf()
    y = take(x)
    one, other = used_twice(y)
    torch.autograd.grad((one * other).sum(), y, retain_graph=True)  # stops before who would take the second
    (gradient,) = torch.autograd.grad(one.sum(), x)
    assert torch.equal(gradient, x.cos())


def test_one_that_takes_no_second_gets_the_sum() -> None:
    x = leaf()
    one, other = used_twice(x.sin())
    assert one is other
    assert all(tensor is x for tensor in used_twice(x))


def test_gradients_of_gradients() -> None:
    x = leaf()
    one, other = used_twice(take(x))
    (once,) = torch.autograd.grad((one * other).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), x)
    torch.testing.assert_close(twice, 2 * torch.cos(2 * x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)])
def test_the_convolution_adds_them(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, view: Any
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setattr(cuda_conv, "compiled", Compiler(tmp_path_factory.mktemp("cuda")))
    weight, bias = torch.randn(SHAPE[-1], 4), torch.randn(SHAPE[-1])
    slopes = [view(draw(*SHAPE).to(dtype)) for _ in range(2)]
    found = []
    for split in (used_twice, lambda y: (y, y)):
        leaves = [leaf().detach().to(dtype).requires_grad_(), *(t.clone().requires_grad_() for t in (weight, bias))]
        outputs = split(cuda_conv.causal_conv1d(*leaves))
        with Additions() as additions:
            found.append(torch.autograd.grad(outputs, leaves, slopes))
        assert additions.count == (split is not used_twice)
    for together, before in zip(*found, strict=True):
        difference = (together - before).float().norm() / before.float().norm()
        assert difference < (1e-2 if dtype == torch.bfloat16 else 1e-6)
