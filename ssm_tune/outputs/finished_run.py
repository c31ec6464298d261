"""Reading a finished run: what its folder holds, how it was loaded, and a clear word when it is not finished."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssm_tune.adapter import CONFIG_FILE, read_adapter_config
from ssm_tune.recipe import ModelSection, RecipeError, read_model_section
from ssm_tune.run_folder import COMPLETE, RUNNING, RunFolder, locate_base

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FinishedRun:
    """A folder with trained weights. `state` is run.json, None for an adapter or model that is not a run of ours.

    `adapter`: its adapter's configuration, None if the folder holds a whole model. `model`: the recipe's model section.
    """

    folder: Path
    state: dict[str, Any] | None
    adapter: LoraConfig | None
    model: ModelSection

    @property
    def base_name(self) -> str | None:
        """The base model's name or folder; None if the base was made in memory and lies nowhere on disk."""
        name = self.adapter.base_model_name_or_path if self.adapter is not None else None
        return locate_base(self.folder, name) if name else None

    @property
    def revision(self) -> str | None:
        """Of the base model, or of nothing."""
        return self.model.revision if self.adapter is None else self.adapter.revision or self.model.revision

    @property
    def dtype(self) -> str | None:
        """What the frozen weights were loaded in: as the recipe says, else by the device of environment.json.

        None: unknown (an adapter that is not a run of ours).
        """
        file = self.folder / "environment.json"
        if self.model.dtype is not None or not file.exists():
            return self.model.dtype
        return "bfloat16" if json.loads(file.read_text(encoding="utf-8"))["device_type"] == "cuda" else "float32"


def open_finished_run(folder: str | Path, *, only_runs: bool = False) -> FinishedRun:
    """Look into a run folder; with `only_runs=False` also into a folder with nothing but an adapter or a model.

    Raises:
        RecipeError: no such folder; not a run; still running; stopped before its end (it says how to resume).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecipeError(f"{folder}: there is no such folder.")
    run = RunFolder(folder)
    state = run.read_state()
    if state is None and only_runs:
        hint = f" Load a model with load_model({str(folder)!r})." if (folder / "config.json").exists() else ""
        raise RecipeError(f"{folder} is not a run folder: it has no run.json.{hint}")
    if state is not None and state["status"] != COMPLETE:
        raise RecipeError(_explain_unfinished(run, state))
    adapter = read_adapter_config(folder) if (folder / CONFIG_FILE).exists() else None
    if adapter is None and not (folder / "config.json").exists():
        raise RecipeError(f"{folder} holds neither an adapter ({CONFIG_FILE}) nor a model (config.json).")
    return FinishedRun(folder=folder, state=state, adapter=adapter, model=read_model_section(folder))


def _explain_unfinished(run: RunFolder, state: dict[str, Any]) -> str:
    if run.is_live(state):
        return f"{run.path}: the run has not ended yet (process {state['pid']} is training in it). Wait for it."
    how = "was broken off" if state["status"] == RUNNING else "was stopped"
    found = run.list_checkpoints()
    where = f" from {found[-1].name}" if found else ""
    usable = f" To use the weights as they were then, name the folder {found[-1]}." if found else ""
    return f"{run.path}: the run {how} before its end. Resume it{where}: the same command with --resume.{usable}"


def read_metrics(finished: FinishedRun) -> dict[str, Any]:
    """What the run measured: its summary in run.json; without one the last values of metrics.jsonl, {} if none.

    Raises:
        RecipeError: a line that is not JSON.
    """
    if finished.state is not None and "metrics" in finished.state:
        return finished.state["metrics"]
    file = finished.folder / "metrics.jsonl"
    if not file.exists():
        return {}
    metrics: dict[str, Any] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            metrics.update(json.loads(line))
        except ValueError as error:
            raise RecipeError(f"{file}, line {number}: not valid JSON ({error}).") from error
    return metrics


def load_finished_tokenizer(finished: FinishedRun, **keys: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that the run saved, with `keys` changed. Raises RecipeError if there is none, or it is damaged."""
    from ssm_tune.tokenizer import read_tokenizer

    return read_tokenizer(str(finished.folder), None, "the run's tokenizer", **keys)
