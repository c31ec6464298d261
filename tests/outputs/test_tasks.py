"""The tasks of the package: rows by seed, of the length that was asked for, and an lm-eval that reads them rightly."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model
from ssm_tune.outputs import tasks
from ssm_tune.outputs.evaluate import evaluate_model
from ssm_tune.outputs.tasks.lengths import counting_with, find_tokenizer, fit_to_length
from ssm_tune.outputs.tasks.passkey import make_passkey, match_key
from ssm_tune.outputs.tasks.recall import make_induction, make_mqar, make_selective_copying, spread_place
from ssm_tune.outputs.tasks.words import WORDS

SIZES = {"mqar": ["8", "32", "128"], "induction": ["256", "1k", "4k"], "selective_copying": ["256", "1k", "4k"]}
SIZES["passkey"] = [f"{size}k" for size in (1, 2, 4, 8, 16, 32, 64, 128)]


def count(text: str) -> int:
    return len(tiny_tokenizer()(text)["input_ids"])


# How a reader who never errs would answer, by the text alone.
def solve_mqar(text: str) -> str:
    key = text.rsplit("\n", 1)[1].rstrip(":")
    return " " + re.search(rf"^{key}: (\w+)$", text, re.MULTILINE)[1]


def solve_induction(text: str) -> str:
    words = text.split()
    assert words.count(words[-1]) == 2
    return " " + words[words.index(words[-1]) + 1]


def solve_selective_copying(text: str) -> str:
    return " " + " ".join(re.findall(r"[A-Z]", text.removesuffix("Letters:")))


def solve_passkey(text: str) -> str:
    return f" {re.search('[0-9]+', text)[0]}.\nAnd"


SOLVE = {
    "mqar": solve_mqar,
    "induction": solve_induction,
    "selective_copying": solve_selective_copying,
    "passkey": solve_passkey,
}


def make_rows(task: str, rows: int = 8, **settings: Any) -> list[dict[str, Any]]:
    make = {
        "mqar": lambda: make_mqar(**{"pairs": 16, "rows": rows, **settings}),
        "induction": lambda: make_induction(**{"length": 500, "rows": rows, **settings}),
        "selective_copying": lambda: make_selective_copying(**{"length": 500, "rows": rows, **settings}),
        "passkey": lambda: make_passkey(**{"length": 1024, "rows": rows, **settings}),
    }[task]
    with counting_with(tiny_tokenizer()):
        return list(make()["test"])


@pytest.mark.parametrize("task", SOLVE)
def test_the_target_is_what_the_text_says(task: str) -> None:
    rows = make_rows(task)
    assert len(rows) == (32 if task == "mqar" else 8)
    for row in rows:
        said = SOLVE[task](row["text"])
        assert match_key(row, [said])["exact_match"] == 1 if task == "passkey" else said == row["target"]


@pytest.mark.parametrize("task", SOLVE)
def test_rows_come_from_their_seed_alone(task: str) -> None:
    assert make_rows(task) == make_rows(task)
    assert make_rows(task, seed=1) != make_rows(task)
    texts = [row["text"] for row in make_rows(task)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("length", [1024, 5000])
@pytest.mark.parametrize("task", ["induction", "selective_copying", "passkey"])
def test_rows_are_as_long_as_asked_for(task: str, length: int) -> None:
    unit = {"induction": 6, "selective_copying": 2, "passkey": 97}[task]  # by which a text grows
    for row in make_rows(task, rows=3, length=length):
        assert length - unit < count(row["text"]) <= length


def test_128k_tokens() -> None:
    (row,) = make_rows("passkey", rows=1, length=131_072)
    assert 131_072 - 97 < count(row["text"]) <= 131_072


def test_a_length_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least"):
        make_rows("passkey", length=50)
    with pytest.raises(ValueError, match="words for"):
        make_mqar(pairs=1000)


@pytest.mark.parametrize("cost", [lambda size: 3 * size, lambda size: size // 3, lambda size: size**2 // 50])
def test_fitting_finds_the_longest(cost: Any) -> None:
    def tokenizer(text: str) -> dict[str, Any]:
        return {"input_ids": [0] * (5 + cost(int(text)))}

    for length in (5, 6, 17, 400, 1001):
        size = int(fit_to_length(str, length, tokenizer))
        assert 5 + cost(size) <= length < 5 + cost(size + 1)


def test_places_are_spread_however_few_are_taken() -> None:
    places = [spread_place(number) for number in range(15)]
    for taken in (3, 7, 15):
        assert sorted(places[:taken]) == [(number + 1) / (taken + 1) for number in range(taken)]


def test_no_tokenizer_is_told() -> None:
    with pytest.raises(ValueError, match="metadata"):
        find_tokenizer(None)


def test_the_words_are_one_each() -> None:
    assert len(WORDS) >= 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_every_size_is_a_task_and_every_task_a_group() -> None:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks.FOLDER), include_defaults=False)
    assert set(manager.all_groups) == set(SIZES)
    assert set(manager.all_subtasks) == {f"{name}_{size}" for name, sizes in SIZES.items() for size in sizes}


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (["passkey_4k", "mqar"], 4096),
        (["passkey"], 131_072),
        (["mqar"], None),
        (["induct*_1k"], 1024),
        (["piqa"], None),
    ],
)
def test_lm_eval_is_told_how_long_the_rows_are(names: list[str], needed: int | None) -> None:
    assert tasks.context_needed(names) == (None if needed is None else needed + 64)


def test_a_model_that_knows_the_answers_has_them_all_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval with a reader in the model's place: what is compared with what is right in the YAML files."""
    from lm_eval.models.huggingface import HFLM

    def solve(request: Any) -> str:
        return SOLVE[request.task_name.rpartition("_")[0]](request.args[0])

    def measure(self: Any, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return [(0.0, solve(request) == request.args[1]) for request in requests]

    def generate(self: Any, requests: list[Any], **_: Any) -> list[str]:
        return [solve(request) for request in requests]

    monkeypatch.setattr(HFLM, "loglikelihood", measure)
    monkeypatch.setattr(HFLM, "generate_until", generate)
    names = ["mqar", "induction_256", "selective_copying_256", "passkey_4k"]
    results = evaluate_model(patch_model(tiny_model("mamba")), tiny_tokenizer(), names, limit=5)["results"]
    for name in ("mqar", "mqar_8", "induction_256", "selective_copying_256"):
        assert results[name]["acc,none"] == 1.0
    assert results["passkey_4k"]["exact_match,none"] == 1.0


def test_a_model_that_knows_nothing_has_them_wrong() -> None:
    """And reads every token of a row that is longer than lm-eval thinks a model can read."""
    model, longest = patch_model(tiny_model("mamba")), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: longest.append(kwargs.get("input_ids", args[0] if args else None).shape[1]),
        with_kwargs=True,
    )
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)  # as published ones: it knows no limit, and lm-eval takes 2048
    results = evaluate_model(model, tokenizer, "mqar_8,passkey_4k", limit=2)["results"]
    assert results["mqar_8"]["acc,none"] == 0.0
    assert results["passkey_4k"]["exact_match,none"] == 0.0
    assert 4000 - 97 < max(longest) <= 4096
