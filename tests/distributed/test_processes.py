"""Several real processes by the command line: launchers, faults, signals, long evaluations (slow: each starts Python).

Faults are put in by `faulty`, which stands in the place of `ssm_tune`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ssm_tune.shipped import shipped

pytestmark = pytest.mark.slow
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
RECIPE = """\
model: {architecture: mamba2, dimensions: {hidden_size: 32, num_hidden_layers: 2, head_dim: 16}}
tokenizer: {train: true, vocab_size: 300}
data: {train: [{path: rows.jsonl}]}
kernels: {self_check: false}
training: {max_steps: 8, save_steps: 3, logging_steps: 1, learning_rate: 1e-3, max_length: 64, seed: 1, report_to: none,
  per_device_train_batch_size: 2, output_dir: run}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n} and one is ", "completion": str(n + 1) * (1 + n % 5)} for n in range(14)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "x.yaml").write_text(RECIPE)
    return tmp_path


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, cwd=folder, env={**known, **environment}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(folder: Path, *command: str, code: int = 0, **environment: str) -> str:
    process = start(folder, *command, **environment)
    error = process.communicate(timeout=280)[1]
    assert process.returncode == code, error
    return error


def losses(run: Path) -> list[float]:
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def status(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["status"]


def test_launchers(folder: Path) -> None:
    """torchrun, accelerate launch and two launchers of one process each: the losses of one process on the same rows."""
    tune = ("-m", "ssm_tune", "sft", "x.yaml")
    run(folder, sys.executable, *tune, "training.output_dir=one", "training.per_device_train_batch_size=4")
    expected = pytest.approx(losses(folder / "one"), rel=1e-6)
    assert len(losses(folder / "one")) == 8

    log = run(folder, *TORCHRUN, "--standalone", *tune, "training.output_dir=torchrun", "--accelerate", "fsdp2_cpu")
    assert losses(folder / "torchrun") == expected
    assert "sharded by blocks (FSDP2)" in log
    assert log.count("step 8/8") == 1  # one rank speaks
    shards = folder / "torchrun/checkpoints/checkpoint-6/sharded_model"
    assert {file.name for file in shards.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert (folder / "torchrun/model.safetensors").stat().st_size > 100_000  # whole at the end

    config = str(shipped("accelerate_configs", "fsdp2_cpu.yaml"))
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config)
    log = run(folder, *accelerate, *tune, "training.output_dir=accelerate")
    assert losses(folder / "accelerate") == expected
    assert "sharded by blocks (FSDP2)" in log

    two = yaml.safe_load(shipped("accelerate_configs", "hsdp_2node.yaml").read_text())
    (folder / "hsdp.yaml").write_text(yaml.safe_dump({**two, "use_cpu": True}))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    command = (sys.executable, *tune, "training.output_dir=nodes", "--accelerate", "hsdp.yaml", "--processes", "2")
    nodes = [start(folder, *command, NODE_RANK=str(rank), **where) for rank in (0, 1)]
    logs = [node.communicate(timeout=280)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert losses(folder / "nodes") == expected
    assert "2 copies of 1 shards" in logs[0]
    assert "step 8/8" not in logs[1]


def test_the_other_machine_is_told_who_was_killed(folder: Path) -> None:
    """Two launchers as two machines, rank 0 killed, which keeps the store: each tells, without torch's stack."""
    two = yaml.safe_load(shipped("accelerate_configs", "hsdp_2node.yaml").read_text())
    (folder / "hsdp.yaml").write_text(yaml.safe_dump({**two, "use_cpu": True}))
    command = (sys.executable, "-m", "ssm_tune", "sft", "x.yaml", "training.max_steps=2000")
    command += ("--accelerate", "hsdp.yaml", "--processes", "2")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29521"}
    nodes = [start(folder, *command, NODE_RANK=str(rank), **where) for rank in (0, 1)]
    deadline = time.monotonic() + 200
    while not (folder / "run/metrics.jsonl").exists():
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes)
        time.sleep(0.2)
    os.kill(json.loads((folder / "run/run.json").read_text())["pid"], signal.SIGKILL)
    logs = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [137, 3], logs
    assert logs[0].count("process 0 was ended by SIGKILL") == 1
    assert len(re.findall(r"rank 0 \(process \d+\) ended without a word", logs[1])) == 1
    assert "--resume" in logs[1] and len(logs[1].splitlines()) < 5, logs[1]


def test_one_rank_fails_and_the_run_resumes_on_one_process(folder: Path) -> None:
    """A loss that is not a number on rank 1: told once, with the row, and exit code 3; then one process goes on."""
    tune = ("-m", "ssm_tune", "sft", "x.yaml")
    run(folder, sys.executable, *tune, "training.output_dir=one", "training.per_device_train_batch_size=4")
    faulty = ("--standalone", "-m", "faulty", "sft", "x.yaml", "--accelerate", "fsdp2_cpu")
    began = time.monotonic()
    log = run(folder, *TORCHRUN, *faulty, code=1, FAULT="nan")
    assert time.monotonic() - began < 120
    assert log.count("the loss is nan on") == 1
    assert re.search(r"rank 1: step 5: the loss is nan on \S*rows.jsonl, line \d+", log)
    assert "exitcode  : 3" in log  # of the process; torchrun's own is 1
    assert status(folder / "run") == "stopped"
    assert [path.name for path in sorted((folder / "run/checkpoints").iterdir())] == ["checkpoint-3"]
    log = run(folder, sys.executable, *tune, "--resume")
    assert losses(folder / "run") == pytest.approx(losses(folder / "one"), rel=1e-6)
    assert "gradient_accumulation_steps: 2 (as many rows a step as before" in log
    assert status(folder / "run") == "complete"


def test_a_full_disk_on_rank_0(folder: Path) -> None:
    faulty = ("--standalone", "-m", "faulty", "sft", "x.yaml")
    log = run(folder, *TORCHRUN, *faulty, code=1, FAULT="disk", FAULTY_RANK="0")
    assert log.count("the disk is full while writing a checkpoint") == 1
    assert "the last whole checkpoint is checkpoint-3" in log
    assert "exitcode  : 3" in log
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["checkpoint-3"]
    assert status(folder / "run") == "stopped"


def test_a_row_that_one_rank_refuses(folder: Path) -> None:
    log = run(folder, *TORCHRUN, "--standalone", "-m", "faulty", "sft", "x.yaml", code=1, FAULT="row")
    assert log.count("rows.jsonl, line 7: completion is 3") == 1
    assert "exitcode  : 2" in log
    assert not (folder / "run").exists()


def test_the_best_checkpoint_is_loaded_by_all(folder: Path) -> None:
    more = ("data.eval_fraction=0.3", "training.load_best_model_at_end=true", "training.eval_steps=3")
    more += ("training.eval_strategy=steps", "training.learning_rate=0.5", "training.ddp_timeout=30")
    run(folder, *TORCHRUN, "--standalone", "-m", "ssm_tune", "sft", "x.yaml", "--accelerate", "fsdp2_cpu", *more)
    assert status(folder / "run") == "complete"
    state = json.loads((folder / "run/checkpoints/checkpoint-6/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] in ("run/checkpoints/checkpoint-3", "run/checkpoints/checkpoint-6")


def test_preemption(folder: Path) -> None:
    """SIGTERM to all processes, as a scheduler sends it, and again by the launcher: a checkpoint, and exit code 143."""
    faulty = ("--standalone", "-m", "faulty", "sft", "x.yaml", "training.max_steps=200", "--accelerate", "fsdp2_cpu")
    process = start(folder, *TORCHRUN, *faulty, FAULT="slow", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120")
    deadline = time.monotonic() + 200
    while not (folder / "run/metrics.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    log = process.communicate(timeout=120)[1]
    assert log.count("ended by SIGTERM after step") == 1, log
    step = int(re.search(r"ended by SIGTERM after step (\d+)", log)[1])
    assert (folder / f"run/checkpoints/checkpoint-{step}/checkpoint.json").exists()
    assert status(folder / "run") == "stopped"


def test_the_others_wait_for_a_long_evaluation(folder: Path) -> None:
    """Rank 0 evaluates the whole model for longer than a collective call may take."""
    more = ("training.ddp_timeout=10", "evaluation.tasks=[anything]", "--accelerate", "fsdp2_cpu")
    log = run(folder, *TORCHRUN, "--standalone", "-m", "faulty", "sft", "x.yaml", *more, FAULT="long evaluation")
    assert "Error" not in log
    assert (folder / "run/evaluated").read_text() == "Mamba2ForCausalLM"
    assert status(folder / "run") == "complete"
