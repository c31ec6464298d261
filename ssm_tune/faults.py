"""What an error leaves of a run, and how it is told: signals, full disks and full memories in the user's words."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssm_tune.callbacks import StopOnSignal
from ssm_tune.kernels import KernelError
from ssm_tune.peers import Peers
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import COMPLETE, STOPPED, RunFolder, Stopped, is_disk_full


@contextmanager
def told(
    folder: RunFolder, signals: StopOnSignal, *, resumed: bool, is_main: bool, peers: Peers | None = None
) -> Iterator[None]:
    """Before the first step of a new run an error leaves nothing; after it, a folder that can be resumed.

    Args:
        peers: the other processes; that one of them died is an error of this one, whatever it was doing.

    Raises:
        RecipeError, Stopped: in the place of what means one of them; everything else as it is.
    """

    def settle(reason: str) -> None:
        if not is_main:
            return
        if not resumed and signals.steps == 0:
            folder.discard()
            return
        state = folder.read_state()
        if state is not None and state["status"] != COMPLETE:  # else what failed came after training
            folder.write_state(STOPPED, reason=reason)

    if peers is not None:
        peers.watch(settle)
    try:
        yield
    except BaseException as error:
        signals.closing = True
        meant = error if peers is None else peers.explain(error)
        if meant is error:
            meant = _translate(error, folder, signals)
        if peers is not None:
            # Signals come to all, and each ends when it is ready; after any other error the others have to end too.
            peers.depart() if isinstance(meant, Stopped) and meant.exit_code > 128 else peers.leave()
        settle(str(meant))
        if meant is error:
            raise
        raise meant from error
    if peers is not None:
        peers.leave()


def _is_unfinished(folder: RunFolder) -> bool:
    state = folder.read_state()
    return state is not None and state["status"] != COMPLETE


def _translate(error: BaseException, folder: RunFolder, signals: StopOnSignal) -> BaseException:
    if isinstance(error, KeyboardInterrupt) and signals.received is not None:
        found = folder.list_checkpoints()
        kept = f"--resume goes on from {found[-1].name}" if found else "no checkpoint was written yet"
        return Stopped(f"interrupted by {signal.Signals(signals.received).name}; {kept}.", signals.exit_code)
    if isinstance(error, RecipeError) and signals.steps and _is_unfinished(folder):  # of a stream: a row, the network
        found = folder.list_checkpoints()
        kept = f"--resume goes on from {found[-1].name}" if found else "No checkpoint was written yet"
        return Stopped(f"{error} {kept}.")
    if isinstance(error, KernelError):
        return RecipeError(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return RecipeError(
            "out of memory: lower training.per_device_train_batch_size (with gradient_accumulation_steps raised) or "
            f"max_length, or set training.gradient_checkpointing: true. {str(error).splitlines()[0]}"
        )
    if isinstance(error, OSError | RuntimeError) and not isinstance(error, Stopped) and is_disk_full(error):
        return Stopped(f"the disk is full: {folder.path} could not be written. Free some space and use --resume.")
    return error
