"""Cases of several steps: optimizers, checkpoints, recorded blocks (`sharded_cases.py`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_graphs import Recorder
from sharded_models import CPU, PAIRS, adapted, backward, dist_folder, gradients, make_model, make_rows, whole, worst
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ssm_tune.mixers.layer_graphs import layer_graphs
from ssm_tune.sharded_checkpoints import load_model, load_optimizer, load_whole_optimizer, save_model, save_optimizer
from ssm_tune.sharded_optimizer import step_on_shards
from ssm_tune.sharding import Sharding, average_replicated, gather_state, replicated, shard_model, split_groups


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, sharded: bool) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        rows = make_rows()
        loss = backward(model, rows.chunk(2)[dist.get_rank()] if sharded else rows)
        if sharded:
            average_replicated(replicated(model))
            dist.all_reduce(loss)
            loss /= 2
        losses.append(float(loss))
        optimizer.step()
    return losses


def adam(model: nn.Module, *, sharded: bool) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = [p for p in trained if p.ndim < 2]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}, {"params": flat}, {"params": []}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0, fused=True)
    if sharded:
        split_groups(optimizer)
        step_on_shards(optimizer)
    return optimizer


def stepping(kind: type[torch.optim.Optimizer], **keys: Any) -> Any:
    """Three steps of an optimizer on DTensors and on their shards: where weights or state differ, or what kind they
    are. One parameter gets its first gradient in the second step."""
    kept = []
    for on_shards in (False, True):
        model = make_model("mamba")
        shard_model(model, Sharding(), CPU, bf16=False)
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **keys)
        split_groups(optimizer)
        if on_shards:
            step_on_shards(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, make_rows().chunk(2)[dist.get_rank()])
            average_replicated(replicated(model))
            if step == 0:
                model.get_input_embeddings().weight.grad = None
            optimizer.step()
        kept.append((dict(model.named_parameters()), get_optimizer_state_dict(model, optimizer)["state"]))
    (weights, state), (other_weights, other_state) = kept
    flat = [
        {f"{name} {key}": value for name, of in tree.items() for key, value in of.items()}
        for tree in (state, other_state)
    ]
    pairs = [(name, value, other_weights[name]) for name, value in weights.items()]
    pairs += [(name, value, flat[1][name]) for name, value in flat[0].items()]
    differing = [name for name, a, b in pairs if type(a) is not type(b) or not torch.equal(whole(a), whole(b))]
    sharded = sum(isinstance(value, DTensor) for value in flat[1].values())
    return {"differing": differing, "same names": flat[0].keys() == flat[1].keys(), "sharded": sharded}


def order(model: nn.Module) -> list[str]:
    trained = [(n, p.ndim < 2) for n, p in model.named_parameters() if p.requires_grad]
    return [n for n, _ in sorted(trained, key=lambda pair: pair[1])]


def moving(lora: bool) -> Any:
    """Four steps unbroken; and two, a checkpoint, two more: from shards to shards, to one process, and the way back."""
    make = (lambda: adapted(make_model("mamba"), train_also=["A_log", "D"])) if lora else (lambda: make_model("mamba"))
    folder = Path(dist_folder())
    plain = make()
    unbroken = train(plain, adam(plain, sharded=False), 4, sharded=False)[2:]
    one = make()
    one_adam = adam(one, sharded=False)
    train(one, one_adam, 2, sharded=False)
    one_adam.zero_grad()
    if dist.get_rank() == 0:
        torch.save(one_adam.state_dict(), folder / "optimizer.pt")
    dist.barrier()
    found = {}
    first = make()
    shard_model(first, Sharding(), CPU, bf16=False)
    first_adam = adam(first, sharded=True)
    train(first, first_adam, 2, sharded=True)
    save_model(first, folder)
    save_optimizer(first, first_adam, folder)
    for name in ("shards", "alone", "whole to shards"):
        again, sharded = (one if name == "whole to shards" else make()), name != "alone"
        if sharded:
            shard_model(again, Sharding(), CPU, bf16=False)
        again_adam = adam(again, sharded=sharded)
        if name == "whole to shards":
            load_whole_optimizer(again, again_adam, folder / "optimizer.pt", order(again))
        else:
            load_model(again, folder)
            load_optimizer(again, again_adam, folder)
        losses = train(again, again_adam, 2, sharded=sharded)
        found[name] = max(abs(a - b) / b for a, b in zip(losses, unbroken, strict=True))
    state = gather_state(first, trained_only=lora)
    trained = {n: whole(p) for n, p in first.named_parameters() if p.requires_grad}
    same = all(torch.equal(state[n], p) for n, p in trained.items()) if dist.get_rank() == 0 else not state
    return {**found, "gathered": same}


def recorded(model: Any) -> Any:
    """Four batches: of the last, whose blocks are played from what was recorded of the second, the differences of loss
    and gradients from unsharded; how often forward was played, and whether gathered weights moved in memory."""
    reference, places = copy.deepcopy(model), []
    shard_model(model, PAIRS, CPU, bf16=False)
    units = {id(fully_shard.state(module)): module for module in model.modules() if isinstance(module, FSDPModule)}
    units.pop(id(fully_shard.state(model)))
    with pytest.MonkeyPatch.context() as patch, layer_graphs():
        recorder = Recorder().install(patch)
        for batch in range(4):
            rows = make_rows() + batch
            for parameter in model.parameters():
                parameter.grad = None
            loss = backward(model, rows.chunk(2)[dist.get_rank()])
            for unit in units.values():
                unit.unshard()
            places.append([p.data_ptr() for unit in units.values() for p in unit.parameters()])
            for unit in units.values():
                unit.reshard()
    expected = backward(reference, rows)
    average_replicated(replicated(model))
    dist.all_reduce(loss)
    return {
        "loss": float(abs(loss / 2 - expected) / expected),
        "gradients": worst(gradients(model), gradients(reference)),
        "played": recorder.played,
        "moved": places[2] != places[3],
    }
