"""examples/life_cycle.py, as a user runs it, up to a push to a Hub on this machine and back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from hub_server import TOKEN, Hub

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_life_of_a_run(tmp_path: Path) -> None:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,  # everything that asks the Hub asks this one
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    script = [sys.executable, str(ROOT / "examples" / "life_cycle.py"), str(tmp_path / "run")]
    try:
        done = subprocess.run(
            [*script, "--repo", "me/life", "training.max_steps=3"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        hub.shutdown()
        hub.server_close()
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line[:2] for line in done.stdout.splitlines() if line[1:3] == ". "] == [f"{step}." for step in range(1, 9)]
    assert TOKEN not in done.stdout + done.stderr
    shown = hub.show("me/life")
    header = yaml.safe_load(shown["README.md"].decode().split("---")[1])
    tasks = {result["dataset"]["name"] for result in header["model-index"][0]["results"]}
    assert {"mqar_8", "induction_256", "passkey_1k", "rows in memory"} == tasks
    assert {"config.json", "model.safetensors", "tokenizer.json", "recipe.yaml"} - shown.keys() <= {"recipe.yaml"}
    assert not any(TOKEN.encode() in data for data in shown.values())


@pytest.mark.slow
def test_the_benchmark_of_decoding_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "decode_speed.py"), "--tokens", "2", "--contexts", "8"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tiny-")]
    assert sum("| ours |" in row and "| 8 |" in row for row in rows) == 4
