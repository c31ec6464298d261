"""Every parameter that is to be trained gets a gradient: checked before the first optimizer step of a run.

The fused kernels of today's stack read weights raw, so that adapters on x_proj, dt_proj and out_proj get no gradient
and training "works" (peft issues 1612 and 2274). A parameter that does not move is never an acceptable silence here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

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


def _is_zero(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero; of a sharded tensor, on all ranks (a norm is reduced over them)."""
    norm = torch.linalg.vector_norm(tensor.detach().float())
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return not bool(norm)


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
    alive = {name: parameter.grad is not None and not _is_zero(parameter.grad) for name, parameter in trainable.items()}
    busy = {match.groups() for name in trainable if alive[name] and (match := _EXPERT.match(name))}
    dead = []
    for name, parameter in trainable.items():
        if alive[name]:
            continue
        partner = _partner(name)
        if partner in trainable and alive[partner] and _is_zero(trainable[partner]):
            continue
        expert = _EXPERT.match(name)
        if expert and expert.groups() in busy:
            continue
        reason = "no gradient: the forward pass does not use it" if parameter.grad is None else "its gradient is zero"
        dead.append(DeadParameter(name, reason))
    return dead
