"""lm-eval's real definitions of the published tasks, on rows in the published columns that lie on this disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import yaml
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model
from ssm_tune.outputs.evaluate import evaluate_model

DEFINITIONS = Path(lm_eval.__file__).parent / "tasks"
ARC = {"choices": {"text": ["a stone", "the sun", "a tree", "ice"], "label": ["A", "B", "C", "D"]}, "answerKey": "B"}
# name -> its definition, and rows as its data set has them
TASKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        [
            {
                "ind": number,
                "activity_label": "Making tea",
                "ctx_a": "A man boils water.",
                "ctx_b": f"he then takes {number} leaves and",
                "ctx": "",
                "endings": ["sleeps.", "[title] pours the water.", "runs away.", "eats the pot."],
                "split": "val",
                "label": str(number % 4),
            }
            for number in range(6)
        ],
    ),
    "piqa": (
        "piqa/piqa.yaml",
        [
            {"goal": f"Open jar {number}", "sol1": "Turn the lid.", "sol2": "Paint the lid.", "label": number % 2}
            for number in range(6)
        ],
    ),
    "arc_easy": (
        "arc/arc_easy.yaml",
        [{"id": str(number), "question": f"What is {number} times as hot?", **ARC} for number in range(6)],
    ),
    "arc_challenge": (
        "arc/arc_challenge.yaml",
        [{"id": str(number), "question": f"Which of {number} gives light?", **ARC} for number in range(6)],
    ),
    "winogrande": (
        "winogrande/default.yaml",
        [
            {
                "sentence": f"The trophy does not fit into case {number} because the _ is too large.",
                "option1": "trophy",
                "option2": "case",
                "answer": str(1 + number % 2),
            }
            for number in range(6)
        ],
    ),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        [{"text": f"She asked {number} times for her coat, and he went to fetch the coat"} for number in range(6)],
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, (definition, rows) in TASKS.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = {
            "include": str(DEFINITIONS / definition),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": dict.fromkeys(("train", "validation", "test"), str(file))},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(changes))
    return tmp_path


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, text: str) -> float:
    before, whole = (tokenizer(part)["input_ids"] for part in (context, context + text))
    logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
    return sum(float(logits[place - 1, whole[place]]) for place in range(len(before), len(whole)))


@pytest.mark.parametrize("kind", ["mamba2", pytest.param("bamba", marks=pytest.mark.slow)])
def test_they_run_offline_and_measure_this_model(kind: str, folder: Path) -> None:
    model, tokenizer = patch_model(tiny_model(kind)), tiny_tokenizer(template=None)
    found = [
        evaluate_model(model, tokenizer, list(TASKS), include_path=folder, batch_size=size, limit=5)["results"]
        for size in (1, 4)
    ]
    assert set(found[0]) == set(TASKS)
    for name in TASKS:
        for metric in {"acc,none", "acc_norm,none"} & found[0][name].keys():
            assert found[0][name][metric] == found[1][name][metric]
    assert found[0]["lambada_openai"]["perplexity,none"] == pytest.approx(
        found[1]["lambada_openai"]["perplexity,none"], rel=1e-3
    )
    right = 0
    for row in TASKS["piqa"][1][:5]:
        question = f"Question: {row['goal']}\nAnswer:"
        scores = [log_likelihood(model, tokenizer, question, f" {row[choice]}") for choice in ("sol1", "sol2")]
        right += scores.index(max(scores)) == row["label"]
    assert found[0]["piqa"]["acc,none"] == right / 5
