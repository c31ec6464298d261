"""DDP and FSDP2 round blocks that are recorded in CUDA graphs: two processes of the command line, with accumulation
and clipping.

On a CPU with what stands in the place of graphs, on two GPUs with graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RECIPE = """\
model: {{architecture: {kind}, dtype: float32, dimensions: {{hidden_size: 64, num_hidden_layers: 3{more}}}}}
tokenizer: {{train: true, vocab_size: 300}}
data: {{train: [{{path: rows.jsonl}}], eval: [{{path: rows.jsonl}}]}}
kernels: {{self_check: false}}
training: {{max_steps: 6, save_steps: 3, eval_steps: 2, eval_strategy: steps, logging_steps: 1, learning_rate: 1e-2,
  max_length: 64, packing: true, seed: 1, report_to: none, per_device_train_batch_size: 1, optim: sgd,
  gradient_accumulation_steps: 2, max_grad_norm: 0.5, bf16: false, output_dir: run}}
"""
MORE = {"mamba": "", "mamba2": ", head_dim: 16"}


def train(folder: Path, name: str, module: str, *options: str, on_gpu: bool, sharded: bool) -> list[dict[str, Any]]:
    """Two processes; the lines of metrics.jsonl."""
    path = os.pathsep.join([str(TESTS), str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment["SSM_TUNE_SHARDED"] = str(sharded)
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = (*TORCHRUN, "-m", module, "sft", "x.yaml", f"training.output_dir={name}", *options)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def check(folder: Path, kind: str, *, on_gpu: bool, sharded: bool) -> None:
    rows = [{"prompt": f"{n} and one is ", "completion": str(n + 1) * (1 + n % 5)} for n in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "x.yaml").write_text(RECIPE.format(kind=kind, more=MORE[kind]))
    plain = train(folder, "plain", "ssm_tune", "kernels.graphs=false", on_gpu=on_gpu, sharded=sharded)
    recorded = train(folder, "recorded", "recorded", "kernels.graphs=true", on_gpu=on_gpu, sharded=sharded)
    # Of 12 micro-batches the first is computed the usual way, and three blocks are three pieces.
    assert [(folder / f"pieces-{rank}").read_text() for rank in (0, 1)] == ["33", "33"]
    tolerance = 1e-4 if on_gpu else 1e-5
    for key in ("loss", "grad_norm", "eval_loss"):
        expected = [line[key] for line in plain if key in line]
        assert len(expected) >= 3
        assert [line[key] for line in recorded if key in line] == pytest.approx(expected, rel=tolerance), key
    assert min(line["grad_norm"] for line in plain if "grad_norm" in line) > 0.5  # so that all are clipped


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes(tmp_path: Path, sharded: bool) -> None:
    check(tmp_path, "mamba2", on_gpu=False, sharded=sharded)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_two_gpus(tmp_path: Path, kind: str, sharded: bool) -> None:
    check(tmp_path, kind, on_gpu=True, sharded=sharded)
