"""What a failed run leaves, whatever arrives while it is put in order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ssm_tune.callbacks import StopOnSignal
from ssm_tune.faults import told
from ssm_tune.run_folder import RunFolder


class AnotherProcess:
    """Died; its launcher then ends this one, which is just finding out why its call failed."""

    def watch(self, last_word: object) -> None: ...

    def leave(self) -> None: ...

    def explain(self, error: BaseException) -> BaseException:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)  # for the handler
        return error


def test_a_signal_does_not_break_off_the_putting_in_order(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    assert folder.path.is_dir()
    with (
        pytest.raises(RuntimeError, match="closed by the peer"),
        StopOnSignal() as signals,
        told(folder, signals, resumed=False, is_main=True, peers=AnotherProcess()),
    ):
        raise RuntimeError("closed by the peer")
    assert not folder.path.exists()
    assert signals.received == signal.SIGTERM
