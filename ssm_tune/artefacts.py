"""What a run leaves behind beside its weights: environment.json, kernels.json, loss.png; and the table at its start."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ssm_tune
from ssm_tune.kernels import KernelChoice
from ssm_tune.model import ModelReport
from ssm_tune.run_folder import RunFolder

PACKAGES = (
    *("torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers", "safetensors"),
    *("numba", "triton", "mamba-ssm", "causal-conv1d", "bitsandbytes"),
)


def describe_environment(device: torch.device, processes: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Versions, device and command: what a reader needs to run it again."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "ssm_tune": ssm_tune.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (platform.processor() or device.type),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "processes": processes,
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "ssm-tune"), *sys.argv[1:]]),
        "overrides": list(overrides),
    }


def write_kernels(folder: RunFolder, choices: Sequence[KernelChoice]) -> None:
    folder.write_json("kernels.json", [dataclasses.asdict(choice) for choice in choices])


def read_metrics(folder: RunFolder) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, oldest first; none if nothing was logged."""
    file = folder.path / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def draw_metrics(folder: RunFolder) -> None:
    """loss.png: loss (and eval loss), learning rate and tokens/s against steps."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    lines = read_metrics(folder)
    panels = (
        ("loss", ("loss", "eval_loss")),
        ("learning rate", ("learning_rate",)),
        ("tokens/s", ("tokens_per_second",)),
    )
    figure = Figure(figsize=(8, 9), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for key in keys:
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=key, marker="o" if len(points) < 40 else None, markersize=3)
        axes.set_ylabel(title)
        if axes.lines:
            axes.legend()
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    with folder.staging("plot") as scratch:
        figure.savefig(scratch / "loss.png", dpi=110)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _kernel_lines(kernels: Sequence[KernelChoice]) -> list[str]:
    """One line for the operations that share a backend, and its reason and cost."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for choice in kernels:
        groups.setdefault((choice.backend, choice.reason, choice.cost), []).append(choice.operation)
    return [
        f"{', '.join(operations)}: {backend}" + "".join(f"; {part}" for part in (reason, cost) if part)
        for (backend, reason, cost), operations in groups.items()
    ]


def print_start(
    console: Console,
    *,
    model: ModelReport,
    kernels: Sequence[KernelChoice],
    data: Any,
    steps: str,
    device: torch.device,
    defaults: Sequence[str],
    output: Path,
    processes: str | None = None,
) -> None:
    """The table at start: model, parameters, kernel path and why, data, memory, and how it is spread."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", f"{model.name} ({model.model_type}, {model.dtype})")
    share = 100 * model.trainable / max(model.total, 1)
    table.add_row("parameters", f"{model.trainable:,} trained of {model.total:,} ({share:.2f} %)")
    for number, line in enumerate(_kernel_lines(kernels)):
        table.add_row("" if number else "kernels", line)
    for number, line in enumerate(data.lines()):
        table.add_row("" if number else "data", line)
    training = 12 * model.trainable  # gradient and two moments of Adam, float32
    table.add_row(
        "memory",
        f"weights {_bytes(model.memory)}, gradients and optimizer {_bytes(training)}, then activations; on {device}",
    )
    if processes is not None:
        table.add_row("processes", processes)
    table.add_row("steps", steps)
    table.add_row("output", str(output))
    for number, line in enumerate(defaults):
        table.add_row("" if number else "notes", line)
    console.print(table)
