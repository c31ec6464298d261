"""Make transformers' Auto classes know our own models, whichever of the two packages is imported first.

`import ssm_tune` must not import transformers. So where transformers' table of configs is not there yet, a finder waits
for it in sys.meta_path: it lets the import happen as ever, then adds our configs, and is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TABLE = "transformers.models.auto.configuration_auto"


def register_architectures() -> None:
    """At once if transformers' Auto classes are imported, else as soon as they are. Calling it again does nothing."""
    if _TABLE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    importlib.import_module("ssm_tune.architectures.auto").register_configs()


class _Waiting:
    """A finder that finds nothing itself; for the one module it waits for, wraps what the other finders give."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister:
    """A loader that loads a module as its own does, and registers our configs when it has run."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader  # for what asks the module later: its source, its resources
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register()
