"""Checkpoints of sharded training, by torch.distributed.checkpoint: every process writes its shards and reads what it
needs, so that any number of processes goes on from them, one unsharded process too.

model/ holds what is trained (after LoRA not the base), optimizer/ the optimizer's state by the parameters' names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ssm_tune.peers import current

MODEL, OPTIMIZER = "sharded_model", "sharded_optimizer"
# Frozen weights are read from the base again. Flat: by parameter, since the groups are others without sharding.
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def is_sharded_checkpoint(folder: Path) -> bool:
    return (Path(folder) / MODEL).is_dir()


def save_model(model: nn.Module, folder: Path) -> None:
    """Write the trained weights. All processes call it; raises what any of them met (a full disk)."""
    _save(get_model_state_dict(model, options=_TRAINED), Path(folder) / MODEL)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As `save_model`, of the optimizer's state."""
    with _filled_groups(optimizer):
        _save(get_optimizer_state_dict(model, optimizer, options=_FLAT), Path(folder) / OPTIMIZER)


def load_model(model: nn.Module, folder: Path) -> None:
    """Read the trained weights into a model, sharded (all processes call it) or not."""
    state = get_model_state_dict(model, options=_TRAINED)
    _load(state, Path(folder) / MODEL)
    set_model_state_dict(model, state, options=_TRAINED)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As `load_model`, of the optimizer's state."""
    with _filled_groups(optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        _load(state, Path(folder) / OPTIMIZER)
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path, names: list[str]) -> None:
    """Read an unsharded optimizer's file into the optimizer of a sharded model.

    Args:
        names: of the parameters, in the order in which the unsharded optimizer has them.
    """
    saved = torch.load(file, map_location="cpu", weights_only=True)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, names, strict=True))
    with _filled_groups(optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        for number, values in saved["state"].items():
            for key, value in values.items():
                name = f"state.{by_number[number]}.{key}"
                state[name] = _like(state[name], value)
        for group in saved["param_groups"]:
            for key in group.keys() - {"params"}:
                for number in group["params"]:
                    state[f"param_groups.{by_number[number]}.{key}"] = group[key]
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


@contextmanager
def _filled_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Without its groups of no parameters (LoRA trains nothing that does not decay), which torch trips over."""
    empty = [(index, group) for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for index, group in empty:
            optimizer.param_groups.insert(index, group)


def _like(ours: Any, value: Any) -> Any:
    """`value`, whole on every rank, sharded as `ours` is."""
    if not isinstance(ours, DTensor):
        return value
    value = value.to(ours.device_mesh.device_type, ours.dtype)
    return distribute_tensor(value, ours.device_mesh, ours.placements, src_data_rank=None).to(ours.device)


def _group() -> dist.ProcessGroup | None:
    peers = current()
    return None if peers is None else peers.group


def _save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        try:
            dcp.save(state, checkpoint_id=folder, process_group=_group())
        except CheckpointException as error:  # no Exception; holds what each rank met
            raise next(iter(error.failures.values()))[0] from error


def _load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, process_group=_group())
