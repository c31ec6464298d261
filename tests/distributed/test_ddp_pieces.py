"""Under DDP, gradients of recorded blocks are those of launched ones: see `ddp_cases.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "ddp_cases.py"


def check(folder: Path, processes: int, *, on_gpu: bool) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    command = (*torchrun, str(SCRIPT), str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(processes):
        found = json.loads((folder / f"found-{rank}.json").read_text())
        # Of two kinds, 3 blocks, 4 steps of 2 micro-batches: those before recording are launched.
        assert found["played"] == 2 * 3 * (4 * 2 - 1 - rank)
        assert found["worst"] < (1e-2 if on_gpu else 1e-6)


@pytest.mark.slow
def test_two_processes_on_a_cpu(tmp_path: Path) -> None:
    check(tmp_path, 2, on_gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_on_gpus(tmp_path: Path, processes: int) -> None:
    """One process by NCCL; two by gloo if there is one GPU."""
    check(tmp_path, processes, on_gpu=torch.cuda.is_available())
