"""Data: from files, Hub data sets and rows in memory to token rows with a loss, packed or not.

The public names are imported on first use: a recipe's files can be checked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssm_tune.data.chat import format_prompt, prompt_ids
    from ssm_tune.data.collator import Collator
    from ssm_tune.data.prepare import DataReport, PreparedData, check_sources, prepare_data, training_texts

_HOMES = {
    "Collator": "collator",
    "DataReport": "prepare",
    "PreparedData": "prepare",
    "check_sources": "prepare",
    "format_prompt": "chat",
    "prepare_data": "prepare",
    "prompt_ids": "chat",
    "training_texts": "prepare",
}

__all__ = [
    "Collator",
    "DataReport",
    "PreparedData",
    "check_sources",
    "format_prompt",
    "prepare_data",
    "prompt_ids",
    "training_texts",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ssm_tune.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ssm_tune.data' has no attribute {name!r}")
