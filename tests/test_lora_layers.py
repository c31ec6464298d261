"""LoRA layers that cast their adapters: PEFT's results and gradients, with less kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_tune.kernels.backends import recorded_calls
from ssm_tune.lora_layers import DirectLinear, _LoraLinear, cast_adapters_only

INPUTS, OUTPUTS, TOKENS = 12, 20, (2, 7)


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def adapted(dtype: torch.dtype = torch.float32, with_bias: bool = True, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    base = Net(with_bias).to(dtype)
    model = get_peft_model(base, LoraConfig(target_modules=["first"], r=4, lora_alpha=12, **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    slope = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    leaves = {"x": x} | {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(y, list(leaves.values()), slope, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}


def compare(settings: dict[str, Any], dtype: torch.dtype = torch.float32, tolerance: float = 1e-6) -> nn.Module:
    x = torch.randn(*TOKENS, INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = outcome(adapted(dtype, **settings), x)
    model = cast_adapters_only(adapted(dtype, **settings))
    found = outcome(model, x)
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert found[name].dtype == truth.dtype, name
        difference = (found[name].double() - truth.double()).norm() / truth.double().norm()
        assert difference <= tolerance, (name, difference)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed by the direct way."""
    found: list[str] = []
    real = _LoraLinear.apply
    monkeypatch.setattr(_LoraLinear, "apply", lambda *a: (found.append("direct"), real(*a))[1])
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
def test_results_and_gradients_are_pefts(calls: list[str], bias: bool, rslora: bool) -> None:
    model = compare({"with_bias": bias, "use_rslora": rslora})
    assert calls == ["direct"]
    assert isinstance(model.base_model.model.first, DirectLinear)


def test_in_bfloat16_adapters_stay_float32_and_only_they_are_cast(calls: list[str]) -> None:
    model = compare({}, torch.bfloat16, 2e-2)
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if "lora_" in n)
    with torch.autocast("cpu", torch.bfloat16):
        compare({}, torch.bfloat16, 2e-2)
    assert calls == ["direct"] * 2


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}], ids=["dora", "adapter's bias", "bias"]
)
def test_whatever_is_more_is_left_to_peft(calls: list[str], settings: dict[str, Any]) -> None:
    compare(settings)
    assert calls == []


def test_dropout() -> None:
    compare({"lora_dropout": 0.5})
    model = cast_adapters_only(adapted(lora_dropout=0.5)).eval()
    x = torch.randn(*TOKENS, INPUTS)
    torch.testing.assert_close(model(x), adapted(lora_dropout=0.5).eval()(x))


def test_a_float32_base_under_autocast_is_left_to_peft(calls: list[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compare({}, torch.float32)
    assert calls == []


def test_switched_off_merged_and_two_adapters(calls: list[str]) -> None:
    x = torch.randn(*TOKENS, INPUTS)
    model, stock = cast_adapters_only(adapted()), adapted()
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(x), stock(x))
    before = model(x)
    model.merge_adapter()
    torch.testing.assert_close(model(x), before)
    model.unmerge_adapter()
    assert calls == ["direct"]
    for net in (model, stock):
        torch.manual_seed(3)
        net.add_adapter("other", LoraConfig(target_modules=["first"], r=2, init_lora_weights=False))
        net.base_model.set_adapter(["default", "other"])
    torch.testing.assert_close(model(x), stock(x))
    torch.testing.assert_close(model.merge_and_unload()(x), stock(x))


def test_a_layer_that_is_watched_is_called(calls: list[str]) -> None:
    model = cast_adapters_only(adapted())
    seen: list[int] = []
    model.base_model.model.first.base_layer.register_forward_hook(lambda *a: seen.append(1))
    model(torch.randn(*TOKENS, INPUTS))
    assert seen == [1] and calls == []


def test_what_comes_in_is_kept_once_and_not_for_the_frozen_weight() -> None:
    model = cast_adapters_only(adapted(torch.bfloat16))
    x = torch.randn(*TOKENS, INPUTS).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = model(x)
    layer = model.base_model.model.first
    weights = {layer.base_layer.weight.data_ptr(), x.data_ptr()}
    others = [t for t in kept if t.untyped_storage().data_ptr() not in weights]
    assert {tuple(t.shape) for t in others} == {(4, INPUTS), (OUTPUTS, 4), (math.prod(TOKENS), 4)}
    y.sum().backward()
    assert layer.base_layer.weight.grad is None


def test_files_and_copies_are_as_before(tmp_path: Any) -> None:
    import copy

    from safetensors.torch import load_file

    model = cast_adapters_only(adapted())
    adapted().save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "ours")
    stock, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stock", "ours"))
    assert {n: t.shape for n, t in stock.items()} == {n: t.shape for n, t in ours.items()}
    assert all(torch.equal(stock[name], ours[name]) for name in stock)
    x = torch.randn(*TOKENS, INPUTS)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    assert isinstance(model.base_model.model.first, lora.Linear)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 400), (400, 8)], ids=["narrow input", "narrow output"])
def test_narrow_layers_are_one_product_and_lose_nothing_in_rounding(inputs: int, outputs: int) -> None:
    """`y` of a layer that widens, `dx` of one that narrows: rounded once."""
    generator = torch.Generator().manual_seed(2)
    x, weight, A, B = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((2, 300, inputs), (outputs, inputs), (8, inputs), (outputs, 8))
    )
    A, B = A.float(), 1e-2 * B.float()
    slope = torch.randn(2, 300, outputs, generator=generator).bfloat16()
    leaves = [x.requires_grad_(), A.requires_grad_(), B.requires_grad_()]
    products: list[tuple[int, int]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
                products.append((tuple(args[-2].shape), tuple(args[-1].shape)))
            return function(*args, **(kwargs or {}))

    with Products():
        y = _LoraLinear.apply(x, weight, None, A, B, 0.5, None)
        found = (y.detach(), *torch.autograd.grad(y, leaves, slope))
    assert (((600, 16), (16, 400)) in products) and not any(pair == ((600, 8), (8, 400)) for pair in products)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    y = exact[0] @ weight.double().t() + 0.5 * exact[0] @ exact[1].t() @ exact[2].t()
    truth = (y.detach(), *torch.autograd.grad(y, exact, slope.double()))
    for value, expected in zip(found, truth, strict=True):
        assert (value.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 2112), (128, 4096), (4096, 160)])
def test_on_a_gpu_by_its_kernels(inputs: int, outputs: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).bfloat16().cuda()

    weight, slope = normal(outputs, inputs, size=inputs**-0.5), normal(2, 1000, outputs)
    adapter = normal(rank, inputs, size=inputs**-0.5).float(), normal(outputs, rank, size=0.1).float()
    leaves = [tensor.requires_grad_() for tensor in (normal(2, 1000, inputs), *adapter)]
    with recorded_calls() as calls:
        y = _LoraLinear.apply(leaves[0], weight, None, *leaves[1:], 0.5, None)
        found = (y.detach(), *torch.autograd.grad(y, leaves, slope))
    assert len(calls) >= 2 and {call.backend for call in calls} == {"triton"}
    x, A, B = (tensor.detach().double().requires_grad_() for tensor in leaves)
    y = x @ weight.double().t() + 0.5 * x @ A.t() @ B.t()
    truth = (y.detach(), *torch.autograd.grad(y, (x, A, B), slope.double()))
    for value, expected in zip(found, truth, strict=True):
        assert (value.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["one input", "two inputs"])
def test_small_adapters_are_not_lost_in_the_rounding_of_the_base(dropout: float) -> None:
    """The map that an adapter adds, fitted to outputs in bfloat16; 1e-4 in B is far below a rounding of any output."""
    model = cast_adapters_only(adapted(torch.bfloat16, with_bias=False, lora_dropout=dropout)).train()
    layer = model.base_model.model.first
    nn.init.normal_(layer.lora_B["default"].weight, std=1e-4)
    x = torch.randn(20_000, INPUTS, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        added = model(x).double() - x.double() @ layer.base_layer.weight.double().t()
        truth = (
            layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
    fitted = torch.linalg.lstsq(x.double(), added).solution.t()
    assert (fitted - truth).norm() <= 0.25 * truth.norm()
