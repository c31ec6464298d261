"""Kill -9 of a rank at a random moment, N times in a row: every run ends soon, says which, and resumes to the unbroken
losses.

    python benchmarks/kill_a_rank.py [--times 20] [--processes 2] [--modes fsdp2_cpu ddp] [--seed 0]

On the CPU, a tiny model, by the command line. A round: a run is started, one of its processes is killed after a random
step (and a random part of the next), the launcher has to end within a minute with one message that names the rank, and
the same command with --resume has to finish. The losses of all steps are then compared with those of a run that nobody
killed. Exit code 1 if any round fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, SAVED = 24, 4
RECIPE = f"""\
model: {{architecture: mamba2, dimensions: {{hidden_size: 32, num_hidden_layers: 2, head_dim: 16}}}}
tokenizer: {{train: true, vocab_size: 300}}
data: {{train: [{{path: rows.jsonl}}]}}
kernels: {{self_check: false}}
training:
  {{max_steps: {STEPS}, save_steps: {SAVED}, save_total_limit: 2, logging_steps: 1, learning_rate: 1e-3, max_length: 64,
   per_device_train_batch_size: 2, seed: 1, report_to: none}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["fsdp2_cpu", "ddp"], help="taken in turn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": f"{n} and one is ", "completion": str(n + 1) * (1 + n % 5)} for n in range(30)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "x.yaml").write_text(RECIPE)
        unbroken: dict[str, dict[int, float]] = {}
        for mode in arguments.modes:
            process = start(folder, f"unbroken-{mode}", mode, arguments.processes)
            error = process.communicate()[1]
            if process.returncode:
                sys.exit(f"the unbroken run failed:\n{error}")
            unbroken[mode] = losses(folder / f"unbroken-{mode}")
        print(
            f"{'round':>5} {'mode':10}{'rank':>5}{'step':>5}{'ended':>9}  {'resumed from':14}{'losses differ by':>17}"
        )
        failed = 0
        for number in range(arguments.times):
            mode = arguments.modes[number % len(arguments.modes)]
            failed += not play(folder, number, mode, arguments.processes, chance, unbroken[mode])
        print(f"{arguments.times - failed} of {arguments.times} rounds as they should be")
        return int(failed > 0)


def play(
    folder: Path, number: int, mode: str, processes: int, chance: random.Random, unbroken: dict[int, float]
) -> bool:
    """One round; prints its line, and says whether all was well."""
    output, rank, step = folder / f"run{number}", chance.randrange(processes), chance.randrange(1, STEPS - 1)
    process = start(folder, output.name, mode, processes)
    while process.poll() is None and (not losses(output) or max(losses(output)) < step):
        time.sleep(0.01)
    time.sleep(chance.random() * 0.05)
    victim = next((pid for pid in descendants(process.pid) if rank_of(pid) == rank), None)
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    error = process.communicate(timeout=300)[1]
    seconds = time.monotonic() - killed
    told = [line for line in error.splitlines() if "was ended by SIGKILL" in line]
    checkpoints = sorted(
        output.glob("checkpoints/checkpoint-*/checkpoint.json"), key=lambda file: int(file.parts[-2][11:])
    )
    last = checkpoints[-1].parts[-2] if checkpoints else "-"
    again = start(folder, output.name, mode, processes, "--resume")
    log = again.communicate(timeout=300)[1]
    ours = losses(output)
    differ = max((abs(ours.get(s, 9e9) - loss) / loss for s, loss in unbroken.items()), default=9e9)
    well = (
        victim is not None
        and process.returncode == 137
        and seconds < 60
        and len(told) == 1
        and f"process {rank} " in told[0]
        and "Traceback" not in error
        and again.returncode == 0
        and json.loads((output / "run.json").read_text())["status"] == "complete"
        and differ < 1e-6
    )
    print(
        f"{number:5} {mode:10}{rank:5}{step:5}{seconds:8.1f}s  {last:14}{differ:17.1e}"
        + ("" if well else "  NOT WELL"),
        flush=True,
    )
    if not well:
        print(
            f"codes {process.returncode}, {again.returncode}\n{error[-3000:]}\n--- resumed:\n{log[-3000:]}", flush=True
        )
    return well


def start(folder: Path, output: str, mode: str, processes: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ssm_tune", "sft", "x.yaml", f"training.output_dir={output}", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, "--accelerate", mode, "--processes", str(processes)],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(run: Path) -> dict[int, float]:
    """Loss by step; the last line may be half written."""
    file, found = run / "metrics.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "loss" in entry:
            found[entry["step"]] = entry["loss"]
    return found


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def rank_of(pid: int) -> int | None:
    variables = dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part)
    return int(variables["RANK"]) if "RANK" in variables else None


if __name__ == "__main__":
    sys.exit(main())
