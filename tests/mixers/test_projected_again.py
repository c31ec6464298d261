"""In_proj computed again in backward on a GPU, by its kernels: launched, and in a CUDA graph. On a CPU:
test_recompute.py."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraModel
from tiny import tiny_model
from torch import Tensor, nn

from ssm_tune.lora_layers import cast_adapters_only
from ssm_tune.mixers import patch_model
from ssm_tune.mixers.layer_graphs import layer_graphs
from ssm_tune.mixers.projected_again import Shares

LENGTH = 256


def adapted(kind: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A frozen model in bfloat16 and adapters in float32, of which none begins as zero."""
    monkeypatch.setattr(LoraModel, "_check_target_module_compatiblity", lambda *_: None)
    torch.manual_seed(0)
    sizes = {"num_heads": 16, "head_dim": 16} if kind == "mamba2" else {}
    model = patch_model(tiny_model(kind, hidden_size=128, num_hidden_layers=4, **sizes)).bfloat16()
    settings = LoraConfig(r=8, target_modules=["in_proj", "out_proj"])
    model = cast_adapters_only(get_peft_model(model, settings)).cuda().train()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * (0.1 if "lora_B" in name else 0.05)
    return model


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    borders = (
        torch.arange(LENGTH, device="cuda", dtype=torch.int32).div(100, rounding_mode="floor").expand(len(ids), -1)
    )
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        model(input_ids=ids, labels=ids, seq_idx=borders.contiguous()).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_on_a_gpu_gradients_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(kind, monkeypatch)
    ids = torch.randint(3, 60, (2, LENGTH), device="cuda")
    module = "ssm_tune.mixers." + ("mamba2" if kind == "mamba2" else "mamba")
    monkeypatch.setattr(f"{module}.AGAIN", Shares())
    expected = gradients(model, ids)
    monkeypatch.setattr(f"{module}.AGAIN", Shares(frozen=0.5))
    found = [gradients(model, ids)]
    with layer_graphs():
        found += [gradients(model, ids) for _ in range(3)]
    for some in found:
        for one, truth in zip(some, expected, strict=True):
            assert truth.any() and (one - truth).norm() <= 2e-2 * truth.norm()
