"""How batches reach the device: copies that are not waited for, and workers that outlive a signal to the run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import torch

WORKERS = 2  # of a stream on a GPU, where the recipe does not say


def send(batch: dict[str, torch.Tensor], device: torch.device, *, pinned: bool) -> dict[str, torch.Tensor]:
    """The batch on `device`. `pinned`: by way of page-locked memory, from which a GPU copies when its work gets there;
    an ordinary copy first waits for all that the GPU was given to do."""
    if not pinned:
        return {name: values.to(device) for name, values in batch.items()}
    return {name: values.pin_memory().to(device, non_blocking=True) for name, values in batch.items()}


def leave_signals_to_the_run(worker: int, then: Callable[[int], Any] | None = None) -> None:
    """In a worker, before anything else: take it out of the run's process group, and call `then`.

    A terminal and torch's launcher send SIGINT and SIGTERM to the whole group. A worker that one ends is an error of
    the run, which would not get to its last checkpoint. The loader still ends its workers, and they end when the run's
    process is gone: at once, where torch's own way of it waits for ever to hand over what nobody takes any more.
    """
    if os.name == "posix":
        os.setsid()
        threading.Thread(target=_end_with, args=(parent_process().pid,), daemon=True).start()
    if then is not None:
        then(worker)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
