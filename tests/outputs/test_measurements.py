"""ssm-tune eval: what is printed and written, for runs and for models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.outputs.measurements import format_results, measure_source
from ssm_tune.recipe import RecipeError

MakeRun = Callable[..., tuple[Path, Any]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("Some words. " * 30)
    return file


def test_a_run_is_measured_and_the_files_lie_in_it(
    make_run: MakeRun, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = make_run()
    found = measure_source(folder, tasks="mqar_8,selective_copying_256", perplexity=text, limit=2)
    assert json.loads((folder / "perplexity.json").read_text())["loss"] == found["perplexity"]["loss"]
    assert json.loads((folder / "eval.json").read_text())["results"] == found["tasks"]
    assert (folder / "perplexity.png").stat().st_size > 1000
    said = capsys.readouterr()
    assert "128 to 255" in said.out and "selective_copying_256  acc" in said.out
    assert said.err.count(" written") == 3


def test_a_model_is_measured_and_nothing_is_written_unless_asked(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("mamba2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    before = sorted(folder.iterdir())
    assert measure_source(folder, perplexity=text, window=50)["perplexity"]["window"] == 50
    assert sorted(folder.iterdir()) == before
    measure_source(folder, perplexity=text, output=tmp_path / "out" / "here")
    assert {file.name for file in (tmp_path / "out" / "here").iterdir()} == {"perplexity.json", "perplexity.png"}


def test_a_recipe_asks_for_perplexity_at_the_end_of_its_run(make_run: MakeRun, text: Path) -> None:
    from ssm_tune.closing import _follow_up
    from ssm_tune.outputs.run import Run
    from ssm_tune.recipe import recipe_from_dict

    folder, _ = make_run()
    sections = {
        "model": {"name": "m"},
        "data": {"train": [{"path": str(text)}]},
        "evaluation": {"perplexity": str(text)},
    }
    _follow_up(Run.load(folder), recipe_from_dict(sections))
    assert json.loads((folder / "perplexity.json").read_text())["documents"] == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "--tasks"),
        ({"tasks": ""}, "--tasks"),
        # reads all of lm-eval's tasks
        pytest.param({"tasks": "mqar_9"}, "mqar_8", marks=pytest.mark.slow),
        ({"perplexity": "nothing.txt"}, "nothing.txt"),
        ({"perplexity": "nothing.txt", "limit": 0.5}, "limit"),
        ({"tasks": "mqar", "window": 5}, "--perplexity"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        measure_source("no/model/here", **asked)


def test_the_table_has_every_metric_with_its_error() -> None:
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.0625, "f1,strict": 1, "f1_stderr,strict": "N/A"}
    lines = format_results({"results": {"task": values, "group": {"alias": "g", "acc,none": 0.25}}}).splitlines()
    assert [line.split() for line in lines] == [
        ["task", "acc", "0.5000", "±", "0.0625"],
        ["task", "f1", "(strict)", "1.0000"],
        ["group", "acc", "0.2500"],
    ]
