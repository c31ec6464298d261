"""When a run is evaluated if its recipe does not say, and what a resumed run keeps of its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssm_tune.recipe import RecipeError, recipe_from_dict
from ssm_tune.training_arguments import WINDOW, build_arguments, rows_per_step


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, "epoch"),
        ({"eval_steps": 10}, "steps"),
        ({"eval_steps": 10, "eval_strategy": "epoch"}, "epoch"),
        ({"eval_steps": 10, "save_steps": 20, "load_best_model_at_end": True}, "steps"),
        ({"save_strategy": "epoch", "load_best_model_at_end": True}, "epoch"),
        ({"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "loss"}, "epoch"),
    ],
)
@pytest.mark.parametrize("as_objects", [True, False])
def test_runs_with_held_out_rows_are_evaluated(
    tmp_path: Path, training: dict[str, Any], expected: str, as_objects: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval_fraction": 0.1}
    sections = {} if as_objects else {"model": {"name": "owner/name"}, "data": data}
    recipe = recipe_from_dict({"training": training, **sections}, where="test", complete=not as_objects)
    arguments, said = build_arguments(recipe, "sft", tmp_path, has_eval=True)
    assert arguments.eval_strategy == expected
    assert sum(line.startswith("eval_strategy: ") for line in said) == ("eval_strategy" not in training)


@pytest.mark.parametrize(
    ("batch", "before", "expected"),
    [
        (2, {"rows_per_step": 8, "processes": 4}, (2, 4)),  # one process takes all micro-batches
        (3, {"rows_per_step": 8, "processes": 2}, (2, 4)),  # and smaller ones, where those do not divide
        (2, {"rows_per_step": 8, "processes": 1}, (2, 1)),  # as many processes as before: what the recipe says now
        (2, {}, (2, 1)),  # a checkpoint that does not know
    ],
)
def test_another_number_of_processes_keeps_the_rows_of_a_step(
    tmp_path: Path, batch: int, before: dict[str, int], expected: tuple[int, int]
) -> None:
    (tmp_path / WINDOW).write_text(json.dumps(before))
    recipe = recipe_from_dict({"training": {"per_device_train_batch_size": batch}}, where="test", complete=False)
    arguments, said = build_arguments(recipe, "sft", tmp_path, has_eval=False, checkpoint=tmp_path)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == expected
    assert any("as many rows a step as before" in line for line in said) == (expected[1] > 1)
    assert rows_per_step(arguments) == expected[0] * expected[1]


def test_processes_that_cannot_share_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / WINDOW).write_text(json.dumps({"rows_per_step": 8, "processes": 2}))
    monkeypatch.setenv("WORLD_SIZE", "3")
    recipe = recipe_from_dict({"training": {"per_device_train_batch_size": 4}}, where="test", complete=False)
    with pytest.raises(RecipeError, match="8 rows a step on 2 processes; 3 processes cannot have equal parts"):
        build_arguments(recipe, "sft", tmp_path, has_eval=False, checkpoint=tmp_path)
