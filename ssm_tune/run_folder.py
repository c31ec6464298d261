"""What a run folder holds, and how things get into it: whole or not at all.

recipe.yaml  recipe.resolved.yaml     the recipe as given, and with every default filled in
adapter_config.json + adapter_model.safetensors (+ ssm_parameters.safetensors)   or   config.json + model*.safetensors
tokenizer files, generation_config.json
metrics.jsonl  tensorboard/  loss.png what happened
environment.json  kernels.json        with what
README.md                             the model card
checkpoints/checkpoint-N              to resume from
run.json                              {"status": "running" | "stopped" | "complete", ...}; complete is written last
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssm_tune.recipe import RecipeError

RUNNING, STOPPED, COMPLETE = "running", "stopped", "complete"
_MANIFEST = "checkpoint.json"
KEPT_BASE = "base_model"  # where a run keeps a base that has no name of its own


class Stopped(Exception):
    """Training ended before its end, and can be resumed. `exit_code`: 3 (NaN, disk full), 130 (Ctrl-C), 143
    (SIGTERM). `told`: another process of the run, or the launcher, says why."""

    def __init__(self, message: str, exit_code: int = 3, *, told: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.told = told


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that no space (or quota) is left; torch and safetensors hide the errno in their text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    # torch.save's words for a write that came out short: "PytorchStreamWriter failed writing file", and
    # "[enforce fail at inline_container.cc:672] . unexpected pos 82432 vs 82320".
    hidden = ("No space left on device", "os error 28", "PytorchStreamWriter failed writing", "inline_container.cc")
    return any(words in text for words in hidden)


def locate_base(folder: Path, name: str) -> str:
    """The base of an adapter in `folder`, by the name that its config gives.

    A base that the run keeps itself is found after the run's folder has been moved; a checkpoint lies two folders below
    its run.
    """
    if Path(name).exists() or Path(name).name != KEPT_BASE:
        return name
    runs = (folder, *folder.resolve().parents[:2])
    return next((str(run / KEPT_BASE) for run in runs if (run / KEPT_BASE).is_dir()), name)


def open_to_readers(folder: Path) -> None:
    """Give every file in a folder the mode that the user's umask asks for: safetensors makes its own private."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~umask)


class RunFolder:
    """One run's folder. Text and JSON are written beside their place and renamed into it; so are whole artefacts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._made: list[Path] = []  # folders that `create` made, outermost first: what `discard` may take away

    # -- life -----------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, *, resume: bool = False) -> RunFolder:
        """Make the folder, or reopen it to resume.

        Raises:
            RecipeError: it exists and `resume` is not asked for; it cannot be made or written; another live process
                on this machine is training in it; it is complete.
        """
        folder = cls(path)
        if folder.path.exists():
            folder._check_reopen(resume)
        else:
            missing = [parent for parent in (folder.path, *folder.path.parents) if not parent.exists()]
            folder._made = missing[::-1]
            try:
                folder.path.mkdir(parents=True)
            except OSError as error:
                raise RecipeError(
                    f"training.output_dir: cannot make {folder.path} ({error.strerror}). Choose a folder that you may "
                    "write to."
                ) from error
        folder.check_writable()
        return folder

    def _check_reopen(self, resume: bool) -> None:
        if not self.path.is_dir():
            raise RecipeError(f"training.output_dir: {self.path} is a file. Name a folder.")
        state = self.read_state()
        if not resume:
            if state is None and not any(self.path.iterdir()):
                return
            hint = "continue it with --resume, or " if state and state["status"] != COMPLETE else ""
            raise RecipeError(
                f"training.output_dir: {self.path} exists already; {hint}choose another with training.output_dir=..."
            )
        if state is None:
            raise RecipeError(f"--resume: {self.path} is not a run folder (it has no run.json).")
        if state["status"] == COMPLETE:
            raise RecipeError(f"--resume: the run in {self.path} is complete; there is nothing to resume.")
        if self.is_live(state):
            raise RecipeError(f"--resume: process {state['pid']} is still training in {self.path}.")

    @staticmethod
    def is_live(state: dict[str, Any]) -> bool:
        """Whether the process that wrote this state still runs (known only on the machine that it runs on)."""
        if state["status"] != RUNNING or state.get("host") != socket.gethostname() or state.get("pid") == os.getpid():
            return False
        try:
            os.kill(int(state["pid"]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def check_writable(self) -> None:
        """Raises RecipeError if nothing can be written here."""
        probe = self.path / ".probe"
        try:
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise RecipeError(f"training.output_dir: cannot write in {self.path} ({error.strerror}).") from error

    def check_shared(self) -> None:
        """Raises RecipeError if the folder that rank 0 made is not seen here."""
        if not self.path.is_dir():
            raise RecipeError(
                f"training.output_dir: {self.path.resolve()} is not there on {socket.gethostname()}, though rank 0 "
                "made it. Name a folder on a file system that all machines share."
            )

    def discard(self) -> None:
        """Take away what `create` made: for a run that ended before its first step."""
        for entry in list(self.path.iterdir()) if self.path.is_dir() else []:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: somebody else's files came to lie there
                folder.rmdir()

    # -- state ----------------------------------------------------------------------------------------------------

    def read_state(self) -> dict[str, Any] | None:
        """The contents of run.json, or None if this is not a run folder."""
        try:
            state = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{self.path / 'run.json'} is damaged: {error}") from error
        if not isinstance(state, dict) or state.get("status") not in (RUNNING, STOPPED, COMPLETE):
            raise RecipeError(f"{self.path / 'run.json'} is damaged: no status of running, stopped or complete.")
        return state

    def write_state(self, status: str, **facts: Any) -> None:
        """Set the status, keeping what was recorded before and adding `facts`."""
        state = self.read_state() or {}
        state.update(facts)
        state.update(status=status, pid=os.getpid(), host=socket.gethostname())
        self.write_json("run.json", state)

    # -- artefacts ------------------------------------------------------------------------------------------------

    def write_text(self, name: str, text: str) -> Path:
        """Write one file, whole or not at all."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def write_json(self, name: str, value: Any) -> Path:
        return self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    @contextlib.contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """A scratch folder whose files are renamed into the run folder at the end, `*config.json` last.

        A reader that finds the config finds the weights too. On an error nothing of it stays.
        """
        scratch = self.path / f".{name}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            open_to_readers(scratch)
            for file in sorted(scratch.iterdir(), key=lambda file: (file.name.endswith("config.json"), file.name)):
                file.replace(self.path / file.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def commit_checkpoint(self, staged: Path) -> Path:
        """Move a fully written checkpoint folder into place, with a list of its files and their sizes."""
        open_to_readers(staged)
        sizes = {
            str(file.relative_to(staged)): file.stat().st_size for file in sorted(staged.rglob("*")) if file.is_file()
        }
        (staged / _MANIFEST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
        target = self.checkpoints / staged.name
        if target.exists():  # the same step saved again, by a run resumed from before it
            shutil.rmtree(target)
        staged.replace(target)
        return target

    def list_checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first. A folder without its list of files was never finished and does not count."""
        if not self.checkpoints.is_dir():
            return []
        found = [folder for folder in self.checkpoints.glob("checkpoint-*") if (folder / _MANIFEST).is_file()]
        return sorted(found, key=lambda folder: int(folder.name.rpartition("-")[2]))

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint, checked against its list of files; None if none was written yet.

        Raises:
            RecipeError: a file of it is missing or has another size than was written.
        """
        found = self.list_checkpoints()
        if not found:
            return None
        newest = found[-1]
        for name, size in json.loads((newest / _MANIFEST).read_text(encoding="utf-8")).items():
            file = newest / name
            actual = file.stat().st_size if file.is_file() else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual:,} bytes where {size:,} were written"
                older = f"to resume from {found[-2].name}" if len(found) > 1 else "and start again"
                raise RecipeError(f"--resume: {file} {state}: the checkpoint is damaged. Delete {newest} {older}.")
        return newest
