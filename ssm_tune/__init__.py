"""ssm-tune: fine-tune and pretrain state-space language models with the Hugging Face stack.

The public names are imported on first use, so that `import ssm_tune` and the command line stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ssm_tune.registration import register_architectures

if TYPE_CHECKING:
    from ssm_tune.mixers import patch_model, unpatch_model
    from ssm_tune.model import load_model
    from ssm_tune.outputs.run import Run
    from ssm_tune.recipe import Recipe, RecipeError, load_recipe
    from ssm_tune.workflow import tune

__version__ = "0.1.0"

_HOMES = {
    "tune": "ssm_tune.workflow",
    "load_model": "ssm_tune.model",
    "load_recipe": "ssm_tune.recipe",
    "patch_model": "ssm_tune.mixers",
    "unpatch_model": "ssm_tune.mixers",
    "Recipe": "ssm_tune.recipe",
    "RecipeError": "ssm_tune.recipe",
    "Run": "ssm_tune.outputs.run",
}

__all__ = ["Recipe", "RecipeError", "Run", "load_model", "load_recipe", "patch_model", "tune", "unpatch_model"]


register_architectures()  # our own models load with transformers' Auto classes; imports nothing by itself


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ssm_tune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
