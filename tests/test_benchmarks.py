"""The benchmarks run: with sizes at which they measure nothing, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_the_table_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from train_speed import table

    common = {"row": "mamba-130m-full", "mfu": None, "peak_gib": 9.0, "first_step_seconds": 1.0, "steps": 9, "ms": 10.0}
    results = [
        {**common, "variant": "stock", "tokens_per_second": 100.0, "activations_gib": 5.0},
        {**common, "variant": "ours", "tokens_per_second": 1.0, "activations_gib": 1.0},
        {**common, "variant": "ours", "tokens_per_second": 230.0, "activations_gib": 2.0},
        {"row": "mamba-130m-full", "variant": "mamba_ssm", "problem": "ImportError: no such thing"},
    ]
    lines = table(results).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["stock", "mamba_ssm", "ours"]
    assert "| 2.30 (target 2.0) | 0.40 |" in lines[-1]
    assert "no such thing" in lines[-2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_speed_in_small(tmp_path: Path) -> None:
    file, rows = tmp_path / "results.json", ["mamba-130m-full", "codestral-7b-lora", "mamba2-130m-gsm8k"]
    run("train_speed.py", "--tiny", "--device", "cpu", "--rows", *rows, "--results", str(file))
    found = {(entry["row"], entry["variant"]): entry for entry in json.loads(file.read_text(encoding="utf-8"))}
    assert set(found) == {
        (row, variant) for row in rows for variant in ("stock", "stock, made right", "ours", "ours, graphs")
    }
    for key, entry in found.items():
        assert "problem" not in entry, (key, entry)
        assert entry["tokens_per_second"] > 0 and entry["steps"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scan_speed_in_small() -> None:
    sizes = ("--batch", "1", "--length", "16", "--channels", "4", "--states", "2")
    lines = run("scan_speed.py", "--sweep", *sizes, TRITON_INTERPRET="1").splitlines()
    errors = [float(error.split()[-1]) for error in lines[0].removeprefix("errors: ").split(", ")]
    assert len(errors) == 9 and max(errors) < 1e-2
    assert any(line.startswith("sweep backward") for line in lines)
    assert any(
        line.startswith("ours, documents")
        for line in run("scan_speed.py", "--conv", *sizes, TRITON_INTERPRET="1").splitlines()
    )
