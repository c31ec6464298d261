"""Evaluation through lm-eval, on tasks made here: the loaded model is what is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finished import stir
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.adapter import apply_adapter
from ssm_tune.mixers import patch_model
from ssm_tune.outputs import evaluate
from ssm_tune.outputs.evaluate import evaluate_model
from ssm_tune.outputs.run import Run
from ssm_tune.recipe import AdapterSection, RecipeError

MakeRun = Callable[..., tuple[Path, Any]]
ROWS = [
    {"question": f"Which letter is number {i}?", "choices": ["a", "b and c", "d"], "label": i % 3} for i in range(12)
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1.0},
    }
    (folder / "letters.yaml").write_text(yaml.safe_dump(task))
    return folder


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any) -> float:
    """The same, by hand: the choice with the highest log-likelihood after the question and a space."""
    right = 0
    for row in ROWS:
        scores = []
        for choice in row["choices"]:
            context, whole = (tokenizer(text)["input_ids"] for text in (row["question"], f"{row['question']} {choice}"))
            logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
            scores.append(sum(float(logits[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        right += scores.index(max(scores)) == row["label"]
    return right / len(ROWS)


def test_what_is_measured_is_this_model(tasks: Path) -> None:
    tokenizer = tiny_tokenizer(template=None)
    model = apply_adapter(patch_model(tiny_model("mamba")), AdapterSection(r=4))
    stir(model)
    model.train()
    keys = {"include_path": tasks}
    one = evaluate_model(model, tokenizer, ["letters"], batch_size=1, **keys)
    several = evaluate_model(model, tokenizer, "letters", batch_size=5, **keys)
    assert model.training
    assert one["results"]["letters"]["acc,none"] == pytest.approx(accuracy(model.eval(), tokenizer))
    assert several["results"]["letters"]["acc,none"] == one["results"]["letters"]["acc,none"]
    assert one["n-samples"]["letters"]["effective"] == len(ROWS)


def test_a_run_writes_eval_json(tasks: Path, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    results = Run.load(folder).evaluate(["letters"], limit=4, include_path=tasks)
    assert json.loads((folder / "eval.json").read_text()) == results
    assert results["n-samples"]["letters"]["effective"] == 4


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        ([], {}, "no task is named"),
        ("letters", {"limit": 0}, "limit: 0"),
        ("letters", {"batch_size": 0}, "batch_size: 0"),
    ],
)
def test_mistakes_are_told(names: Any, settings: dict[str, Any], said: str, tasks: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        evaluate_model(tiny_model("mamba"), tiny_tokenizer(), names, include_path=tasks, **settings)


def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"ssm-tune\[eval\]"):
        evaluate_model(tiny_model("mamba"), tiny_tokenizer(), "letters")


@pytest.mark.slow
def test_unknown_tasks_are_named_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"no task 'hellaswagg'. Did you mean .*hellaswag"):
        evaluate_model(tiny_model("mamba"), tiny_tokenizer(), "hellaswagg")
