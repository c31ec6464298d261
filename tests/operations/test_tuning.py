"""Trials do not tune; what tuning chose is kept, and said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ssm_tune.kernels import tuning
from ssm_tune.kernels.tuning import keep_tuning, report_tuning, without_tuning

autotuner = pytest.importorskip("triton.runtime.autotuner")
TIMED: list[int] = []


class Kernel:
    """What a tuner tunes: a name and a hash of a source."""

    __name__ = "scan_kernel"
    cache_key = "0123456789abcdef" * 4


class Tuner(autotuner.Autotuner):
    """Triton's own class without a kernel to build: what `prune_configs` gives is what would be timed."""

    def __init__(self) -> None:
        self.fn = Kernel()
        self.configs = [autotuner.Config({"BLOCK": 2**n}) for n in range(6)]
        self.cache = {"before": self.configs[5]}
        self.arg_names, self.keys, self.nargs = ["x", "dim"], ["dim"], {}
        self.early_config_prune, self.perf_model = None, None

    def tune(self, key: Any) -> int:
        """As `Autotuner.run` does for a key that is not in its cache."""
        self.nargs = {"x": None, "dim": key}
        found = self.prune_configs({})
        timings = {config: self._bench(config=config) for config in found}
        self.cache[key] = min(timings, key=timings.get)
        return len(found)


def time_it(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    """The fourth configuration is the fastest."""
    TIMED.append(config.kwargs["BLOCK"])
    return [abs(config.kwargs["BLOCK"] - 8) + 1.0] * 3


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", autotuner.Autotuner.prune_configs)  # put back afterwards
    monkeypatch.setattr(autotuner.Autotuner, "_bench", time_it)
    monkeypatch.setattr(autotuner.Autotuner, "_ssm_tuning", None, raising=False)
    monkeypatch.setattr(tuning, "_state", tuning._State())
    monkeypatch.setenv("SSM_TUNE_CACHE", str(tmp_path))
    TIMED.clear()


def test_the_smallest_configuration_inside_all_of_them_outside() -> None:
    tuner = Tuner()
    with without_tuning():
        assert tuner.tune("inside") == 1
        assert set(tuner.cache) == {"before", "inside"}
    assert set(tuner.cache) == {"before"}
    assert tuner.tune("outside") == 6


def test_the_class_is_left_as_it_was_after_an_error() -> None:
    before = autotuner.Autotuner.prune_configs
    with pytest.raises(ZeroDivisionError), without_tuning():
        raise ZeroDivisionError
    assert autotuner.Autotuner.prune_configs is before


def test_the_next_process_takes_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_tuning()
    tuner = Tuner()
    assert tuner.tune(64) == 6 and tuner.tune(128) == 6
    assert tuner.cache[64].kwargs == {"BLOCK": 8}
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "Triton is timing" in said[0] and str(tmp_path) in said[0]
    assert "tuned 2 kernels in 0 s; kept in" in report_tuning()
    assert report_tuning() == ""
    (file,) = tmp_path.rglob("*.json")
    kept = json.loads(file.read_text())
    assert [key.split(": ")[1] for key in kept] == ["64", "128"]
    caplog.clear()
    # All that another process knows.
    monkeypatch.setattr(tuning, "_state", tuning._State())
    tuning._state.installed = True
    TIMED.clear()
    tuner = Tuner()
    assert tuner.tune(64) == 1 and TIMED == []
    assert tuner.cache[64].kwargs == {"BLOCK": 8}
    assert caplog.records == [] and report_tuning() == ""
    assert tuner.tune(256) == 6  # another shape is tuned
    tuner.fn.cache_key = "f" * 64
    assert tuner.tune(128) == 6  # and so is another source


def test_trials_are_not_kept(tmp_path: Path) -> None:
    keep_tuning()
    with without_tuning():
        assert Tuner().tune(64) == 1
    assert not list(tmp_path.rglob("*.json")) and report_tuning() == ""
    assert Tuner().tune(64) == 6


def test_a_configuration_that_is_no_longer_offered_is_tuned_anew(tmp_path: Path) -> None:
    keep_tuning()
    Tuner().tune(64)
    tuner = Tuner()
    tuner.configs = [config for config in tuner.configs if config.kwargs["BLOCK"] != 8]
    assert tuner.tune(64) == 5


@pytest.mark.parametrize("broken", ["not JSON", "[]"])
def test_a_broken_file_is_said_and_replaced(broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_tuning()
    file = tuning._file()
    file.parent.mkdir()
    file.write_text(broken)
    assert Tuner().tune(64) == 6
    assert len(json.loads(file.read_text())) == 1
    assert any("cannot be read" in record.message for record in caplog.records) == (broken == "not JSON")


def test_a_folder_that_cannot_be_written_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SSM_TUNE_CACHE", str(tmp_path / "file"))
    keep_tuning()
    with caplog.at_level(logging.WARNING):
        assert Tuner().tune(64) == 6
    assert any("cannot be written" in record.message for record in caplog.records)
