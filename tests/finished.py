"""What tests of finished runs share: random trained values, and logits to compare."""

from __future__ import annotations

from typing import Any

import torch


def stir(model: torch.nn.Module, seed: int = 1) -> None:
    """Random values in everything that is trained: a fresh lora_B is zero, which would hide any mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += (0.1 if "lora_" in name else 0.05) * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(3, 3 + 2 * 12).view(2, 12)
    return model(input_ids=tokens, use_cache=False).logits.float()
