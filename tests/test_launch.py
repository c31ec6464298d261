"""Several processes: which config, what accelerate's launcher is given, and the exit codes that come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from ssm_tune import cli, launch, workflow
from ssm_tune.recipe import RecipeError, recipe_from_dict
from ssm_tune.sharding import Sharding
from ssm_tune.shipped import shipped, shipped_names


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What accelerate's launcher would be started with, on a machine without a GPU."""
    made: list[list[str]] = []

    def take(arguments: list[str]) -> int:
        made.append(arguments)
        return 0

    monkeypatch.setattr(launch, "_run", take)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("SSM_TUNE_SHARDED", "false")
    for name in ("NODE_RANK", "MASTER_ADDR", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_configs_by_name_and_by_file(tmp_path: Path) -> None:
    assert launch.find_config("ddp") == shipped("accelerate_configs", "ddp.yaml")
    own = tmp_path / "own.yaml"
    own.write_text("")
    assert launch.find_config(str(own)) == own
    with pytest.raises(RecipeError, match=r"--accelerate dpd: is neither a file nor a config. Did you mean ddp\?"):
        launch.find_config("dpd")
    with pytest.raises(RecipeError, match="Shipped configs: ddp, fsdp2, fsdp2_cpu, hsdp_2node, single_gpu"):
        launch.find_config("zzzzz")


@pytest.mark.parametrize("name", shipped_names("accelerate_configs"))
def test_accelerate_reads_every_shipped_config(name: str) -> None:
    config = launch._read_config(shipped("accelerate_configs", f"{name}.yaml"))
    assert config["distributed_type"] in ("NO", "MULTI_GPU", "FSDP")


def test_what_accelerate_is_given(handed: list[list[str]]) -> None:
    assert launch.launch("sft", ["demo", "training.seed=1", "--resume"], processes=3) == 0
    [arguments] = handed
    assert arguments[:4] == ["--config_file", str(shipped("accelerate_configs", "ddp.yaml")), "--num_processes", "3"]
    assert arguments[-6:] == ["-m", "ssm_tune", "sft", "demo", "training.seed=1", "--resume"]


def test_ddp_without_a_gpu_is_two_processes(handed: list[list[str]]) -> None:
    launch.launch("sft", ["demo"], accelerate="ddp")
    assert handed[0][3] == "2"
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_one_process_a_gpu(handed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    launch.launch("sft", ["demo"], accelerate="fsdp2")
    assert handed[0][3] == "4"
    assert os.environ["ACCELERATE_USE_CPU"] == "false"
    with pytest.raises(RecipeError, match="5 processes on this machine, which has 4 GPUs"):
        launch.launch("sft", ["demo"], accelerate="ddp", processes=5)


def test_where_this_machine_stands_among_several(
    handed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 4}))
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(RecipeError, match="2 machines: MASTER_ADDR is not set"):
        launch.launch("sft", ["demo"], accelerate=str(config))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    launch.launch("sft", ["demo"], accelerate=str(config))
    assert handed[0][2:8] == ["--num_processes", "4", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    with pytest.raises(RecipeError, match="3 processes are not equally many on 2 machines"):
        launch.launch("sft", ["demo"], accelerate=str(config), processes=3)


def test_sharding_without_a_gpu_is_refused(handed: list[list[str]]) -> None:
    with pytest.raises(RecipeError, match=r"there is none to use here. Use --accelerate ddp, or fsdp2_cpu"):
        launch.launch("sft", ["demo"], accelerate="fsdp2")
    assert handed == []
    launch.launch("sft", ["demo"], accelerate="fsdp2_cpu")
    assert handed[0][3] == "2"


def test_a_config_in_processes_that_torchrun_started(handed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match="--processes: 2, but 4 were started"):
        launch.adopt("ddp", 2)
    launch.adopt("hsdp_2node", None)
    wanted = Sharding.from_environment()
    assert (wanted.replicas, wanted.reshard, wanted.offload) == (2, True, False)
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"  # accelerate would shard too
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(RecipeError, match="FSDP1 is not supported"):
        Sharding.from_environment()


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_32bit", "lion_32bit", "ademamix", "adafactor"])
def test_optimizers_that_cannot_be_sharded_are_refused_before_data_and_weights(name: str) -> None:
    recipe = recipe_from_dict({"training": {"optim": name}}, where="test", complete=False)
    with pytest.raises(
        RecipeError, match=r"training.optim: \w+ does not know sharded parameters. Use adamw_torch_fused"
    ):
        workflow._prepare(workflow.Job(recipe, "sft", sharding=Sharding()), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {}", "is not an accelerate config"),
        ("a: [", "cannot be read"),
        ("distributed_type: MULTI_GPU\nnum_proceses: 2\n", "accelerate does not read it: .*num_proceses"),
        ("distributed_type: NONSENSE\n", "accelerate does not read it"),
    ],
)
def test_configs_that_are_none(handed: list[list[str]], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        launch.launch("sft", ["demo"], accelerate=str(path))


def test_processes_that_cannot_be(handed: list[list[str]]) -> None:
    with pytest.raises(RecipeError, match="--processes: must be at least 1, not 0"):
        launch.launch("sft", ["demo"], processes=0)


def test_the_recipe_is_read_before_anything_is_launched(
    handed: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", "demo", "training.sed=1", "--processes", "2"]) == 2
    assert "training.sed is not a setting. Did you mean seed?" in capsys.readouterr().err
    assert cli.main(["sft", "demo", "training.seed=1", "--processes", "2", "--resume"]) == 0
    assert handed[0][-4:] == ["sft", "demo", "training.seed=1", "--resume"]


# --- real processes ------------------------------------------------------------------------------------------------

# Stands in the place of `ssm_tune` in the child processes: says who it is, then ends as it is told.
WORKER = """
import json, os, pathlib, signal, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"rank{rank}.json").write_text(json.dumps([os.environ["WORLD_SIZE"], sys.argv[1:]]))
how = sys.argv[-1]
while rank == "1" and not pathlib.Path("rank0.json").exists():
    time.sleep(0.1)
if how == "wait":
    def end(signum, frame):
        pathlib.Path(f"rank{rank}.signal").write_text(str(signum))
        sys.exit(128 + signum)
    signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)
    time.sleep(60)
if how == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "killed":
    time.sleep(60)
sys.exit(int(how) if rank == "1" else time.sleep(2))
"""


@pytest.fixture
def workers(tmp_path: Path) -> Path:
    package = tmp_path / "ssm_tune_worker"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(WORKER)
    return tmp_path


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(f"""
        import sys
        from ssm_tune import launch
        run = launch._run
        launch._run = lambda arguments: run(["ssm_tune_worker" if a == "ssm_tune" else a for a in arguments])
        sys.exit(launch.launch("sft", ["recipe", {how!r}], processes=2))
    """)
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_of_the_processes_comes_back(workers: Path, code: int) -> None:
    process = start(workers, str(code))
    error = process.communicate(timeout=120)[1]
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert "torch/distributed" not in error
    for rank in (0, 1):
        assert json.loads((workers / f"rank{rank}.json").read_text()) == ["2", ["sft", "recipe", str(code)]]


@pytest.mark.slow
def test_a_killed_process_is_named(workers: Path) -> None:
    process = start(workers, "killed")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 137
    assert "process 1 was ended by SIGKILL" in error


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_processes(workers: Path, signum: signal.Signals) -> None:
    process = start(workers, "wait")
    deadline = time.monotonic() + 120
    while not all((workers / f"rank{rank}.json").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(signum)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signum, error
    assert "torch/distributed" not in error
    assert {(workers / f"rank{rank}.signal").read_text() for rank in (0, 1)} == {str(int(signum))}


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """The same optimizer steps on the same rows: one process with batches of 2, two processes with batches of 1."""
    rows = [{"prompt": f"{number} and one is ", "completion": str(number + 1)} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "x.yaml").write_text(
        "model: {architecture: mamba2, dimensions: {hidden_size: 32, num_hidden_layers: 2, head_dim: 16}}\n"
        "tokenizer: {train: true, vocab_size: 300}\ndata: {train: [{path: rows.jsonl}]}\n"
        "training: {max_steps: 4, logging_steps: 1, learning_rate: 1e-3, max_length: 64, save_strategy: no, seed: 1}\n"
    )

    def losses(output: str, batch: int, *arguments: str) -> list[float]:
        command = [sys.executable, "-m", "ssm_tune", "sft", "x.yaml", f"training.output_dir={output}", *arguments]
        command.append(f"training.per_device_train_batch_size={batch}")
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert result.returncode == 0, result.stderr
        entries = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        return [entry["loss"] for entry in entries if "loss" in entry]

    alone, together = losses("alone", 2), losses("together", 1, "--processes", "2")
    assert len(alone) == 4
    assert together == pytest.approx(alone, rel=1e-4)
    assert json.loads((tmp_path / "together" / "run.json").read_text())["status"] == "complete"


@pytest.mark.slow
def test_a_mistake_in_the_data_comes_back_as_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 3, "completion": "b"}\n')
    (tmp_path / "x.yaml").write_text(
        "model: {architecture: mamba, dimensions: {hidden_size: 32, num_hidden_layers: 1}}\n"
        "tokenizer: {train: true, vocab_size: 300}\ndata: {train: [{path: rows.jsonl}]}\n"
    )
    command = [sys.executable, "-m", "ssm_tune", "sft", "x.yaml", "--processes", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2, result.stderr
    assert "rows.jsonl, line 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()
