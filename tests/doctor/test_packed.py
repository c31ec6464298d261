"""Packed weights are tried as the kernels are, with what bitsandbytes has for this machine."""

from __future__ import annotations

import pytest
import torch

from ssm_tune.doctor import PackageReport, packed


@pytest.mark.parametrize("status", ["works", "absent", "broken"])
def test_packed_weights_are_tried(status: str) -> None:
    state = PackageReport("bitsandbytes", "0.50.2", status, "OSError: libcudart.so.13")
    failures = {trial.failure for trial in packed.try_packed_weights([state], torch.device("cpu"))}
    expected = {
        "works": {""},
        "absent": {"bitsandbytes is not installed"},
        "broken": {"does not work here: OSError: libcudart.so.13"},
    }
    assert failures == expected[status]


def test_packed_weights_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    four = packed._LAYERS["linear_4bit"]
    monkeypatch.setitem(packed._LAYERS, "linear_4bit", lambda weight, device: four(weight * 1.3, device))
    state = PackageReport("bitsandbytes", "0.50.2", "works")
    trials = {trial.operation: trial.failure for trial in packed.try_packed_weights([state], torch.device("cpu"))}
    assert "the output differs by 0.3" in trials["linear_4bit"]
    assert trials["linear_8bit"] == ""
