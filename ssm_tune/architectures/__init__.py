"""Models from scratch: sizes and dimensions -> a config, and the papers' initialisation; the models transformers lacks.

Importing this imports the part that is asked for: configs are registered with transformers while it is being imported
itself, before its models can be.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssm_tune.architectures.dimensions import ARCHITECTURES, Architecture
    from ssm_tune.architectures.from_scratch import initialize, plan_config

_HOMES = {
    "ARCHITECTURES": "dimensions",
    "Architecture": "dimensions",
    "initialize": "from_scratch",
    "plan_config": "from_scratch",
}

__all__ = ["ARCHITECTURES", "Architecture", "initialize", "plan_config"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ssm_tune.architectures.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ssm_tune.architectures' has no attribute {name!r}")
