"""What was measured after training, in a model card: a table, and the model-index that the Hub reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

_TASK = "text-generation"


def read_results(folder: str | Path) -> list[EvalResult]:
    """The results in a folder's eval.json (lm-eval's schema) and perplexity.json; none if there are no such files."""
    folder, found = Path(folder), []
    if (folder / "eval.json").is_file():
        found += task_results(json.loads((folder / "eval.json").read_text(encoding="utf-8")))
    if (folder / "perplexity.json").is_file():
        found += perplexity_results(json.loads((folder / "perplexity.json").read_text(encoding="utf-8")))
    return found


def task_results(results: Mapping[str, Any]) -> list[EvalResult]:
    """One for each task and metric of lm-eval's results; standard errors are left to eval.json."""
    limit = results.get("config", {}).get("limit")
    found = []
    for task, values in results["results"].items():
        config = results.get("configs", {}).get(task, {})
        given = {"num_few_shot": results.get("n-shot", {}).get(task), "limit": limit}
        for name, value in values.items():
            metric, comma, choice = name.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            found.append(
                EvalResult(
                    task_type=_TASK,
                    task_name="Text generation",
                    dataset_type=_public_name(config.get("dataset_path"), task),
                    dataset_name=task,
                    dataset_config=config.get("dataset_name"),
                    dataset_split=config.get("test_split") or config.get("validation_split"),
                    dataset_args={key: one for key, one in given.items() if one is not None} or None,
                    metric_type=metric,
                    metric_name=metric if choice == "none" else f"{metric} ({choice})",
                    metric_value=round(float(value), 6),
                )
            )
    return found


def perplexity_results(found: Mapping[str, Any]) -> list[EvalResult]:
    """The perplexity of all tokens."""
    if not _is_number(found.get("perplexity")):
        return []
    given = {key: found[key] for key in ("window", "stride") if found.get(key) is not None}
    return [
        EvalResult(
            task_type=_TASK,
            task_name="Text generation",
            dataset_type=_public_name(found["data"], "text"),
            dataset_name=Path(found["data"]).name,
            dataset_args=given or None,
            metric_type="perplexity",
            metric_name="perplexity per token",
            metric_value=round(float(found["perplexity"]), 6),
        )
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _public_name(path: Any, otherwise: str) -> str:
    """A data set's name on the Hub; a file or folder of this machine is nobody else's."""
    if not isinstance(path, str) or not path or path.startswith((".", "/", "~")) or Path(path).exists():
        return otherwise
    return path


def results_table(results: list[EvalResult]) -> str:
    """Markdown; empty if there are no results."""
    if not results:
        return ""
    lines = ["| Evaluated | metric | value | how |", "| --- | --- | --- | --- |"]
    for one in results:
        how = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (one.dataset_args or {}).items())
        lines.append(f"| {one.dataset_name} | {one.metric_name} | {one.metric_value:.4g} | {how} |")
    return "\n".join(lines)
