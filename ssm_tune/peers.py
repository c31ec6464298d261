"""The other processes of a run: agreeing with them, waiting for them, and ending with them.

A process that dies leaves the others inside a collective call, which NCCL ends after half an hour and Python cannot
interrupt. So each process watches those of its machine (their process ids) and a word in the launcher's store; when one
is gone, it gives its own work a moment to fail by itself, and ends.

Control messages go through gloo on the CPU, beside the group that carries gradients: they wait for no GPU, and may wait
for days while rank 0 evaluates.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ssm_tune.run_folder import Stopped
from ssm_tune.training_arguments import on_cpu

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(days=7)  # for rank 0's evaluations
_INTERVAL = 1.0  # seconds between two looks at the others
_GRACE = 15.0  # seconds in which a process may end by itself after another was lost
_NOTICE = 6.0  # seconds in which a death is noticed after it broke a connection
_FAILED, _LOST = "failed", "lost"  # keys in the store


class Peers:
    """The processes of this run, seen from one of them. Made once by all, after the process group."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._store = dist.PrefixStore("ssm_tune", dist.distributed_c10d._get_default_store())
        homes: list[Any] = [None] * self.count
        here = (socket.gethostname(), os.getpid(), os.getppid())
        dist.all_gather_object(homes, here, group=self._group)
        others = {rank: home for rank, home in enumerate(homes) if rank != self.rank}
        self._local = {rank: pid for rank, (host, pid, _) in others.items() if host == here[0]}
        self._siblings = {rank for rank in self._local if homes[rank][2] == here[2]}  # of the same launcher
        self.lost: int | None = None
        self._seen, self._ended = threading.Event(), threading.Event()
        self._last_word: Callable[[str], None] | None = None
        atexit.register(self.leave)

    # -- together -------------------------------------------------------------------------------------------------

    def agree(self, number: int) -> int:
        """The largest of the numbers that the processes bring."""
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value)

    def add(self, numbers: list[float]) -> list[float]:
        """Sums over the processes."""
        value = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(value, group=self._group)
        return value.tolist()

    def wait(self) -> None:
        """Until all have come here, however long it takes."""
        dist.barrier(group=self._group)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    # -- the end --------------------------------------------------------------------------------------------------

    def watch(self, last_word: Callable[[str], None]) -> None:
        """Watch the others from here on. `last_word`: what is to be done, with the reason, if this process must be
        ended from inside a call that does not end."""
        self._last_word = last_word
        self._ended.clear()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def claim(self, message: str) -> bool:
        """Whether this process tells the others' users why the run ended: true for the first that asks."""
        if self.count == 1:
            return True
        try:
            mine = json.dumps([self.rank, message])
            return self._store.compare_set(_FAILED, "", mine).decode() == mine
        except RuntimeError:  # the store is gone with the process that kept it: one on each machine tells
            return not any(_is_alive(pid) for rank, pid in self._local.items() if rank < self.rank)

    def leave(self) -> None:
        """This process ends as all do, or has told why it does: stop watching."""
        self._ended.set()

    def depart(self) -> None:
        """As `leave`; and the others may go on for a while, which its absence shall not end."""
        try:
            self._store.set(f"done/{self.rank}", "1")
        except RuntimeError:
            logger.debug("the store is gone already")
        self.leave()

    def explain(self, error: BaseException) -> BaseException:
        """`error`, or Stopped if it comes of another process that died while this one spoke with it."""
        if isinstance(error, Stopped) or not isinstance(error, RuntimeError | KeyboardInterrupt):
            return error
        # An interrupt may be the launcher's, which then ends the others: it has seen the death already.
        if not self._seen.wait(_NOTICE if isinstance(error, RuntimeError) else 2 * _INTERVAL):
            return error
        return Stopped(self._reason(), told=self._told())

    def _told(self) -> bool:
        """Whether somebody else tells: the process that failed, or our launcher, which knows its own."""
        return self._failure() is not None or ("SSM_TUNE_LAUNCHER" in os.environ and self.lost in self._siblings)

    def _failure(self) -> tuple[int, str] | None:
        try:
            return tuple(json.loads(self._store.get(_FAILED))) if self._store.check([_FAILED]) else None
        except RuntimeError:
            return None

    def _reason(self) -> str:
        failure = self._failure()
        if failure is not None:
            return f"rank {failure[0]}: {failure[1]}"
        pid = self._local.get(self.lost)
        which = f"rank {self.lost}" + (f" (process {pid})" if pid is not None else "")
        return f"{which} ended without a word, killed or out of memory; the others stop"

    # -- watching -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.lost = self._find_lost()
            if self.lost is None:
                continue
            self._seen.set()
            if self._ended.wait(_GRACE):
                return
            if self._last_word is not None:
                self._last_word(self._reason())
            if not self._told() and self.claim(self._reason()):
                print(f"{self._reason()}. Continue with --resume", file=sys.stderr, flush=True)
            os._exit(Stopped("").exit_code)

    def _find_lost(self) -> int | None:
        try:
            for rank, pid in self._local.items():
                if not _is_alive(pid) and not self._store.check([f"done/{rank}"]):
                    self._store.set(_LOST, str(rank))  # for the other machines
                    return rank
            return int(self._store.get(_LOST)) if self._store.check([_LOST]) else None
        except RuntimeError:  # it lay with the launcher, or with rank 0
            return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # dead, but its launcher has not looked yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return True


_peers: Peers | None = None


def join(training: Mapping[str, Any], *, alone: bool = False) -> Peers | None:
    """Meet the processes that a launcher started, and make the group that carries gradients; None without others.

    Called before anything is made that an error would have to undo.

    Args:
        training: a recipe's section; use_cpu and ddp_timeout are read.
        alone: make a group of one process too (a sharded model needs one).
    """
    global _peers
    count = int(os.environ.get("WORLD_SIZE", "1"))
    use_cpu = on_cpu(training)
    if count > 1 and not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=use_cpu, timeout=timedelta(seconds=training.get("ddp_timeout", 1800)))
    if count == 1 and alone and not dist.is_initialized():
        backend = "gloo" if use_cpu else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if _peers is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _peers = Peers()
    return _peers


def current() -> Peers | None:
    """The peers, if `join` found any."""
    return _peers
