"""Where recipes come from: the package, the folder of the recipe, Python values."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ssm_tune.recipe import AdapterSection, Recipe, RecipeError, load_recipe, recipe_from_dict
from ssm_tune.shipped import shipped


def test_a_shipped_recipe_by_name_though_a_folder_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    recipe = load_recipe("demo")
    assert recipe.name == "demo"
    assert recipe.source == shipped("recipes", "demo.yaml").resolve()
    assert recipe.text == shipped("recipes", "demo.yaml").read_text()


@pytest.mark.parametrize("path", sorted(shipped("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_parse_and_read_back_equal(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path.stem)
    assert recipe.training["output_dir"] == f"runs/{path.stem}"
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


def test_the_recipes_that_are_promised_are_there() -> None:
    promised = "mamba-130m-full mamba-1.4b-lora mamba-2.8b-lora mamba2-130m-full mamba2-1.3b-lora mamba2-2.7b-qlora"
    promised += " codestral-lora falcon-mamba-lora falcon-mamba-qlora zamba2-lora gsm8k demo"
    assert set(promised.split()) <= {path.stem for path in shipped("recipes").glob("*.yaml")}


def test_reading_the_largest_shipped_recipe_is_quick() -> None:
    start = time.perf_counter()
    load_recipe("demo")
    assert time.perf_counter() - start < 0.5


def test_paths_are_beside_the_recipe_then_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder in (beside, elsewhere):
        folder.mkdir()
        (folder / "rows.jsonl").write_text("{}\n")
    (beside / "model").mkdir()
    text = "model: {name: model}\ndata: {train: [{path: rows.jsonl}, {path: org/set}], eval: [{path: demo.yaml}]}\n"
    (beside / "x.yaml").write_text(text)
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(beside / "x.yaml", ["data.train.2.path=rows.jsonl"])
    assert recipe.model.name == str(beside / "model")
    assert [source.path for source in recipe.data.train] == [
        str(beside / "rows.jsonl"),
        "org/set",
        str(elsewhere / "rows.jsonl"),
    ]
    assert recipe.data.eval is not None
    assert recipe.data.eval[0].path == str(shipped("recipes", "demo.yaml"))


def test_recipe_from_python_values() -> None:
    recipe = recipe_from_dict({"training": {"report_to": ("none",)}, "adapter": {"r": 4}}, complete=False)
    assert recipe == Recipe(adapter=AdapterSection(r=4), training={"report_to": ["none"]})


def test_python_values_that_a_recipe_cannot_hold() -> None:
    with pytest.raises(RecipeError) as error:
        recipe_from_dict({"training": {"learning_rate": object(), "seed": "x"}}, where="tune()", complete=False)
    assert len(error.value.mistakes) == 2
    assert "tune(): training.learning_rate holds the Python type object" in error.value.mistakes[0]
