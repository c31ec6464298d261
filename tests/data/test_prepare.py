from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import PLAIN_TEMPLATE, tiny_tokenizer

from ssm_tune.data import Collator, PreparedData, check_sources, prepare_data, prompt_ids, training_texts
from ssm_tune.recipe import DataSection, DataSource, RecipeError

TOKENIZER = tiny_tokenizer(None)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(*completions: str, prompt: str = "p") -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": completion} for completion in completions]


def prepare(rows: Any, *, max_length: int | None = 64, tokenizer: Any = TOKENIZER, **settings: Any) -> PreparedData:
    section = DataSection(
        **{key: settings.pop(key) for key in ("too_long", "isolate", "eval_fraction") if key in settings}
    )
    return prepare_data(section, tokenizer, dataset=rows, max_length=max_length, **settings)


def documents(data: Any) -> list[tuple[int, str, str]]:
    """Source row, text and learned text of every document of a token data set, in order."""
    found = []
    for row in data:
        position = 0
        for length, number in zip(row["seq_lengths"], row["rows"], strict=True):
            tokens = row["input_ids"][position : position + length]
            labels = [label for label in row["labels"][position : position + length] if label != -100]
            found.append((number, TOKENIZER.decode(tokens), TOKENIZER.decode(labels)))
            position += length
    return found


def test_rows_become_token_rows():
    data = prepare(pairs("one", "three"))
    assert data.train.column_names == ["input_ids", "labels", "seq_lengths", "rows"]
    assert documents(data.train) == [(0, "pone<e>", "one<e>"), (1, "pthree<e>", "three<e>")]
    assert data.eval is None
    report = data.report
    assert (report.rows, report.sequences, report.documents) == (2, 2, 2)
    assert (report.tokens, report.loss_tokens, report.dropped, report.cut) == (5 + 7, 4 + 6, 0, 0)
    assert report.padding_share == pytest.approx(2 / 14)


def test_question_and_answer_are_two_lines_without_a_template_and_turns_with_one():
    rows = [{"question": "q?", "answer": "a!"}]
    data = prepare(rows)
    assert documents(data.train) == [(0, "q?\na!<e>", "a!<e>")]
    assert "no chat template" in data.report.notes[0]
    saved = tiny_tokenizer(data.chat_template)
    assert prompt_ids(saved, "q?") == TOKENIZER("q?\n")["input_ids"]
    data = prepare(rows, tokenizer=tiny_tokenizer(PLAIN_TEMPLATE))
    assert documents(data.train) == [(0, "<|u|>q?<|a|>a!<e>", "a!<e>")]
    assert data.chat_template is None


def test_exact_prompts_stay_exact_in_generation_too():
    data = prepare(pairs("one"), tokenizer=tiny_tokenizer(PLAIN_TEMPLATE))
    assert documents(data.train) == [(0, "pone<e>", "one<e>")]
    assert prompt_ids(tiny_tokenizer(data.chat_template), "p") == TOKENIZER("p")["input_ids"]
    assert any("adds nothing" in note for note in data.report.notes)


def test_the_end_markers_of_the_template_are_told():
    template = PLAIN_TEMPLATE.replace("<e>", "<|s|>")
    rows = [{"question": "q", "answer": "a"}]
    assert prepare(rows, tokenizer=tiny_tokenizer(template)).end_markers == ["<|s|>"]
    assert prepare(rows, tokenizer=tiny_tokenizer(PLAIN_TEMPLATE)).end_markers == []


@pytest.mark.parametrize("packing", [False, True])
def test_long_rows_are_cut_at_the_end_and_said(packing):
    data = prepare(pairs("a" * 20, "b"), max_length=10, packing=packing)
    assert sorted(documents(data.train)) == [(0, "p" + "a" * 9, "a" * 9), (1, "pb<e>", "b<e>")]
    assert data.report.cut == 1 and data.report.dropped == 0
    assert "1 of 2 rows are longer than 10 tokens: cut at the end, 12 tokens lost" in data.report.notes


def test_long_rows_are_dropped_as_asked_and_said():
    data = prepare(pairs("a" * 20, "b"), max_length=10, too_long="drop")
    assert documents(data.train) == [(1, "pb<e>", "b<e>")]
    assert (data.report.cut, data.report.dropped) == (0, 1)
    assert "1 of 2 rows are longer than 10 tokens: dropped" in data.report.notes


def test_rows_whose_loss_is_cut_away_are_dropped_and_said():
    data = prepare([*pairs("gone", prompt="p" * 30), *pairs("b")], max_length=10)
    assert documents(data.train) == [(1, "pb<e>", "b<e>")]
    assert (data.report.cut, data.report.dropped) == (1, 1)
    assert "1 rows dropped: nothing to learn within the first 10 tokens" in data.report.notes


def test_without_a_limit_nothing_is_cut():
    assert documents(prepare(pairs("a" * 5000), max_length=None).train)[0][2] == "a" * 5000 + "<e>"


def test_nothing_left_is_an_error_that_says_why():
    with pytest.raises(RecipeError) as caught:
        prepare(pairs("a" * 20), max_length=10, too_long="drop")
    assert caught.value.mistakes[0] == "the training data has no usable row left."
    assert "longer than 10 tokens" in caught.value.mistakes[1]


def test_loss_on_the_prompt_too_where_asked_for():
    assert documents(prepare(pairs("one"), completion_only_loss=False).train) == [(0, "pone<e>", "pone<e>")]
    messages = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    assert documents(prepare(messages, completion_only_loss=False).train) == [(0, "q\na<e>", "a<e>")]
    assert documents(prepare(messages, assistant_only_loss=False).train) == [(0, "q\na<e>", "q\na<e>")]


def test_packed_rows_hold_every_document_and_say_their_padding():
    rows = [{"text": "x" * (3 + number % 17)} for number in range(100)]
    data = prepare(rows, max_length=20, packing=True, task="pretrain")
    assert sorted(documents(data.train)) == sorted(
        (n, row["text"] + "<e>", row["text"] + "<e>") for n, row in enumerate(rows)
    )
    report = data.report
    assert report.documents == 100 and report.sequences == len(data.train) < 80
    assert report.padding_share == pytest.approx(1 - report.tokens / (20 * len(data.train)))
    assert report.loss_tokens == report.tokens - 100
    batch = Collator(0, fixed_length=20)([data.train[index] for index in range(len(data.train))])
    assert (batch["labels"] != -100).sum() == report.loss_tokens
    assert (batch["seq_idx"] >= 0).sum() == report.tokens


def test_documents_cross_only_where_asked_for():
    rows = [{"text": "x" * 13}, {"text": "y" * 11}]
    data = prepare(rows, max_length=10, packing=True, task="pretrain", isolate=False)
    assert [row["seq_lengths"] for row in data.train] == [[10], [10], [6]]
    assert data.report.cut == 0 and data.report.notes == []
    text = "".join(TOKENIZER.decode(row["input_ids"]) for row in data.train)
    assert text in ("x" * 13 + "<e>" + "y" * 11 + "<e>", "y" * 11 + "<e>" + "x" * 13 + "<e>")


def test_long_documents_of_pretraining_are_split_not_lost():
    text = "".join(chr(97 + number % 26) for number in range(50))
    data = prepare([{"text": text}], max_length=16, task="pretrain")
    pieces = [piece for _, piece, _ in documents(data.train)]
    assert pieces[0] + "".join(piece[1:] for piece in pieces[1:]) == text + "<e>"
    assert data.report.cut == 1 and data.report.dropped == 0
    assert data.report.notes == ["1 of 1 rows are longer than 16 tokens: split into pieces, each with a fresh state"]
    assert data.report.loss_tokens == 50


def test_held_out_rows_are_chosen_before_packing():
    rows = [{"text": f"row {number % 40}"} for number in range(80)]
    data = prepare(rows, max_length=32, packing=True, eval_fraction=0.25, seed=3)
    train, held = documents(data.train), documents(data.eval)
    assert not {text for _, text, _ in train} & {text for _, text, _ in held}
    assert sorted(number for number, *_ in train + held) == list(range(80))
    assert data.report.rows == 60 and data.report.eval.rows == 20
    assert data.report.lines()[1].startswith("held out: 20 rows")


def test_held_out_rows_of_their_own(tmp_path, caplog):
    train, held = write(tmp_path / "a.jsonl", pairs("one", "two")), write(tmp_path / "b.jsonl", pairs("two", "three"))
    section = DataSection(train=[DataSource(path=train)], eval=[DataSource(path=held)])
    with caplog.at_level(logging.WARNING):
        data = prepare_data(section, TOKENIZER, max_length=64)
    assert documents(data.eval) == [(2, "ptwo<e>", "two<e>"), (3, "pthree<e>", "three<e>")]
    assert "1 of 2 held-out rows are also in the training data" in caplog.text
    assert [data.row_name(row) for row in (0, 1, 2)] == [f"{train}, line 1", f"{train}, line 2", f"{held}, line 1"]
    with pytest.raises(IndexError, match="no source row 4"):
        data.row_name(4)


def test_rows_in_memory_to_evaluate_on():
    data = prepare(pairs("one"), eval_dataset=pairs("two"))
    assert documents(data.eval) == [(1, "ptwo<e>", "two<e>")]
    assert data.row_name(1) == "eval_dataset, row 0"


def test_weights_repeat_rows_and_say_so(tmp_path):
    first, second = write(tmp_path / "a.jsonl", pairs("a")), write(tmp_path / "b.jsonl", pairs("b", "c", "d"))
    section = DataSection(train=[DataSource(path=first, weight=1), DataSource(path=second, weight=1)])
    data = prepare_data(section, TOKENIZER, max_length=64)
    assert [number for number, *_ in documents(data.train)] == [0, 0, 0, 1, 2, 3]
    assert f"{first}: every row comes 3 times in an epoch, for its weight" in data.report.notes
    assert data.report.rows == 4 and data.report.documents == 6


def test_the_seed_decides_everything_and_processes_agree(tmp_path):
    """Another process, with another hash seed, comes to the same rows: ranks need not speak to each other."""
    path = write(tmp_path / "a.jsonl", [{"text": f"row {number} " * (number % 7 + 1)} for number in range(100)])
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tiny import tiny_tokenizer;"
        "from ssm_tune.data import prepare_data; from ssm_tune.recipe import DataSection, DataSource;"
        "section = DataSection(train=[DataSource(path=sys.argv[2])], eval_fraction=0.2);"
        "data = prepare_data(section, tiny_tokenizer(), max_length=64, packing=True, seed=0);"
        "print([data.train[:], data.eval[:]])"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1]), path]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "cache")}
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    def here(seed: int) -> str:
        section = DataSection(train=[DataSource(path=path)], eval_fraction=0.2)
        data = prepare_data(section, TOKENIZER, max_length=64, packing=True, seed=seed)
        return str([data.train[:], data.eval[:]])

    assert other.strip() == here(0) != here(1)
    assert not list(tmp_path.rglob("*.arrow")), "nothing is left behind"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True, "max_length": None}, "training.packing needs training.max_length"),
        ({"isolate": False}, "data.isolate: false"),
        ({"max_length": 1}, "training.max_length must be at least 2"),
        ({"eval_fraction": 0.5, "eval_dataset": pairs("x")}, "both name held-out rows"),
        ({"task": "dpo"}, "task must be sft or pretrain"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(RecipeError) as caught:
        prepare(pairs("one", "two"), **settings)
    assert message in str(caught.value)


def test_held_out_rows_have_no_weight(tmp_path):
    path = write(tmp_path / "a.jsonl", pairs("one"))
    section = DataSection(train=[DataSource(path=path)], eval=[DataSource(path=path, weight=2)])
    with pytest.raises(RecipeError, match=r"data.eval.0.weight has no meaning"):
        prepare_data(section, TOKENIZER, max_length=64)


def test_a_light_check_of_all_sources(tmp_path):
    good = write(tmp_path / "a.jsonl", pairs("one", "two"))
    section = DataSection(
        train=[DataSource(path=good), DataSource(path="owner/name")], eval=[DataSource(path="python-docs")]
    )
    notes = check_sources(section)
    assert notes[0] == f"{good}: 2 rows are usable"
    assert notes[1] == "owner/name train: on the Hub, not looked into"
    assert notes[2].startswith("python-docs: 2")
    assert check_sources(section, most=1)[0] == f"{good}: 1 first rows are usable"


def test_the_light_check_tells_all_mistakes_and_needs_no_torch(tmp_path):
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "x"}\n{"text": \n')
    empty = tmp_path / "b.jsonl"
    empty.write_text("")
    program = (
        "import sys; from ssm_tune.data import check_sources; from ssm_tune.recipe import *\n"
        "section = DataSection(train=[DataSource(path=sys.argv[1]), DataSource(path=sys.argv[2])],"
        " eval=[DataSource(path='./c.csv')])\n"
        "try: check_sources(section)\n"
        "except RecipeError as error: print(len(error.mistakes))\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    run = [sys.executable, "-c", program, str(broken), str(empty)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("3\n", "")


def test_texts_for_a_tokenizer(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}])
    assert list(training_texts(DataSection(train=[DataSource(path=rows)]))) == ["q", "a", "r", "b"]
    assert list(training_texts(DataSection(), dataset=[{"text": "x"}])) == ["x"]


def test_report_is_for_readers():
    rows = [{"prompt": "p", "completion": "x" * length, "id": 1} for length in range(1, 30)]
    data = prepare(rows, max_length=16, eval_fraction=0.2)
    text = str(data.report)
    assert data.report.eval.eval is None
    assert "23 rows" in text and "held out: 6 rows" in text and "columns not used: id" in text


def test_of_one_text_only_pretraining_holds_the_end_out():
    text = [{"text": "".join(chr(97 + number % 26) for number in range(200))}]
    data = prepare(text, max_length=16, task="pretrain", eval_fraction=0.1)
    assert documents(data.eval)[-1][1].endswith("qr<e>") and len(data.eval) == 1
    assert data.report.rows == data.report.eval.rows == 1
    with pytest.raises(RecipeError, match="cannot be split"):
        prepare(text, max_length=16, eval_fraction=0.1)
