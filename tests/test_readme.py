"""The README's blocks: commands that parse, recipes that read, Python that runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ssm_tune import cli
from ssm_tune.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language} block"
    return found


def commands() -> list[str]:
    """Every ssm-tune command of the bash blocks and of the table."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    found = [match.group(1) for line in lines for match in re.finditer(r"(?:^|/bin/)ssm-tune ([^&]*)", line)]
    found += re.findall(r"^\| `ssm-tune ([^`]*)`", README, re.MULTILINE)
    assert len(found) > 8
    return found


@pytest.mark.parametrize("command", commands())
def test_commands_are_ones(command: str) -> None:
    if command.startswith("recipes ls"):
        command = "recipes ls"
    words = ["2" if word == "N" else word for word in shlex.split(command)]
    assert cli.parse_arguments(words).command == words[0]


def test_recipes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for number, block in enumerate(blocks("yaml")):
        (tmp_path / f"{number}.yaml").write_text(block)
        load_recipe(tmp_path / f"{number}.yaml")
    for command in commands():
        arguments = cli.parse_arguments(["2" if word == "N" else word for word in shlex.split(command)])
        name = vars(arguments).get("recipe", "RECIPE").removesuffix(".yaml")
        if name != "RECIPE":
            load_recipe(name, arguments.overrides)


def test_the_error_shown_is_the_error_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.yaml").write_text(blocks("yaml")[0].replace("learning_rate", "learning_rat"))
    (tmp_path / "recipes" / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="learning_rat") as error:
        load_recipe("recipes/x.yaml")
    assert str(error.value) + "\n" in blocks("text")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [line for line in README.splitlines() if re.match(r"^python3 .*-m pytest", line)]
    assert len(lines) == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_files_that_it_names_are_there() -> None:
    folders = r"(?:ssm_tune|tests|recipes|examples|\.ci)/[\w./]*"
    named = re.findall(rf"`({folders}|pyproject\.toml|\./install_gpu\.sh)`", README)
    named += re.findall(r"\]\(([\w./]+)\)", README)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_python_blocks_run(tmp_path: Path) -> None:
    from tiny import tiny_model, tiny_tokenizer

    tiny_model("mamba").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for block in blocks("python"):
        code, replaced = re.subn(r"state-spaces/[\w.-]+", "model", block)
        assert replaced, "a block that loads from the Hub cannot be run here"
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("runs/*/merged/config.json"))


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "tune_in_python.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    difference = re.search(r"logits differ by (\S+)", result.stdout)
    assert difference and float(difference.group(1)) < 1e-4
