"""The optimizer's step on this rank's shards as plain tensors.

torch dispatches every operation on DTensors in Python, one tensor at a time: for 48 blocks tens of milliseconds a step,
in which a GPU waits. The update of a weight needs that weight, its gradient and its state only, so the shards of all
three are handed to the optimizer instead. Between steps parameters and state are DTensors, as checkpoints want them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Have each step of an optimizer that updates elements one by one (not by sums over a tensor) work so."""
    shards = _Shards()
    optimizer.register_step_pre_hook(lambda *_: shards.enter(optimizer))
    optimizer.register_step_post_hook(lambda *_: shards.leave(optimizer))


class _Shards:
    """In the place of sharded parameters, while a step is made: plain ones of the same memory."""

    def __init__(self) -> None:
        self._plain: dict[nn.Parameter, nn.Parameter] = {}  # by the sharded one
        self._groups: list[list[nn.Parameter]] = []
        self._state: Any = None

    @torch.no_grad()
    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [group["params"] for group in optimizer.param_groups]
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [self._give(parameter) for parameter in parameters]
            for parameter, plain in zip(parameters, group["params"], strict=True):
                if parameter in self._state:
                    optimizer.state[plain] = {key: _local(value) for key, value in self._state[parameter].items()}

    @torch.no_grad()
    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        state, optimizer.state = optimizer.state, self._state
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            for parameter, plain in zip(parameters, group["params"], strict=True):
                if plain in state:
                    _update(self._state[parameter], state[plain], parameter)
                if plain is not parameter:
                    plain.grad = None
            group["params"] = parameters
        self._groups, self._state = [], None

    def _give(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        shard, plain = parameter.to_local(), self._plain.get(parameter)
        # Sharded anew, or moved, a parameter has other memory.
        if plain is None or plain.data_ptr() != shard.data_ptr() or plain.shape != shard.shape:
            plain = self._plain[parameter] = nn.Parameter(shard, requires_grad=False)
        plain.grad = None if parameter.grad is None else _local(parameter.grad)
        return plain


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _update(ours: dict[str, Any], theirs: dict[str, Any], parameter: nn.Parameter) -> None:
    """Take over what a step has put in the place of a state's values: its first, mostly; others it changes where they
    lie."""
    for key, value in theirs.items():
        if key not in ours or _local(ours[key]) is not value:
            ours[key] = _like(value, parameter)


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A state's value, sharded as the parameter is if it has the shape of its shard."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.to_local().shape or parameter.ndim == 0:
        return value
    where = {"device_mesh": parameter.device_mesh, "placements": parameter.placements, "run_check": False}
    return DTensor.from_local(value, **where, shape=parameter.shape, stride=parameter.stride())
