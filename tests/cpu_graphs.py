"""In the place of CUDA graphs on a CPU: what was recorded is computed anew, into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ssm_tune.mixers import layer_graphs, recorded_blocks


class Recorder:
    """Counts the times that blocks were recorded, their forward played, and graphs made; fails if it is to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.recorded, self.played, self.graphs = failure, 0, 0, 0

    def __call__(self) -> Recorder:
        self.recorded += 1
        if self.failure is not None:
            raise self.failure
        return self

    def capture_parts(self, compute: Callable[[Callable[[], None]], Any]) -> tuple[Any, list[Callable[[], None]]]:
        """The last part computes all."""
        parts: list[Callable[[], None]] = []
        result, play = self.capture(lambda: compute(lambda: None))
        compute(lambda: parts.append(lambda: None))
        return result, [*parts, play]

    def capture(self, compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.graphs += 1
        result = compute()
        is_forward = isinstance(result, Tensor)

        def play() -> None:
            self.played += is_forward
            with torch.enable_grad():
                again = compute()
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if old is not None:
                    old.copy_(new)

        return result, play

    def install(self, patch: pytest.MonkeyPatch) -> Recorder:
        patch.setattr(recorded_blocks, "OneMemory", self)
        patch.setattr(recorded_blocks, "warm_up", lambda compute: compute())
        patch.setattr(layer_graphs, "can_be_recorded", lambda device: True)
        return self
