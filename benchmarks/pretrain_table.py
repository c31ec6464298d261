"""Pretraining on a GPU, by the shipped recipes: a table of architectures, and what long rows and large models need.

    ssm-tune prepare compare-130m data.streaming=false data.prepared=tokens data.train.0.path=rows.jsonl
    python benchmarks/pretrain_table.py --tokens tokens                     (all of it: about 15 minutes on an H200)
    python benchmarks/pretrain_table.py --tokens tokens --only compare      (or: mamba3 memory long large)

compare   seven models of 130M, 200 steps of 16 x 2048 tokens: examples/compare.py on recipes/compare-130m.yaml. A loss
          that ends more than 10 % above the Transformer's is told.
mamba3    our Mamba-3 mixer (SISO) beside mamba_ssm's module with the same weights, bf16: forward and gradients.
memory    pretrain-mamba-130m with 4 rows of 2048: the peak is below 10 GiB.
long      pretrain-128k: full training steps of a 1.4B model on one row of 131,072 tokens.
large     pretrain-mamba-2.8b: full steps below 40 GiB.
Each part is a process of its own with a time limit; a part that fails does not stop the others. Exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("mamba3", "memory", "long", "large", "compare")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True, help="a folder that ssm-tune prepare made")
    parser.add_argument("--output", type=Path, default=Path("runs/pretrain-table"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", help="of compare (default: all)")
    parser.add_argument("--steps", type=int, default=200, help="of compare")
    parser.add_argument("--extra", nargs="*", default=[], metavar="key=value", help="overrides for every recipe")
    arguments = parser.parse_args()
    data = overrides_of(arguments.tokens)
    data += [*arguments.extra, "training.report_to=[]", "training.dataloader_num_workers=2"]
    failed = []
    for part in arguments.only:
        begun = time.perf_counter()
        if part == "mamba3":
            right = call([sys.executable, __file__, "--compare-mamba3"], 120)
        elif part == "compare":
            right = compare(arguments, data)
        else:
            right = measure(part, arguments.output, data)
        print(f"-- {part}: {'done' if right else 'FAILED'} in {time.perf_counter() - begun:.0f} s", flush=True)
        failed += [] if right else [part]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return bool(failed)


def overrides_of(folder: Path) -> list[str]:
    """What makes a recipe read the prepared tokens, whatever they were made of."""
    index = json.loads((folder / "index.json").read_text())
    words = [
        "data.streaming=false",
        f"data.prepared={folder.resolve()}",
        f"tokenizer.name={(folder / 'tokenizer').resolve()}",
    ]
    for kind in ("train", "eval"):
        sources = [mark[1:] for mark in index["sources"] if mark[0] == kind]
        entries = [f'{{path: "{path}", split: "{split}", weight: 1}}' for path, split, _ in sources]
        if kind == "eval":
            entries = [entry.replace(", weight: 1", "") for entry in entries]
        words.append(f"data.{kind}=[{', '.join(entries)}]" if entries else f"data.{kind}=null")
    fraction = float(index["sources"][-1][1])
    return [*words, f"data.eval_fraction={fraction or 'null'}"]


def call(command: list[str], seconds: float) -> bool:
    print(f"$ {' '.join(command[:6])} ...", flush=True)
    try:
        return subprocess.run(command, timeout=seconds, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"longer than {seconds:.0f} seconds", flush=True)
        return False


# -- recipes ---------------------------------------------------------------------------------------------------------

# recipe, settings, the most GiB allowed, seconds allowed
MEASURED: dict[str, tuple[str, list[str], float | None, float]] = {
    "memory": ("pretrain-mamba-130m", ["training.per_device_train_batch_size=4", "training.max_steps=20"], 10, 180),
    "long": ("pretrain-128k", ["training.max_steps=3", "data.isolate=false"], None, 400),
    "large": ("pretrain-mamba-2.8b", ["training.max_steps=4"], 40, 300),
}


def measure(part: str, output: Path, data: list[str]) -> bool:
    """Some full training steps of a shipped recipe: one micro-batch each, no checkpoints."""
    recipe, settings, most, seconds = MEASURED[part]
    run = output / recipe
    plain = [
        "data.batch_tokens=null",
        "training.eval_strategy=no",
        "training.save_strategy=no",
        "training.logging_steps=1",
    ]
    plain += ["training.warmup_steps=1"]
    words = [*data, *plain, *settings, f"training.output_dir={run}"]
    if not call([sys.executable, "-m", "ssm_tune", "pretrain", recipe, *words], seconds):
        return False
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    peak, speed = steps[-1].get("peak_memory_gib", 0.0), steps[-1]["tokens_per_second"]
    losses = ", ".join(f"{line['loss']:.3f}" for line in steps[:2] + steps[-1:])
    print(f"| {recipe} | losses {losses} | {speed:,.0f} tokens/s | peak {peak:.1f} GiB |", flush=True)
    if most is not None and peak > most:
        print(f"{recipe}: {peak:.1f} GiB is more than {most}", flush=True)
        return False
    return True


def compare(arguments: argparse.Namespace, data: list[str]) -> bool:
    output = arguments.output / "compare"
    settings = [f"training.max_steps={arguments.steps}", "data.batch_tokens=null", "training.logging_steps=20"]
    settings += ["training.eval_steps=1000", "training.save_strategy=no", f"training.output_dir={output}"]
    command = [sys.executable, str(ROOT / "examples" / "compare.py"), "compare-130m", *data, *settings]
    command += ["--timeout", "170", *(["--models", *arguments.models] if arguments.models else [])]
    right = call(command, 1500)
    losses = last_losses(output)
    baseline = losses.get("transformer")
    for name, loss in losses.items():
        if baseline is not None and loss > 1.1 * baseline:
            print(f"{name}: loss {loss:.3f} is more than 10 % above the Transformer's {baseline:.3f}", flush=True)
            right = False
    return right


def last_losses(output: Path) -> dict[str, float]:
    """By model, the last loss in output/MODEL/metrics.jsonl. Runs that have logged none are told and left out."""
    losses: dict[str, float] = {}
    for metrics in sorted(output.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        found = [line["loss"] for line in lines if "loss" in line]
        if found:
            losses[metrics.parent.name] = found[-1]
        else:
            print(f"{metrics.parent.name}: no loss in {metrics} yet; it is left out of the comparison", flush=True)
    return losses


# -- Mamba-3 beside mamba_ssm's module -------------------------------------------------------------------------------


def compare_mamba3(device: str = "cuda", length: int = 512) -> int:
    """Our SISO mixer and mamba_ssm's module, same weights, bf16: at most 2e-2 of the largest value apart."""
    import torch
    from mamba_ssm.modules.mamba3 import Mamba3

    from ssm_tune.architectures.configs import Mamba3Config
    from ssm_tune.architectures.mamba3 import Mamba3Model

    torch.manual_seed(0)
    config = Mamba3Config(hidden_size=768, num_hidden_layers=1, pattern="M", vocab_size=64)
    ours = Mamba3Model(config).layers[0].mixer.to(device)
    theirs = Mamba3(768, d_state=config.state_size, headdim=config.mamba_head_dim, device=device, dtype=torch.float32)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, length, 768, device=device)
    weight = torch.randn(2, length, 768, device=device)

    def run(module: Any) -> dict[str, Any]:
        u = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = module(u)
        names = [name for name, _ in module.named_parameters()]
        found = torch.autograd.grad((y.float() * weight).sum(), [u, *module.parameters()])
        return {"output": y, "input": found[0], **dict(zip(names, found[1:], strict=True))}

    mine, other = run(ours), run(theirs)
    worst = 0.0
    print("| Mamba-3 SISO, bf16 | largest difference / largest value |\n| --- | --- |")
    for name, expected in other.items():
        difference = ((mine[name].float() - expected.float()).abs().max() / expected.float().abs().max()).item()
        worst = max(worst, difference)
        print(f"| {name if name == 'output' else 'gradient of ' + name} | {difference:.1e} |")
    return int(worst > 2e-2)


if __name__ == "__main__":
    sys.exit(compare_mamba3() if sys.argv[1:] == ["--compare-mamba3"] else main())
