"""Every projection is called as a module, and the step's bias is added in float32."""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from rows import relative_error
from torch import nn

from ssm_tune.mixers.projections import project, project_without_bias


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dt_proj = nn.Linear(4, 16)
        self.other = nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dt_proj(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["dt_proj"]},
        {"target_modules": ["dt_proj"], "use_dora": True},
        {"target_modules": ["dt_proj"], "bias": "all"},
        {"target_modules": ["other"], "modules_to_save": ["dt_proj"]},
    ],
    ids=str,
)
def test_bias_is_left_out_inside_adapters(settings: dict) -> None:
    model = get_peft_model(Holder(), LoraConfig(r=2, init_lora_weights=False, **settings))
    layer, x = model.base_model.model.dt_proj, torch.randn(3, 4)
    without, bias = project_without_bias(layer, x)
    wanted = layer(x)  # the bias is back in its place
    assert relative_error(without + bias, wanted) < 1e-6
    with model.disable_adapter():
        without, bias = project_without_bias(layer, x)
        assert relative_error(without + bias, layer(x)) < 1e-6


def test_an_adapter_that_scales_the_bias_keeps_it() -> None:
    config = IA3Config(target_modules=["dt_proj"], feedforward_modules=[], init_ia3_weights=False)
    layer, x = get_peft_model(Holder(), config).base_model.model.dt_proj, torch.randn(3, 4)
    torch.nn.init.uniform_(layer.ia3_l["default"], 0.5, 2.0)
    got, bias = project_without_bias(layer, x)
    assert bias is None and torch.equal(got, layer(x))
    layer.merge()
    assert relative_error(project_without_bias(layer, x)[0], got) < 1e-6


def test_gradients_reach_weight_bias_and_input() -> None:
    linear, x = nn.Linear(4, 16), torch.randn(3, 4, requires_grad=True)
    without, bias = project_without_bias(linear, x)
    (without + bias).square().sum().backward()
    got = [x.grad.clone(), linear.weight.grad.clone(), linear.bias.grad.clone()]
    x.grad = None
    linear.zero_grad()
    linear(x).square().sum().backward()
    for gradient, wanted in zip(got, [x.grad, linear.weight.grad, linear.bias.grad], strict=True):
        assert relative_error(gradient, wanted) < 1e-6


def test_bias_is_back_after_an_error() -> None:
    linear = nn.Linear(4, 16)
    bias = linear.bias
    with pytest.raises(RuntimeError):
        project_without_bias(linear, torch.randn(3, 5))
    assert linear.bias is bias


def test_float32_bias_beside_bfloat16_weight() -> None:
    linear = nn.Linear(4, 16)
    linear.weight.data = linear.weight.data.bfloat16()
    nn.init.constant_(linear.bias, -5.0)
    x = torch.randn(3, 4) * 0.01
    without, bias = project_without_bias(linear, x)
    exact = x.double() @ linear.weight.double().T
    assert bias.dtype == torch.float32 and without.dtype == torch.bfloat16
    assert relative_error(without.double(), exact) < 0.01  # the sum in bf16 would be off by as much as it is large


def test_a_layer_without_bias() -> None:
    linear, x = nn.Linear(4, 16, bias=False), torch.randn(3, 4)
    without, bias = project_without_bias(linear, x)
    assert bias is None and torch.equal(without, linear(x))


def test_input_meets_the_weight_in_its_dtype() -> None:
    linear = nn.Linear(4, 16).bfloat16()
    assert project(linear, torch.randn(3, 4)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert project(nn.Linear(4, 16), torch.randn(3, 4)).dtype == torch.bfloat16
