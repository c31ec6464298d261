"""What tests of adapters give them: sections of recipes and models without weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM


def section(**changes: Any) -> Any:
    """An adapter section of a recipe."""
    keys = {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    return SimpleNamespace(**{**keys, "modules_to_save": None, "targets": "all", "train_also": [], **changes})


def meta_model(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind))
