"""The packages with kernels for a GPU, as stand-ins on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
import stand_ins

from ssm_tune.kernels import backends


@pytest.fixture
def stand_in_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mamba_ssm and causal_conv1d importable, and what imports them afresh."""
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in stand_ins.OURS:
        monkeypatch.delitem(sys.modules, f"ssm_tune.kernels.{name}", raising=False)
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    stand_ins.CALLS.clear()
    yield
    for name in stand_ins.OURS:
        sys.modules.pop(f"ssm_tune.kernels.{name}", None)


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends for a GPU are offered for a CPU, and those for a CPU for none."""
    devices = {("cuda",): ("cpu",), ("cpu",): ("none",)}
    table = [
        dataclasses.replace(b, devices=devices.get(b.devices, b.devices))
        for b in backends.BACKENDS
        if b.source != "ours"
    ]
    monkeypatch.setattr(backends, "BACKENDS", tuple(table))
