"""Workers of a loader, when the run's process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import os
from torch.utils.data import DataLoader
from ssm_tune.data.loading import leave_signals_to_the_run

class Rows:
    def __len__(self): return 100
    def __getitem__(self, index): return bytes(1_000_000)  # more than a pipe takes

loader = DataLoader(Rows(), batch_size=None, num_workers=1, worker_init_fn=leave_signals_to_the_run)
batches = iter(loader)
next(batches)
print(batches._workers[0].pid, flush=True)
input()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks for the process in /proc")
def test_no_worker_outlives_a_run_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout.readline())
    assert is_running(worker)
    assert os.getsid(worker) == worker  # no signal to the run's group reaches it
    run.send_signal(signal.SIGKILL)
    run.wait()  # not for its output, which a worker would hold open
    deadline = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = not is_running(worker)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended
