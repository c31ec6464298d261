"""Evaluation by lm-eval's Python interface, on a model that is loaded and patched already."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch import nn

from ssm_tune.outputs import tasks as own_tasks
from ssm_tune.outputs.generate import compute_scope, evaluating
from ssm_tune.outputs.tasks.lengths import counting_with
from ssm_tune.recipe import RecipeError


def evaluate_model(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    limit: int | float | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    allow_code_execution: bool = False,
) -> dict[str, Any]:
    """Results of lm-eval tasks in lm-eval's own schema, without the single samples.

    Args:
        tasks: names of lm-eval tasks, or of this package's own (see `outputs.tasks`), in a list or with commas.
        limit: rows of each task (from 1), or a share of them (below 1); None: all.
        max_length: longest context in tokens; None: what this package's own tasks need, else the model's own, and 2048
            for a model that knows no limit.
        include_path: a folder with further task files; if all tasks are in it, lm-eval's own are not even read.
        allow_code_execution: let tasks run the code that the model writes.

    Raises:
        RecipeError: lm-eval is not installed; an unknown task; a task whose data cannot be had, or that runs code
            without leave; a limit or batch size that is not positive.
    """
    if limit is not None and limit <= 0:
        raise RecipeError(f"evaluation.limit: {limit!r} must be above 0.")
    if batch_size < 1:
        raise RecipeError(f"batch_size: {batch_size!r} must be 1 or more.")
    names, manager = find_tasks(tasks, include_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable

    with counting_with(tokenizer), _code_execution(allow_code_execution):
        loaded = load_tasks(names, manager, allow_code_execution)
    with evaluating(model), compute_scope(model), _code_execution(allow_code_execution):
        language_model = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=own_tasks.context_needed(names) if max_length is None else max_length,
            device=str(next(model.parameters()).device),
        )
        results = simple_evaluate(
            model=language_model,
            tasks=loaded,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            log_samples=False,
            confirm_run_unsafe_code=allow_code_execution,
        )
    return json.loads(json.dumps(results, default=handle_non_serializable))


def load_tasks(names: Sequence[str], manager: Any, allow_code_execution: bool = False) -> list[Any]:
    """lm-eval's tasks and groups with their rows, by the names that `find_tasks` gave.

    Raises:
        RecipeError: the rows, or the code that judges answers, cannot be had here; a task that runs what the model
            writes without leave. All such tasks are named.
    """
    loaded: list[Any] = []
    mistakes = []
    for name in dict.fromkeys(known for pattern in names for known in manager.match_tasks([pattern])):
        try:
            found = manager.load([name])
        except _UNREADABLE as error:
            mistakes.append(_explain(name, error, allow_code_execution))
            continue
        unsafe = [task for task, one in found["tasks"].items() if getattr(one, "UNSAFE_CODE", False)]
        if unsafe and not allow_code_execution:
            mistakes.append(_RUNS_CODE.format(name=", ".join(unsafe)))
        loaded += [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    if mistakes:
        raise RecipeError(mistakes)
    return loaded


_RUNS_CODE = (
    "evaluation.tasks: {name} runs the code that the model writes, on this machine. Allow it with "
    "evaluation.allow_code_execution: true (--allow-code-execution), best in a container, or leave the task out."
)
# What reading a task's data raises: no network, no such data set or file, rows that are not of its kind or lack a
# column that its texts name, a package that its code imports.
_UNREADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, TemplateError)


def _explain(name: str, error: Exception, allow_code_execution: bool) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if "HF_ALLOW_CODE_EVAL" in words and not allow_code_execution:
        return _RUNS_CODE.format(name=name)
    return (
        f"evaluation.tasks: {name}: its rows or its metric cannot be had ({words[:300]}). Run it once where there is a "
        "network (both are kept), or give a task file of your own whose dataset_path is json and whose dataset_kwargs "
        "name your rows (--include-path)."
    )


@contextmanager
def _code_execution(allowed: bool) -> Iterator[None]:
    """The metrics that run code ask the environment for leave."""
    before = os.environ.get(_LEAVE)
    if allowed:
        os.environ[_LEAVE] = "1"
    try:
        yield
    finally:
        if allowed and before is None:
            del os.environ[_LEAVE]
        elif allowed:
            os.environ[_LEAVE] = before


_LEAVE = "HF_ALLOW_CODE_EVAL"


def check_tasks(names: Sequence[str], manager: Any, allow_code_execution: bool = False) -> None:
    """Whether the tasks can be loaded; this package's own are left alone, whose rows need the model's tokenizer.

    Raises RecipeError as `load_tasks`.
    """
    own = _read_tasks(None, include_defaults=False)
    foreign = [name for name in names if manager_lacks(own, [name])]
    with _code_execution(allow_code_execution):
        load_tasks(foreign, manager, allow_code_execution)


def find_tasks(tasks: str | Sequence[str], include_path: str | Path | None = None) -> tuple[list[str], Any]:
    """The names of tasks, and the manager that knows them: this package's, those in a folder, lm-eval's own.

    Raises RecipeError: no task, an unknown one, no such folder, lm-eval is not installed.
    """
    names = [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else list(tasks)
    names = [name for name in names if name]
    if not names:
        raise RecipeError("evaluation.tasks: no task is named.")
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("evaluation needs lm-eval: pip install 'ssm-tune[eval]'.")
    if include_path is not None and not Path(include_path).is_dir():
        raise RecipeError(f"include_path: there is no folder {include_path}.")
    # Reading lm-eval's own tasks takes ten seconds; they are left alone where the others are all that is asked for.
    manager = _read_tasks(include_path, include_defaults=False)
    if not manager_lacks(manager, names):
        return names, manager
    manager = _read_installed_tasks() if include_path is None else _read_tasks(include_path, include_defaults=True)
    missing = manager_lacks(manager, names)
    if missing:
        mistakes = []
        for name in missing:
            near = get_close_matches(name, manager.all_tasks, n=3)
            guess = f" Did you mean {' or '.join(near)}?" if near else ""
            mistakes.append(f"evaluation.tasks: lm-eval has no task {name!r}.{guess}")
        raise RecipeError(mistakes)
    return names, manager


@cache
def _read_installed_tasks() -> Any:
    return _read_tasks(None, include_defaults=True)


def _read_tasks(include_path: str | Path | None, *, include_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    folders = [str(folder) for folder in (own_tasks.FOLDER, include_path) if folder is not None]
    return TaskManager(include_path=folders, include_defaults=include_defaults)


def manager_lacks(manager: Any, names: Sequence[str]) -> list[str]:
    """Which of these names (patterns are allowed) the task manager does not know."""
    return [name for name in names if not manager.match_tasks([name])]
