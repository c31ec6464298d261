"""DDP and FSDP2 over NCCL beside one GPU: losses, speed, memory, checkpoints. Random weights of published shapes.

    python benchmarks/two_gpus.py                  two GPUs (issue's table): about 12 minutes
    python benchmarks/two_gpus.py --plan one-gpu   one GPU: the fsdp2 path beside the plain one, small shapes, 2 minutes
    python benchmarks/two_gpus.py --tiny           the same code on the CPU by gloo, tiny shapes

Every run of a kind and method takes the same global batches of packed rows (bf16 compute, AdamW; full fine-tuning with
float32 masters, LoRA r 16 on a bfloat16 base). Per GPU the micro-batch is the same; one GPU takes twice as many. Blocks
are recorded in CUDA graphs where a recipe that leaves kernels.graphs open would have it.
Printed: the largest relative difference of the losses (means of two steps) from one GPU, tokens/s per GPU (median of
the steps after the fourth) and against one GPU, peak memory, seconds to write a checkpoint, and, from it, seconds until
one GPU has taken its next step, with the difference of the losses from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from two_gpus_jobs import Job, plan_one, plan_two
from two_gpus_worker import work


def execute(
    jobs: list[Job], folder: Path, use_cpu: bool, limit: float, options: list[str], *, together: bool = False
) -> None:
    """Each (kind, processes) in processes of its own, which end with it; checkpoints are deleted when read.

    together: all in one process, which spares starting it.
    """
    if together:
        launch(jobs, folder, use_cpu, limit, options)
        return
    groups: dict[tuple[str, bool, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.kind, bool(job.resume), job.processes), []).append(job)
    kinds = list(dict.fromkeys(job.kind for job in jobs))
    for key in sorted(groups, key=lambda key: (kinds.index(key[0]), *key[1:])):
        launch(groups[key], folder, use_cpu, limit, options)
        last = not any(job.kind == key[0] and job.resume for job in jobs) or key[1]
        for path in folder.glob(f"{key[0]}-*/checkpoints") if last else []:
            shutil.rmtree(path)


def launch(jobs: list[Job], folder: Path, use_cpu: bool, limit: float, options: list[str]) -> None:
    count = jobs[0].processes
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_CACHE_AUTOTUNING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    environment["CUDA_VISIBLE_DEVICES"] = "" if use_cpu else ",".join(visible)
    starter = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *starter, __file__, "--worker", str(folder), *options]
    command += ["--tiny"] if use_cpu else []
    # In a group of its own: what hangs is ended with all its processes.
    process = subprocess.Popen(
        [*command, "--jobs", json.dumps([asdict(job) for job in jobs])], env=environment, start_new_session=True
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = f"more than {limit:.0f} s"
    if code:
        print(f"FAILED ({code}): {', '.join(job.name for job in jobs)}", flush=True)


def report(jobs: list[Job], folder: Path) -> int:
    found = {job.name: json.loads((folder / f"{job.name}.json").read_text()) for job in jobs if exists(job, folder)}
    head = (
        "kind",
        "method",
        "mode",
        "GPUs",
        "losses",
        "tok/s/GPU",
        "of one",
        "peak GiB",
        "save s",
        "resume s",
        "after",
    )
    print(" ".join(f"{word:>{width}}" for word, width in zip(head, COLUMNS, strict=True)))
    failed = 0
    for job in jobs:
        if job.resume:
            continue
        ours = found.get(job.name)
        failed += ours is None or "error" in ours
        line = [job.kind, job.method, job.mode, job.processes]
        if ours is None or "error" in ours:
            print(
                " ".join(f"{v!s:>{w}}" for v, w in zip(line, COLUMNS, strict=False)),
                "failed",
                (ours or {}).get("error", ""),
            )
            continue
        one = found.get(Job(**{**asdict(job), "mode": "alone", "processes": 1, "save_at": 0}).name)
        resumed = found.get(Job(**{**asdict(job), "mode": "alone", "processes": 1, "resume": job.mode}).name)
        line += [differ(ours, one), f"{ours['tokens'] / job.processes:,.0f}"]
        line += [f"{ours['tokens'] / job.processes / one['tokens']:.2f}" if one and "error" not in one else "-"]
        line += [f"{ours['peak']:.1f}", f"{ours['save']:.1f}" if "save" in ours else "-"]
        line += [f"{resumed['resume']:.1f}" if resumed and "resume" in resumed else "-", differ(resumed, ours)]
        print(" ".join(f"{value!s:>{width}}" for value, width in zip(line, COLUMNS, strict=True)))
    return failed


GRAPHS = {"auto": None, "on": True, "off": False}
COLUMNS = (13, 7, 6, 5, 9, 10, 7, 9, 7, 9, 9)


def exists(job: Job, folder: Path) -> bool:
    return (folder / f"{job.name}.json").exists()


def differ(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """The largest relative difference of the losses of the steps that both took."""
    if not ours or not other or ours is other or "losses" not in ours or "losses" not in other:
        return "-"
    both = ours["losses"].keys() & other["losses"].keys()
    return f"{max(abs(ours['losses'][s] - other['losses'][s]) / other['losses'][s] for s in both):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("two-gpus", "one-gpu"), default="two-gpus")
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--limit", type=float, default=400, help="seconds for the runs of one kind on as many GPUs")
    parser.add_argument("--output", type=Path, help="keep the figures here, one JSON file a run")
    parser.add_argument("--graphs", choices=GRAPHS, default="auto", help="not with checkpointing or offloading")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="STEP", help="a step of rank 0, as text into --output"
    )
    parser.add_argument("--modes", nargs="+", help="only these: alone, ddp, fsdp2")
    parser.add_argument("--methods", nargs="+", help="only these: full, LoRA")
    parser.add_argument("--speed", action="store_true", help="no checkpoints")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        jobs = [Job(**job) for job in json.loads(arguments.jobs)]
        work(jobs, arguments.worker, arguments.tiny, GRAPHS[arguments.graphs], arguments.profile)
        return 0
    jobs = (plan_one if arguments.plan == "one-gpu" else plan_two)(arguments.tiny)
    wanted = {"kind": arguments.kinds, "mode": arguments.modes, "method": arguments.methods}
    for name, values in wanted.items():
        jobs = [job for job in jobs if values is None or getattr(job, name) in values]
    if arguments.speed:
        jobs = [replace(job, save_at=0) for job in jobs if not job.resume]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        together = arguments.plan == "one-gpu"
        options = ["--graphs", arguments.graphs, "--profile", str(arguments.profile)]
        execute(jobs, folder, arguments.tiny, arguments.limit, options, together=together)
        return report(jobs, folder)


if __name__ == "__main__":
    sys.exit(main())
