"""Every parameter that is to be trained gets a gradient: checked before the first optimizer step of a run.

The fused kernels of today's stack read weights raw, so that adapters on x_proj, dt_proj and out_proj get no gradient
and training "works" (peft issues 1612 and 2274). A parameter that does not move is never an acceptable silence here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ssm_tune.sharding import local

# An adapter pair (A, B): while one of the two is all zero - as B is at birth - the other's gradient is zero by the
# chain rule.
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_EXPERT = re.compile(r"^((?:.*\.)?experts)\.\d+\.(.*)$")


@dataclass(frozen=True)
class DeadParameter:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def _find_nonzero(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, bool]:
    """Which tensors have an element that is not zero, on any rank if they are sharded; None has none."""
    found = torch.tensor(
        [tensor is not None and bool(local(tensor.detach()).count_nonzero()) for tensor in tensors.values()],
        dtype=torch.int32,
    )
    meshes = [tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)]
    if meshes:
        found = found.to(meshes[0].device_type)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(tensors, map(bool, found.tolist()), strict=True))


def _partner(name: str) -> str | None:
    for a, b in _PAIRS:
        parts = name.split(".")
        if a in parts:
            return ".".join(b if part == a else part for part in parts)
        if b in parts:
            return ".".join(a if part == b else part for part in parts)
    return None


def dead_parameters(model: nn.Module) -> list[DeadParameter]:
    """Trainable parameters without a gradient, after backward and before the optimizer's step.

    Not counted: one half of an adapter pair whose other half is all zero (and itself has a gradient); an expert when
    another expert of the same layer has a gradient, since this one received no token.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    alive = _find_nonzero({name: parameter.grad for name, parameter in trainable.items()})
    partners = [name for name in trainable if _partner(name) in trainable]
    nonzero = _find_nonzero({name: trainable[name] for name in partners})
    busy = {match.groups() for name in trainable if alive[name] and (match := _EXPERT.match(name))}
    dead = []
    for name, parameter in trainable.items():
        if alive[name]:
            continue
        partner = _partner(name)
        if partner in trainable and alive[partner] and not nonzero[partner]:
            continue
        expert = _EXPERT.match(name)
        if expert and expert.groups() in busy:
            continue
        reason = "no gradient: the forward pass does not use it" if parameter.grad is None else "its gradient is zero"
        dead.append(DeadParameter(name, reason))
    return dead
