"""Triton's tuning, kept out of trials: which configuration is fastest says nothing of whether a kernel is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIED = 2  # configurations: the first may ask for more shared memory than the card has


@contextmanager
def without_tuning() -> Iterator[None]:
    """Inside, a Triton kernel that is tuned takes one of its first configurations: seconds instead of minutes.

    What was chosen inside is forgotten on leaving, so that training tunes for itself. Without Triton it does nothing.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    prune = Autotuner.prune_configs
    known: dict[int, tuple[Any, set[Any]]] = {}

    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        known.setdefault(id(self), (self, set(self.cache)))
        return prune(self, *args, **kwargs)[:_TRIED]

    Autotuner.prune_configs = prune_configs
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
        for tuner, before in known.values():
            for key in set(tuner.cache) - before:
                del tuner.cache[key]
