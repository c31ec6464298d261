"""What the doctor found, as data, as JSON and as text."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from ssm_tune.kernels.backends import KernelTrial

SCHEMA = 1  # of the JSON; raised when a key goes or changes its meaning


@dataclass(frozen=True)
class PackageReport:
    """One package. status: "works", "broken" (`error`: what its import raised) or "absent". required: our range."""

    name: str
    version: str | None
    status: str
    error: str = ""
    required: str = ""


@dataclass(frozen=True)
class PathReport:
    """What serves one operation of a model. phase: "training", "prompt" or "token". reason: why nothing faster does."""

    phase: str
    operation: str
    backend: str
    reason: str
    cost: str


@dataclass(frozen=True)
class ModelReport:
    """A model by its config: on which device and in which dtype it would run, and the path of each operation."""

    name: str
    model_type: str
    device: str
    dtype: str
    weights: str
    attention: str
    paths: list[PathReport]
    error: str = ""


@dataclass(frozen=True)
class Advice:
    """level: "problem" (exit code 1) or "note". fix: a command, or "" where there is none to give."""

    level: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """Everything. `ok`: there is no problem."""

    machine: dict[str, Any]
    packages: list[PackageReport]
    kernels: list[KernelTrial]
    model: ModelReport | None
    advice: list[Advice] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(advice.level == "problem" for advice in self.advice)

    def to_json(self) -> dict[str, Any]:
        """Stable keys: schema, ok, machine, packages, kernels, model (null without one), advice."""
        kernels = [dataclasses.asdict(trial) | {"status": kernel_status(trial)} for trial in self.kernels]
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "machine": self.machine,
            "packages": [dataclasses.asdict(package) for package in self.packages],
            "kernels": kernels,
            "model": None if self.model is None else dataclasses.asdict(self.model),
            "advice": [dataclasses.asdict(advice) for advice in self.advice],
        }

    def to_text(self) -> str:
        lines = _machine_lines(self.machine)
        lines += ["", "packages", *_table([_package_row(package) for package in self.packages])]
        head = "kernels, each called once and compared with the reference"
        lines += ["", head, *_table([_kernel_row(trial) for trial in self.kernels])]
        if self.model is not None:
            lines += ["", *_model_lines(self.model)]
        lines += ["", *_advice_lines(self.advice)]
        return "\n".join(line.rstrip() for line in lines)


def kernel_status(trial: KernelTrial) -> str:
    """ "works", "absent", "fails" or "not tried" (there is no such device here)."""
    if trial.failure is None:
        return "not tried"
    if not trial.failure:
        return "works"
    return "absent" if trial.failure.endswith("is not installed") else "fails"


def _machine_lines(machine: dict[str, Any]) -> list[str]:
    device = machine["device_name"] if machine["device"] == "cuda" else f"no CUDA GPU: {machine['no_gpu']}"
    return [
        f"ssm-tune {machine['ssm_tune']}, Python {machine['python']}, {machine['platform']}",
        f"PyTorch {machine['torch']}, built for {machine['torch_build']}; {device}",
    ]


def _package_row(package: PackageReport) -> list[str]:
    told = {"works": "works", "absent": "not installed", "broken": f"BROKEN: {package.error}"}[package.status]
    return [package.name, package.version or "-", told]


def _kernel_row(trial: KernelTrial) -> list[str]:
    told = {
        "works": "works",
        "absent": trial.failure,
        "fails": f"FAILS: {trial.failure}",
        "not tried": f"not tried: no {trial.device.upper()} device here",
    }[kernel_status(trial)]
    return [trial.operation, trial.backend, trial.device, told or ""]


def _model_lines(model: ModelReport) -> list[str]:
    head = f"{model.name}: {model.model_type} on {model.device}, {model.dtype}, weights {model.weights}"
    lines = [head + (f", attention {model.attention}" if model.attention else "")]
    if model.error:
        lines.append(f"  does not run: {model.error}")
    rows = []
    for path in model.paths:
        why = f"because {path.reason}" if path.reason else "the first choice"
        rows.append([path.phase, path.operation, path.backend, why + (f" ({path.cost})" if path.cost else "")])
    return lines + _table(rows)


def _advice_lines(advice: list[Advice]) -> list[str]:
    if not advice:
        return ["nothing to repair"]
    lines = []
    for number, one in enumerate(advice, start=1):
        lines += textwrap.wrap(f"{number}. {one.level}: {one.what}", 118, subsequent_indent="   ")
        if one.fix:
            lines.append(f"     {one.fix}")
    return lines if any(one.level == "problem" for one in advice) else [*lines, "nothing to repair"]


def _table(rows: list[list[str]]) -> list[str]:
    """Columns side by side; the last may be long and goes on below itself."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        start = "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)) + "  "
        room = max(40, 118 - len(start))
        parts = textwrap.wrap(row[-1], room) or [""]
        lines += [start + parts[0], *(" " * len(start) + part for part in parts[1:])]
    return lines
