"""Evaluation through lm-eval, on tasks made here: the loaded model is what is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finished import stir
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.adapter import apply_adapter
from ssm_tune.mixers import patch_model
from ssm_tune.outputs import evaluate
from ssm_tune.outputs.evaluate import evaluate_model
from ssm_tune.outputs.measurements import measure_source
from ssm_tune.outputs.run import Run
from ssm_tune.recipe import AdapterSection, RecipeError

MakeRun = Callable[..., tuple[Path, Any]]
MORE = ("mamba2", "falcon_mamba", "zamba2", "jamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2", "zamba")
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


def write_task(folder: Path, name: str, **changes: Any) -> None:
    task = yaml.safe_load((folder / "letters.yaml").read_text())
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, "task": name, **changes}))


def test_data_that_cannot_be_had_is_one_clear_mistake(tasks: Path) -> None:
    wrong = ["nowhere", "offline", "other_split", "other_column"]
    write_task(tasks, "nowhere", dataset_path="json", dataset_kwargs={"data_files": {"test": "/no/such/rows.jsonl"}})
    write_task(tasks, "offline", dataset_path="nobody/nothing", dataset_kwargs={})
    write_task(tasks, "other_split", test_split="held_out")
    write_task(tasks, "other_column", doc_to_text="{{question.words}}")
    with pytest.raises(RecipeError) as error:
        evaluate_model(
            patch_model(tiny_model("mamba")),
            tiny_tokenizer(),
            ",".join(["letters", *wrong]),
            include_path=tasks,
        )
    assert [message.split(": ")[1] for message in error.value.mistakes] == wrong
    assert all("cannot be had" in message and "--include-path" in message for message in error.value.mistakes)
    assert "no/such/rows.jsonl" in error.value.mistakes[0] and "nobody/nothing" in error.value.mistakes[1]


def test_it_is_told_before_the_model_is_loaded(tasks: Path, tmp_path: Path) -> None:
    write_task(tasks, "offline", dataset_path="nobody/nothing", dataset_kwargs={})
    with pytest.raises(RecipeError, match="offline: its rows"):
        measure_source(tmp_path / "no-such-model", tasks="offline", include_path=tasks)


def test_code_is_run_with_leave_alone(tasks: Path) -> None:
    write_task(tasks, "programs", unsafe_code=True)
    model, tokenizer = patch_model(tiny_model("mamba")), tiny_tokenizer(template=None)
    with pytest.raises(RecipeError, match=r"programs runs the code that the model writes.*allow_code_execution"):
        evaluate_model(model, tokenizer, "programs", include_path=tasks)
    results = evaluate_model(model, tokenizer, "programs", include_path=tasks, limit=2, allow_code_execution=True)
    assert "programs" in results["results"] and "HF_ALLOW_CODE_EVAL" not in os.environ


def test_patterns_stand_for_tasks(tasks: Path) -> None:
    write_task(tasks, "letters_too")
    results = evaluate_model(
        patch_model(tiny_model("mamba")), tiny_tokenizer(template=None), "letters*", include_path=tasks, limit=2
    )
    assert set(results["results"]) == {"letters", "letters_too"}


@pytest.mark.parametrize("kind", ["mamba", "bamba", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_batches_change_no_answer(kind: str, tasks: Path) -> None:
    """Log-likelihoods of choices, of whole texts, and generated texts, each told by lm-eval's own samples."""
    write_task(
        tasks, "rolling", output_type="loglikelihood_rolling", doc_to_target="{{question}}{{choices}}", doc_to_text=""
    )
    rolling = yaml.safe_load((tasks / "rolling.yaml").read_text())
    rolling["metric_list"] = [{"metric": "word_perplexity"}]
    del rolling["doc_to_choice"]
    (tasks / "rolling.yaml").write_text(yaml.safe_dump(rolling))
    written = {
        **rolling,
        "task": "written",
        "output_type": "generate_until",
        "doc_to_text": "{{question * (label + 1)}}",
    }
    written |= {"generation_kwargs": {"until": ["#"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]}
    (tasks / "written.yaml").write_text(yaml.safe_dump(written))
    names, manager = evaluate.find_tasks("letters,rolling,written", tasks)
    model, tokenizer = patch_model(tiny_model(kind)), tiny_tokenizer(template=None)
    said = []
    for size in (1, 4):
        loaded = evaluate.load_tasks(names, manager)
        with evaluate.evaluating(model):
            language_model = HFLM(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=size, device="cpu"
            )
            found = simple_evaluate(
                model=language_model, tasks=loaded, task_manager=manager, limit=6, batch_size=size, bootstrap_iters=0
            )
        said.append({name: [row["filtered_resps"] for row in rows] for name, rows in found["samples"].items()})
    assert said[0]["written"] == said[1]["written"] and len({str(text) for text in said[0]["written"]}) > 1
    for name in ("letters", "rolling"):
        flat = [
            torch.tensor([float(str(n).strip("()").split(",")[0]) for row in one[name] for n in row]) for one in said
        ]
        torch.testing.assert_close(*flat, rtol=0, atol=1e-3)
