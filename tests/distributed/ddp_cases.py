"""`torchrun ddp_cases.py FOLDER`: gradients of a few steps under DDP, blocks recorded in pieces beside launched ones.

On a CPU with what stands in the place of graphs; on a GPU for each process by NCCL, on one for all by gloo. Each
process writes FOLDER/found-RANK.json: the largest relative difference of a gradient, and how many pieces were played.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist
from cpu_graphs import Recorder
from tiny import tiny_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ssm_tune.mixers import layer_graphs, patch_model
from ssm_tune.mixers.recorded_blocks import RecordedBlocks

STEPS, BLOCKS, LENGTH = 4, 3, 48
RANK, COUNT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def micro_batch(step: int, number: int, device: torch.device) -> dict[str, Tensor]:
    """Rank 1 meets another shape first: it records a micro-batch after rank 0."""
    length = LENGTH - 8 if RANK == 1 and step == number == 0 else LENGTH
    generator = torch.Generator().manual_seed(100 * RANK + 10 * step + number)
    ids = torch.randint(3, 60, (1, length), generator=generator).to(device)
    seq_idx = torch.arange(length, dtype=torch.int32, device=device)[None] // (10 + 7 * step)
    return {"input_ids": ids, "labels": ids, "seq_idx": seq_idx}


def gradients(kind: str, device: torch.device, *, recorded: bool) -> list[Tensor]:
    """Of all steps: two micro-batches each, of which the first is not sent, and clipping."""
    torch.manual_seed(0)
    model = patch_model(tiny_model(kind, num_hidden_layers=BLOCKS)).train().to(device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    found = []
    with layer_graphs.layer_graphs(recorded):
        for step in range(STEPS):
            wrapped.zero_grad()
            for number in (0, 1):
                with nullcontext() if number else wrapped.no_sync():
                    wrapped(**micro_batch(step, number, device)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


def main() -> None:
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", RANK % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        Recorder().install(pytest.MonkeyPatch())
    dist.init_process_group("nccl" if gpus >= COUNT else "gloo")
    layer_graphs.starts_of_pieces = lambda blocks: list(range(len(blocks)))
    played = []
    play = RecordedBlocks.play_backward
    RecordedBlocks.play_backward = lambda *given: (played.append(1), play(*given))[1]
    worst = 0.0
    for kind in ("mamba", "mamba2"):
        both = zip(*(gradients(kind, device, recorded=on) for on in (False, True)), strict=True)
        worst = max(worst, *(float((got - plain).norm() / plain.norm()) for plain, got in both))
    (Path(sys.argv[1]) / f"found-{RANK}.json").write_text(json.dumps({"worst": worst, "played": len(played)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
