"""Cases that run in the processes of one group: `torchrun --nproc-per-node 2 sharded_cases.py FOLDER`.

Each process holds the whole model too and computes the truth itself: loss and gradients of the whole batch, unsharded.
What differs is written to FOLDER/found.json, one entry a case, which the test reads.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from sharded_models import (
    CPU,
    NAMES,
    ONE_BY_ONE,
    PAIRS,
    adapted,
    backward,
    compare,
    dist_folder,
    five_blocks,
    gradients,
    make_model,
    make_rows,
    worst,
)
from sharded_training import moving, recorded, stepping
from tiny import tiny_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ssm_tune.gradient_check import dead_parameters
from ssm_tune.peers import join
from ssm_tune.recipe import RecipeError
from ssm_tune.sharding import (
    Sharding,
    average_replicated,
    clip_gradients,
    gather_state,
    replicated,
    shard_model,
)


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
    "recorded full": lambda: recorded(five_blocks()),
    "recorded lora": lambda: recorded(adapted(five_blocks())),
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
