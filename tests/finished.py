"""What tests of finished runs share: random trained values, logits to compare, a folder's facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer

from ssm_tune.run_folder import COMPLETE, RunFolder


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


def write_facts(folder: Path, model: str, status: str = COMPLETE, template: str | None = None, **keys: Any) -> None:
    """What a run folder has beside its weights."""
    run = RunFolder(folder)
    recipe = {"model": {"name": model, **keys}, "data": {"train": [{"path": "rows.jsonl"}]}, "adapter": {"r": 4}}
    run.write_text("recipe.yaml", json.dumps(recipe))  # JSON is YAML
    run.write_text("recipe.resolved.yaml", json.dumps(recipe))
    run.write_text("metrics.jsonl", '{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.5, "eval_loss": 2.75}\n')
    tiny_tokenizer(template).save_pretrained(folder)
    run.write_state(status)
