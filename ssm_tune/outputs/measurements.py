"""`ssm-tune eval RUN|MODEL`: tasks and perplexity of one loaded model, printed, and written where they belong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import RunFolder


def measure_source(
    source: str | Path,
    *,
    tasks: str | Sequence[str] | None = None,
    perplexity: str | Path | None = None,
    output: str | Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_length: int | None = None,
    split: str = "train",
    limit: float | None = None,
    batch_size: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """What the command line calls: load a run or a model, measure, print the results and write the files.

    eval.json, perplexity.json and perplexity.png go into `output`; without it, into the run folder, and for a model
    that is no run, nowhere.

    Args:
        tasks: see `evaluate_model`, to which `settings` go too. perplexity: see `measure_perplexity`.
        limit: rows of each task, and documents of perplexity (from 1); below 1, a share of the tasks' rows.
        max_length: the longest context of tasks, and the longest document of perplexity.

    Returns:
        tasks (the results alone) and perplexity, as far as they were asked for.

    Raises:
        RecipeError: nothing to measure, and what `load_source`, `evaluate_model` and `measure_perplexity` refuse.
    """
    if not tasks and perplexity is None:
        raise RecipeError("eval: name tasks (--tasks) or a text (--perplexity).")
    if perplexity is not None and limit is not None and limit != int(limit):
        raise RecipeError(f"limit: {limit!r}: perplexity takes a whole number of documents.")
    if perplexity is None and (window is not None or stride is not None):
        raise RecipeError("window and stride are settings of --perplexity.")
    from ssm_tune.outputs.evaluate import check_tasks, evaluate_model, find_tasks
    from ssm_tune.outputs.model_card import add_results
    from ssm_tune.outputs.perplexity import LONGEST, find_texts, format_perplexity, measure_perplexity, write_perplexity
    from ssm_tune.outputs.run import load_source

    # Before the model is loaded, which may take minutes.
    if perplexity is not None:
        find_texts(perplexity, split)
    if tasks:
        check_tasks(*find_tasks(tasks, settings.get("include_path")), bool(settings.get("allow_code_execution")))
    model, tokenizer = load_source(source)
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(source) if (Path(source) / "run.json").exists() else None
    found: dict[str, Any] = {}
    if perplexity is not None:
        found["perplexity"] = measure_perplexity(
            model,
            tokenizer,
            perplexity,
            split=split,
            window=window,
            stride=stride,
            max_length=LONGEST if max_length is None else max_length,
            limit=None if limit is None else int(limit),
            batch_size=batch_size,
        )
        print(format_perplexity(found["perplexity"]), flush=True)
        if folder is not None:
            _say_written(*write_perplexity(folder, found["perplexity"]))
    if tasks:
        results = evaluate_model(
            model, tokenizer, tasks, limit=limit, batch_size=batch_size, max_length=max_length, **settings
        )
        found["tasks"] = results["results"]
        print(format_results(results))
        if folder is not None:
            _say_written(RunFolder(folder).write_json("eval.json", results))
    if folder is not None and folder == Path(source):
        add_results(folder)
    return found


def format_results(results: dict[str, Any]) -> str:
    """lm-eval's results as a table: a line for each task and metric, with its standard error where there is one."""
    rows = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, comma, choice = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{choice}")
            spread = f"± {error:.4f}" if isinstance(error, float) else ""
            rows.append((task, metric if choice == "none" else f"{metric} ({choice})", f"{value:.4f}", spread))
    if not rows:
        return json.dumps(results["results"], indent=2)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value:>{widths[2]}}  {spread}".rstrip()
        for task, metric, value, spread in rows
    )


def _say_written(*files: Path) -> None:
    for file in files:
        print(f"{file} written", file=sys.stderr)
