"""Losses and gradients of several processes against one process on the same global batches, in float32, on the CPU.

    python benchmarks/processes.py [--processes 1 2 4] [--kind mamba2]

Every run takes the same steps: rows of uneven length, two micro-batches a step, gradients clipped, an epoch whose last
step is not full, and a second epoch. The truth is one process without sharding. Printed is the largest relative
difference over all steps: of the loss, and over all parameters of the gradient as the optimizer gets it, before
clipping (the first step's, where the weights are the same to the bit; and the last step's). Exit code 1 if a loss
differs by more than 1e-6 or a first gradient by more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROWS, BATCH, ACCUMULATION, STEPS = 22, 4, 2, 5  # 8 rows a step: 3 steps an epoch, the third of 6 rows
METHODS = ("full", "LoRA", "packed")
LOSS, GRADIENT = 1e-6, 1e-5


def modes(processes: int) -> list[str]:
    """What a run of so many processes is tried in; one process unsharded is the truth."""
    return ["fsdp2"] if processes == 1 else ["ddp", "fsdp2", *(["hsdp"] if processes > 2 else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kind", default="mamba2", help="mamba, mamba2, zamba2, ...: a tiny random model")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.kind)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for count in sorted({1, *arguments.processes}):
            start(count, Path(folder), arguments.kind)
        return report(Path(folder), arguments)


def start(count: int, folder: Path, kind: str) -> None:
    """All runs of this many processes, in one process group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [__file__, "--worker", str(folder), "--kind", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{count} processes failed:\n{result.stderr[-4000:]}")


def work(folder: Path, kind: str) -> None:
    """In each process: every mode and method, one after the other; rank 0 keeps losses and gradients."""
    torch.set_num_threads(1)
    count = int(os.environ["WORLD_SIZE"])
    for mode in ["alone"] * (count == 1) + modes(count):
        for method in METHODS:
            found = train(folder / f"{mode}-{method}-{count}", mode, method, count, kind)
            if os.environ["RANK"] == "0":
                torch.save(found, folder / f"{mode}-{method}-{count}.pt")


def train(output: Path, mode: str, method: str, count: int, kind: str) -> dict[str, Any]:
    """One run by `tune`, and its losses and gradients."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from tiny import tiny_model, tiny_tokenizer

    from ssm_tune import tune
    from ssm_tune.trainer import SSMTrainer

    os.environ["SSM_TUNE_SHARDED"] = str(mode in ("fsdp2", "hsdp"))
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "2" if mode == "hsdp" else "1"
    gradients: list[dict[str, torch.Tensor]] = []
    clip = SSMTrainer._clip_grad_norm

    def keep(self: SSMTrainer, model: Any) -> Any:
        gradients.append({name: whole(p.grad) for name, p in self.model.named_parameters() if p.requires_grad})
        return clip(self, model)

    SSMTrainer._clip_grad_norm = keep
    letters = "the quick brown fox jumps over the lazy dog, and " * 2
    rows = [{"prompt": f"{n}: ", "completion": letters[n : n + 5 + 7 * n % 40]} for n in range(ROWS)]
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8} if method == "LoRA" else {}
    try:
        run = tune(
            tiny_model(kind),
            rows,
            method="lora" if method == "LoRA" else "full",
            tokenizer=tiny_tokenizer(),
            output_dir=output,
            packing=method == "packed",
            max_length=64 if method == "packed" else 128,
            max_steps=2 if method == "packed" else STEPS,
            per_device_train_batch_size=BATCH // count,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-3,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=3,
            **settings,
        )
    finally:
        SSMTrainer._clip_grad_norm = clip
    lines = (run.output_dir / "metrics.jsonl").read_text().splitlines()
    return {"metrics": lines, "gradients": gradients}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def losses(found: dict[str, Any]) -> list[float]:
    import json

    return [line["loss"] for line in map(json.loads, found["metrics"]) if "loss" in line]


def difference(ours: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> float:
    """The largest over parameters; one whose gradient is a ten-thousandth of the largest is measured by that."""
    floor = 1e-4 * max(float(gradient.norm()) for gradient in true.values())
    if set(ours) != set(true):
        return float("inf")
    return max(float((ours[name] - g).norm()) / max(float(g.norm()), floor) for name, g in true.items())


def report(folder: Path, arguments: argparse.Namespace) -> int:
    print(f"{arguments.kind}, float32; largest relative difference from one unsharded process")
    print(f"{'mode':8}{'method':9}{'processes':>10}{'steps':>7}{'loss':>12}{'gradient':>12}{'last gradient':>15}")
    failed = False
    for count in arguments.processes:
        for mode in modes(count):
            for method in METHODS:
                true = torch.load(folder / f"alone-{method}-1.pt")
                ours = torch.load(folder / f"{mode}-{method}-{count}.pt")
                pairs = list(zip(losses(ours), losses(true), strict=True))
                loss = max(abs(a - b) / b for a, b in pairs)
                first, last = (difference(ours["gradients"][i], true["gradients"][i]) for i in (0, -1))
                bad = loss > LOSS or first > GRADIENT
                failed = failed or bad
                mark = "  too much" if bad else ""
                print(f"{mode:8}{method:9}{count:10}{len(pairs):7}{loss:12.1e}{first:12.1e}{last:15.1e}{mark}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
