from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from ssm_tune.data import sources
from ssm_tune.data.sources import open_rows, open_sources, read_examples
from ssm_tune.recipe import DataSource, RecipeError

ROWS = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(10)]


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def answers(opened: list[sources.Source], task: str = "sft") -> list[str]:
    return [example.messages[1]["content"] for _, example in read_examples(opened, task)]


def test_files_are_read_in_the_order_of_the_recipe(tmp_path):
    first, second = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:4])
    opened = open_sources([DataSource(path=second), DataSource(path=first)])
    assert answers(opened) == ["a2", "a3", "a0", "a1"]
    assert [source.group for source in opened] == [0, 1]
    assert opened[0].place(2) == f"{second}, line 2"


def test_the_files_of_a_folder_are_one_source(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[2:4])
    write(tmp_path / "a.jsonl", ROWS[:2])
    opened = open_sources([DataSource(path=str(tmp_path))])
    assert answers(opened) == ["a0", "a1", "a2", "a3"]
    assert [source.group for source in opened] == [0, 0]


@pytest.mark.parametrize(
    ("split", "expected"), [("train[:3]", "012"), ("train[7:]", "789"), ("train[:20%]", "01"), ("train[-2:]", "89")]
)
def test_parts_of_a_file(tmp_path, split, expected):
    opened = open_sources([DataSource(path=write(tmp_path / "a.jsonl", ROWS), split=split)])
    assert answers(opened) == [f"a{digit}" for digit in expected]
    assert opened[0].numbers == [int(digit) + 1 for digit in expected], "a part's rows keep their lines"


@pytest.mark.parametrize("name", ["python-docs", "python-docs-text"])
def test_the_demo_corpus_is_known_by_its_name(name):
    [source] = open_sources([DataSource(path=name, split="eval[:5]")])
    task = "pretrain" if name.endswith("text") else "sft"
    assert len([example for _, example in read_examples([source], task)]) == 5
    assert source.notes == [], "the column topic is not of interest"


def test_a_file_of_the_demos_name_is_the_users(tmp_path, monkeypatch):
    write(tmp_path / "python-docs" / "a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert len(answers(open_sources([DataSource(path="python-docs")]))) == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows,
        tuple,
        iter,
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    ],
)
def test_rows_in_memory(make):
    [source] = open_rows(make(ROWS))
    assert answers([source]) == [row["answer"] for row in ROWS]
    assert source.place(3) == "dataset, row 3" and source.numbers == list(range(10))


def test_a_data_frame_is_rows():
    pandas = pytest.importorskip("pandas")
    assert answers(open_rows(pandas.DataFrame(ROWS))) == [row["answer"] for row in ROWS]


def test_a_path_in_the_place_of_rows(tmp_path):
    assert len(answers(open_rows(write(tmp_path / "a.jsonl", ROWS)))) == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (datasets.IterableDataset.from_generator(lambda: iter(ROWS)), "an IterableDataset has no fixed rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "DatasetDict holds several.*train"),
        ({"question": ["x"]}, "dict holds several.*question"),
        (3, "must be a list of dicts or a datasets.Dataset, not int"),
        ([], "there is no usable row"),
    ],
)
def test_what_is_no_rows_is_refused(rows, message):
    with pytest.raises(RecipeError, match=rf"^dataset: .*{message}|^dataset: {message}"):
        answers(open_rows(rows))


def test_wrong_rows_are_told_several_at_once(tmp_path):
    rows = [ROWS[0], {"question": "x"}, ROWS[1], {"question": 1, "answer": "y"}, ROWS[2]]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(RecipeError) as caught:
        answers(open_sources([DataSource(path=path)]))
    assert [mistake.split(":")[0] for mistake in caught.value.mistakes] == [f"{path}, line 2", f"{path}, line 4"]


def test_reading_stops_after_a_few_mistakes(tmp_path):
    path = write(tmp_path / "a.jsonl", [ROWS[0]] + [{"question": "x"}] * 1000)
    with pytest.raises(RecipeError) as caught:
        answers(open_sources([DataSource(path=path)]))
    assert len(caught.value.mistakes) == 6 and "may be more" in caught.value.mistakes[-1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": ""}, "data.train.0.path is missing"),
        ({"path": "./none.jsonl"}, "none.jsonl: no such file or folder"),
        ({"path": "rows.jsonl"}, "rows.jsonl: no such file or folder"),
        ({"path": "a b/c"}, "'a b/c' is neither a file here nor a Hub name"),
        ({"path": "a/b/c"}, "'a/b/c' is neither a file here nor a Hub name"),
        ({"path": "a/b", "split": "train[x]"}, "'train[x]' is not a split"),
        ({"path": "a/b", "columns": {"q": "prompt", "a": "completion"}}, "the other way round"),
    ],
)
def test_sources_that_are_none_are_refused(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        open_sources([DataSource(**source)])
    assert message in str(caught.value)


def test_all_mistakes_of_a_list_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        open_sources([DataSource(path="./a.jsonl"), DataSource(path="b c"), DataSource(path="python-docs")])
    assert len(caught.value.mistakes) == 2


class Hub:
    """Stands in for `datasets.load_dataset`: one data set with subsets, which must be named."""

    def __init__(self, *subsets: str) -> None:
        self.subsets, self.asked = subsets, []

    def load_dataset(self, name: str, subset: str | None = None, *, split: str) -> datasets.Dataset:
        self.asked.append((name, subset, split))
        if self.subsets and subset is None:
            raise ValueError(f"Config name is missing.\nPlease pick one among the available configs: {self.subsets}")
        if name == "owner/broken":
            raise ValueError("Unknown split 'nope'. Should be one of ['train'].")
        return datasets.Dataset.from_list(ROWS)

    def names(self, name: str) -> list[str]:
        return list(self.subsets)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stand_in(*subsets: str) -> Hub:
        fake = Hub(*subsets)
        monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
        monkeypatch.setattr(datasets, "get_dataset_config_names", fake.names)
        return fake

    return stand_in


def test_a_hub_data_set(hub):
    fake = hub()
    [source] = open_sources([DataSource(path="owner/name", split="test[:50]")])
    assert source.remote and fake.asked == [], "nothing is fetched until it is read"
    assert answers([source]) == [row["answer"] for row in ROWS]
    assert fake.asked == [("owner/name", None, "test[:50]")]
    assert source.place(3) == "owner/name test[:50], row 3"


def test_subsets_of_a_hub_data_set(hub):
    fake = hub("socratic", "main")
    answers(open_sources([DataSource(path="openai/gsm8k")]))
    assert fake.asked[-1] == ("openai/gsm8k", "main", "train")
    answers(open_sources([DataSource(path="openai/gsm8k:socratic")]))
    assert fake.asked[-1] == ("openai/gsm8k", "socratic", "train")
    hub("en", "de")
    with pytest.raises(RecipeError, match=r"write owner/name:en, one of \['en', 'de'\]"):
        answers(open_sources([DataSource(path="owner/name")]))


def test_what_the_hub_refuses_is_told(hub):
    hub()
    with pytest.raises(RecipeError, match=r"data.train.0.path: owner/broken \(split train\) could not be loaded.*nope"):
        answers(open_sources([DataSource(path="owner/broken")]))


def test_offline_a_hub_name_is_a_clear_mistake(tmp_path, monkeypatch):
    write(tmp_path / "my-rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError, match=r"could not be loaded from the Hub \(did you mean the file my-rows.jsonl\?\)"
    ):
        answers(open_sources([DataSource(path="my-rows")]))
