"""Which trainable parameters are dead before the first step, and which zeros are right."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ssm_tune.gradient_check import dead_parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.raw, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) @ self.raw.weight.T * self.scale  # reads `raw` past any adapter on it, as fused kernels do


def _names(model: nn.Module) -> list[str]:
    return [parameter.name for parameter in dead_parameters(model)]


def test_all_alive():
    net = Net()
    net.raw.bias.requires_grad_(False)
    net(torch.randn(3, 4)).sum().backward()
    assert _names(net) == []


def test_unused_and_zero_are_told_apart():
    net = Net()
    (net(torch.randn(3, 4)) * 0).sum().backward()
    reasons = {parameter.name: parameter.reason for parameter in dead_parameters(net)}
    assert "does not use it" in reasons["raw.bias"]
    assert "zero" in reasons["scale"]


def test_a_raw_weight_kills_its_adapter():
    model = get_peft_model(Net(), LoraConfig(target_modules=["used", "raw"], r=2))
    model(torch.randn(3, 4)).pow(2).sum().backward()
    dead = _names(model)
    assert all("raw.lora" in name for name in dead) and len(dead) == 2


def test_lora_a_beside_a_zero_b_is_right_and_lora_b_is_not():
    model = get_peft_model(Net(), LoraConfig(target_modules=["used"], r=2))
    model(torch.randn(3, 4)).pow(2).sum().backward()
    assert _names(model) == []  # A's gradient is zero, since B is zero
    b = model.base_model.model.used.lora_B["default"].weight
    b.grad.zero_()
    assert any("lora_B" in name for name in _names(model)) and any("lora_A" in name for name in _names(model))


def test_an_expert_without_tokens_is_excused_only_beside_a_busy_one():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts[expert](x)

    model = Experts()
    model(torch.randn(3, 2), 1).sum().backward()
    assert _names(model) == []
    model.zero_grad()
    assert len(_names(model)) == 6
