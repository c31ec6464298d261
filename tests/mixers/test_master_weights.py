"""float32 weights under autocast: the same numbers as PyTorch's linear layer, without copies kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows import LAYOUTS, make_documents, run
from storages import Storages
from tiny import tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssm_tune.kernels import recompute
from ssm_tune.mixers import master_weights, patch_model
from ssm_tune.mixers.projections import project

TOKENS, WIDTH, OUT = 6, 32, 48


@pytest.fixture(autouse=True)
def path_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    yield


@pytest.fixture
def as_pytorch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(recompute, "DEVICES", ())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that are called by `master_linear`."""
    seen: list[nn.Module] = []
    function = master_weights.master_linear

    def counted(linear: nn.Module, x: Tensor, *later: Any) -> Tensor:
        seen.append(linear)
        return function(linear, x, *later)

    for caller in ("projections", "later_gradients"):
        monkeypatch.setattr(f"ssm_tune.mixers.{caller}.master_linear", counted)
    return seen


def autocast(on: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def results(linear: nn.Linear, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    with autocast():
        y = project(linear, x)
    wanted = [x, *(p for p in linear.parameters() if p.requires_grad)]
    slopes = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, wanted, slopes.to(y.dtype))]


@pytest.mark.parametrize("shape", [(2, TOKENS, WIDTH), (TOKENS, WIDTH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_autocast(dtype: torch.dtype, shape: tuple[int, ...], as_pytorch: Callable[[], None]) -> None:
    linear, x = nn.Linear(WIDTH, OUT), torch.randn(shape).to(dtype)
    *found, bias = results(linear, x)
    as_pytorch()
    *wanted, rounded = results(linear, x)
    for got, expected in zip(found, wanted, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    torch.testing.assert_close(bias, rounded, rtol=2e-2, atol=2e-2)  # the only one that is rounded once less here
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_halves_get_no_gradient(frozen: str, as_pytorch: Callable[[], None]) -> None:
    linear, x = nn.Linear(WIDTH, OUT), torch.randn(TOKENS, WIDTH)
    linear.weight.requires_grad_(frozen == "bias")
    linear.bias.requires_grad_(frozen == "weight")
    found = results(linear, x)
    as_pytorch()
    for got, expected in zip(found, results(linear, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def kept(linear: nn.Linear, x: Tensor) -> int:
    """Bytes that the layer leaves for backward beside its parameters, its input and its output."""
    with Storages() as storages, autocast():
        y = project(linear, x)
        assert y.grad_fn is not None
        return storages.alive(x, y, *linear.parameters())


def test_no_copy_of_the_weight_is_kept(as_pytorch: Callable[[], None]) -> None:
    linear = nn.Linear(WIDTH, OUT, bias=False)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert kept(linear, x) == 0
    as_pytorch()
    assert kept(linear, x) == 2 * WIDTH * OUT


def test_of_a_frozen_weight_not_even_the_input_is_kept() -> None:
    linear = nn.Linear(WIDTH, OUT, bias=False).requires_grad_(False)
    assert kept(linear, torch.randn(TOKENS, WIDTH, requires_grad=True)) == 0  # the cast input neither


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "bamba"])
def test_models_keep_no_copies(kind: str, calls: list[nn.Module], as_pytorch: Callable[[], None]) -> None:
    model, layout = patch_model(tiny_model(kind)).train(), LAYOUTS["packed"](make_documents())
    found = []
    for _ in range(2):
        model.zero_grad()
        with Storages() as storages, autocast():
            loss = run(model, layout, 100).loss
            alive = storages.alive(loss, *model.parameters())
        loss.backward()
        found.append((alive, {name: p.grad for name, p in model.named_parameters()}))
        as_pytorch()
    (few, got), (many, wanted) = found
    layers = set(calls)
    assert len(layers) >= 2 * sum("conv1d" in m._modules for m in model.modules())  # two projections each, or more
    assert many - few >= sum(2 * layer.weight.numel() for layer in layers)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=5e-2, atol=5e-2 * gradient.abs().max(), msg=name)


def test_only_plain_layers_that_nobody_watches(calls: list[nn.Module], as_pytorch: Callable[[], None]) -> None:
    linear, x = nn.Linear(WIDTH, OUT), torch.randn(TOKENS, WIDTH, requires_grad=True)

    class Other(nn.Linear):
        pass

    hooked, own, other = nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT), Other(WIDTH, OUT)
    hooked.register_forward_hook(lambda *_: None)
    own.forward = own.forward
    adapted = get_peft_model(nn.Sequential(nn.Linear(WIDTH, OUT)), LoraConfig(r=2, target_modules=["0"]))
    with autocast():
        for layer in (hooked, own, other, adapted.base_model.model[0], nn.Linear(WIDTH, OUT).bfloat16()):
            project(layer, x)
        project(nn.Linear(WIDTH, OUT).double(), x.double())
        with torch.no_grad():
            project(linear, x)
        checkpoint(lambda x: project(linear, x), x, use_reentrant=False).sum().backward()
    project(linear, x)
    assert not calls
    with autocast():
        project(linear, x)
        assert calls == [linear]
        as_pytorch()
        project(linear, x)
    assert calls == [linear]


def test_nothing_is_left_in_the_cache_of_autocast() -> None:
    linear, x = nn.Linear(WIDTH, OUT), torch.randn(TOKENS, WIDTH)
    with autocast():
        before = project(linear, x)
        with torch.no_grad():
            linear.weight.mul_(2.0)
            linear.bias.mul_(2.0)
        assert torch.equal(project(linear, x), 2 * before)


@pytest.mark.gpu
def test_on_a_gpu_the_gradient_of_the_weight_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer to the truth than bfloat16 can say, and the copy of the weight is not kept."""
    linear = nn.Linear(1024, 2048, bias=False).cuda()
    # With a gradient of its own, for which the product's backward needs the weight.
    x = torch.randn(4, 256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slopes = torch.randn(4, 256, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = slopes.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    errors, kept, outputs = [], [], []
    for devices in (("cuda",), ()):
        monkeypatch.setattr(recompute, "DEVICES", devices)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            y = project(linear, x)
        kept.append(torch.cuda.memory_allocated() - before - 2 * y.numel())
        (gradient,) = torch.autograd.grad(y, linear.weight, slopes)
        assert gradient.dtype == torch.float32
        errors.append(float((gradient - wanted).norm() / wanted.norm()))
        outputs.append(y.detach())
        del y, gradient
    assert errors[0] < 1e-5 < 1e-3 < errors[1]
    assert kept[0] < 2**20 <= kept[1] - kept[0]  # 4 MiB of copy
    assert torch.equal(*outputs)
