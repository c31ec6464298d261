"""Models, rows, losses and gradients of the cases of sharded training (`sharded_cases.py`)."""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from finished import stir
from tiny import KINDS, tiny_model
from torch import nn
from torch.distributed.tensor import DTensor

from ssm_tune.adapter import apply_adapter
from ssm_tune.mixers import patch_model
from ssm_tune.model import init_model
from ssm_tune.recipe import AdapterSection, ModelSection
from ssm_tune.sharding import Sharding, average_replicated, replicated, shard_model

CPU = torch.device("cpu")
OWN = {
    "mamba3": {"architecture": "mamba3", "dimensions": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}},
    "h3": {"architecture": "h3", "dimensions": {"hidden_size": 32, "num_hidden_layers": 2}},
    "samba": {
        "architecture": "samba",
        "dimensions": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48},
    },
}
SWITCHES: dict[str, dict[str, Any]] = {
    "zamba2, two shared blocks": {"num_mem_blocks": 2, "num_hidden_layers": 6, "layers_block_type": ["hybrid"] * 6},
    "granitemoehybrid, experts": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
NAMES = (*KINDS, *SWITCHES, *OWN)
ONE_BY_ONE, PAIRS = Sharding(unit_bytes=1), Sharding(unit_bytes=80_000)  # blocks of `five_blocks` in a unit


def make_model(name: str, **changes: Any) -> Any:
    if name in OWN:
        with torch.random.fork_rng(devices=[]):
            return init_model(ModelSection(**OWN[name]), 300, seed=0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = patch_model(tiny_model(name.partition(",")[0], **{**SWITCHES.get(name, {}), **changes}))
    return model.train().requires_grad_(True)


def five_blocks() -> Any:
    return make_model("mamba", num_hidden_layers=5)


def adapted(model: Any, **keys: Any) -> Any:
    model = apply_adapter(model, AdapterSection(**{"r": 4, "targets": "all", **keys}), seed=0)
    stir(model)
    return model


def make_rows() -> torch.Tensor:
    return torch.randint(3, 290, (4, 24), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mean over `rows`; rows are equally long, so that the mean of the ranks' means is the mean of all."""
    model.train()
    logits = model(input_ids=rows, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def backward(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, rows)
    loss.backward()
    return loss.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).float().clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    largest = max(tensor.norm() for tensor in theirs.values())
    return max(float((ours[n] - g).norm() / g.norm().clamp(min=1e-4 * largest)) for n, g in theirs.items())


def compare(model: Any, sharding: Sharding | None = None, *, bf16: bool = False, checkpointing: bool = False) -> Any:
    """Relative differences of loss and gradients, sharded on half the rows each, from unsharded on all."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    reference, rows = copy.deepcopy(model), make_rows()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected = backward(reference, rows)
    shard_model(model, sharding or Sharding(), CPU, bf16=bf16)
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = backward(model, mine)
    average_replicated(replicated(model))
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    return {"loss": float(abs(loss - expected) / expected), "gradients": worst(gradients(model), gradients(reference))}


def dist_folder() -> str:
    """A fresh folder that all ranks know."""
    box = [tempfile.mkdtemp(dir=sys.argv[1]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]
