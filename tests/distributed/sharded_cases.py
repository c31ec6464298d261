"""Cases that run in the processes of one group: `torchrun --nproc-per-node 2 sharded_cases.py FOLDER`.

Each process holds the whole model too and computes the truth itself: loss and gradients of the whole batch, unsharded.
What differs is written to FOLDER/found.json, one entry a case, which the test reads.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from finished import stir
from tiny import KINDS, tiny_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ssm_tune.adapter import apply_adapter
from ssm_tune.gradient_check import dead_parameters
from ssm_tune.mixers import patch_model
from ssm_tune.model import init_model
from ssm_tune.peers import join
from ssm_tune.recipe import AdapterSection, ModelSection, RecipeError
from ssm_tune.sharded_checkpoints import load_model, load_optimizer, load_whole_optimizer, save_model, save_optimizer
from ssm_tune.sharded_optimizer import step_on_shards
from ssm_tune.sharding import (
    Sharding,
    average_replicated,
    clip_gradients,
    gather_state,
    replicated,
    shard_model,
    split_groups,
)

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


# -- cases ----------------------------------------------------------------------------------------------------------


def wrapping(model: Any, sharding: Sharding) -> Any:
    """Units of FSDP2, each by the classes of its modules, and which parameters stayed whole."""
    shard_model(model, sharding, CPU, bf16=False)
    units: dict[int, list[str]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = fully_shard.state(module)
            units.setdefault(id(state), []).append(type(module).__name__.removeprefix("FSDP"))
    kept = {n.rpartition(".")[2] for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    return {"units": sorted(units.values()), "kept": sorted(kept)}


def rounding(model: Any) -> Any:
    """How far bfloat16 gradients are from float32 ones: sharded, and unsharded under autocast as one process trains."""
    truth, autocast = copy.deepcopy(model).float(), copy.deepcopy(model)
    backward(truth, make_rows())
    with torch.autocast("cpu", torch.bfloat16):
        backward(autocast, make_rows())
    shard_model(model, Sharding(), CPU, bf16=True)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, make_rows().chunk(dist.get_world_size())[dist.get_rank()])
    average_replicated(replicated(model))
    true = gradients(truth)
    ssm = [name for name in true if name.endswith(("A_log", ".D", "dt_bias"))]
    found = {}
    for label, ours in (("sharded", gradients(model)), ("autocast", gradients(autocast))):
        found[label] = _distance(ours, true, list(true))
        found[f"{label}, recurrence"] = _distance(ours, true, ssm)
    return found


def _distance(ours: dict[str, torch.Tensor], true: dict[str, torch.Tensor], names: list[str]) -> float:
    squares = sum(float((ours[n] - true[n]).square().sum()) for n in names)
    return (squares / sum(float(true[n].square().sum()) for n in names)) ** 0.5


def precision() -> Any:
    """In bfloat16: what flows between blocks, what the parameters and gradients are in a block, and the masters."""
    seen: dict[str, str] = {}
    model = make_model("bamba")
    block = model.model.layers[1 - 1]
    block.register_forward_pre_hook(lambda m, a, k: seen.update(stream=str(a[0].dtype)), with_kwargs=True)
    block.mamba.in_proj.register_forward_hook(
        lambda m, a, out: seen.update(projection=str(m.weight.dtype), out=str(out.dtype))
    )
    block.mamba.register_forward_pre_hook(lambda m, a, k: seen.update(A_log=str(m.A_log.dtype)), with_kwargs=True)
    shard_model(model, Sharding(), CPU, bf16=True)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, make_rows()[:2])
    masters = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
    return {**seen, "masters": sorted(masters)}


def clipping() -> Any:
    """The norm and the clipped gradients, against torch's on the unsharded model."""
    model, rows = make_model("mamba"), make_rows()
    reference = copy.deepcopy(model)
    backward(reference, rows)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    shard_model(model, Sharding(), CPU, bf16=False)
    backward(model, rows.chunk(2)[dist.get_rank()])
    average_replicated(replicated(model))
    norm = clip_gradients(model, 0.1, CPU)
    return {
        "norm": float(abs(norm - expected) / expected),
        "gradients": worst(gradients(model), gradients(reference)),
        "clipped": float(expected) > 0.2,
    }


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


def quantised(storage: torch.dtype) -> Any:
    """QLoRA: packed weights stored as floats are sharded (what a GPU gets), those stored as bytes stay whole."""
    from unittest.mock import patch

    from ssm_tune import quantization
    from ssm_tune.model import load_model as load

    folder = dist_folder()
    if dist.get_rank() == 0:
        tiny_model("mamba2", hidden_size=64, num_heads=8).save_pretrained(folder)
    dist.barrier()
    config = quantization.quantization_config

    def stored(*arguments: Any, **keys: Any) -> Any:
        made = config(*arguments, **keys)
        made.bnb_4bit_quant_storage = storage
        return made

    with patch("ssm_tune.model.quantization_config", stored):
        model = load(folder, dtype="float32", load_in_4bit=True, trainable="adapter")
        twin = load(folder, dtype="float32", load_in_4bit=True, trainable="adapter")
    model, twin, rows = adapted(model), adapted(twin), make_rows()
    expected = backward(twin, rows)
    packed = [n for n, p in model.named_parameters() if hasattr(p, "quant_state")]
    shard_model(model, Sharding(), CPU, bf16=False)
    sharded = {n for n, p in model.named_parameters() if isinstance(p, DTensor)}
    loss = backward(model, rows.chunk(2)[dist.get_rank()])
    average_replicated(replicated(model))
    dist.all_reduce(loss)
    return {
        "packed": len(packed),
        "sharded": len(sharded.intersection(packed)),
        "loss": float(abs(loss / 2 - expected) / expected),
        "gradients": worst(gradients(model), gradients(twin)),
    }


def dist_folder() -> str:
    """A fresh folder that all ranks know."""
    box = [tempfile.mkdtemp(dir=sys.argv[1]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def dead() -> Any:
    """A parameter that the forward pass does not use is found, and those of one rank's rows are not."""
    model = make_model("mamba2")
    model.backbone.layers[0].register_parameter("unused", nn.Parameter(torch.ones(4)))
    shard_model(model, Sharding(), CPU, bf16=False)
    backward(model, make_rows()[:2])
    return [str(parameter) for parameter in dead_parameters(model)]


def shared_names(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names that stand for one tensor, together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def tied() -> Any:
    """Names that share a weight before sharding, and in what is gathered to be saved."""
    model = make_model("zamba2")
    before = shared_names(model.state_dict())
    shard_model(model, Sharding(), CPU, bf16=False)
    return [before, shared_names(gather_state(model, trained_only=False))]


def uneven_replicas() -> Any:
    try:
        shard_model(make_model("mamba"), Sharding(replicas=3), CPU, bf16=False)
    except RecipeError as error:
        return str(error)
    return "accepted"


CASES: dict[str, Callable[[], Any]] = {
    **{f"full {name}": (lambda name=name: compare(make_model(name))) for name in NAMES},
    **{f"lora {name}": (lambda name=name: compare(adapted(make_model(name)))) for name in ("mamba", "zamba2", "jamba")},
    **{
        f"checkpointing {name}": (lambda name=name: compare(make_model(name), checkpointing=True))
        for name in ("mamba", "zamba2", "bamba")
    },
    "units": lambda: compare(five_blocks(), PAIRS),
    "units, one by one": lambda: compare(make_model("zamba2"), ONE_BY_ONE),
    "units, lora": lambda: compare(adapted(five_blocks()), PAIRS),
    "units, checkpointing": lambda: compare(five_blocks(), PAIRS, checkpointing=True),
    "offload": lambda: compare(make_model("mamba"), Sharding(offload=True)),
    "kept whole": lambda: compare(make_model("falcon_mamba"), Sharding(reshard=False)),
    "replicas": lambda: compare(make_model("mamba2"), Sharding(replicas=2)),
    "train_also": lambda: compare(adapted(make_model("mamba"), train_also=["A_log", "D", "dt_bias", "conv1d"])),
    **{f"bf16 {name}": (lambda name=name: rounding(make_model(name))) for name in ("mamba", "mamba2", "bamba")},
    "bf16 lora": lambda: compare(adapted(make_model("mamba2").bfloat16()), bf16=True),
    "wrapping zamba": lambda: wrapping(make_model("zamba"), Sharding()),
    "wrapping jamba": lambda: wrapping(make_model("jamba"), ONE_BY_ONE),
    "wrapping one": lambda: wrapping(five_blocks(), Sharding()),
    "wrapping pairs": lambda: wrapping(five_blocks(), PAIRS),
    "wrapping one by one": lambda: wrapping(five_blocks(), ONE_BY_ONE),
    "precision": precision,
    "clipping": clipping,
    "stepping fused": lambda: stepping(torch.optim.AdamW, fused=True),
    "stepping adamw": lambda: stepping(torch.optim.AdamW),
    "stepping rmsprop": lambda: stepping(torch.optim.RMSprop, momentum=0.9),
    "stepping adagrad": lambda: stepping(torch.optim.Adagrad),
    "stepping sgd": lambda: stepping(torch.optim.SGD, momentum=0.9),
    "moving full": lambda: moving(lora=False),
    "moving lora": lambda: moving(lora=True),
    "qlora floats": lambda: quantised(torch.float32),
    "qlora bytes": lambda: quantised(torch.uint8),
    "dead": dead,
    "tied": tied,
    "uneven replicas": uneven_replicas,
}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    join({}, alone=True)
    wanted = os.environ.get("CASES", "").split(";") if os.environ.get("CASES") else list(CASES)
    found: dict[str, Any] = {}
    for name in wanted:
        torch.manual_seed(0)
        try:
            found[name] = CASES[name]()
        except Exception as error:  # noqa: BLE001 the other cases are to run too
            found[name] = f"{type(error).__name__}: {error}"
            if dist.get_rank() == 0:
                traceback.print_exc()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found[name])
        found[name] = gathered
    if dist.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
