"""ssm-tune generate: one prompt, streamed or not, and files of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model
from ssm_tune.outputs.answers import answer_source, read_prompts
from ssm_tune.outputs.generate import generate_text, generate_texts, stream_text
from ssm_tune.recipe import RecipeError

MakeRun = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def model() -> Any:
    return patch_model(tiny_model("mamba"))


@pytest.mark.parametrize("settings", [{}, {"stop": ("a",)}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_a_stream_is_the_answer_in_pieces(model: Any, settings: dict[str, Any]) -> None:
    for prompt in ("a", "what is", "and then some more"):
        pieces: list[str] = []
        said = stream_text(model, tiny_tokenizer(), prompt, pieces.append, max_new_tokens=30, **settings)
        assert said == generate_text(model, tiny_tokenizer(), prompt, max_new_tokens=30, **settings)
        streamed = "".join(pieces)
        assert said.startswith(streamed) and not said[len(streamed) :].strip("\ufffd")
        assert len(pieces) > 1 or len(said) < 2


def test_what_ends_the_answer_is_not_streamed() -> None:
    """An end token that the tokenizer does not hold for a special one."""
    model = patch_model(tiny_model("mamba"))
    tokenizer = tiny_tokenizer(template=None)
    pieces: list[str] = []
    settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 1}
    said = stream_text(model, tokenizer, "go on", pieces.append, **settings)
    letter = next(char for char in said[1:] if char.isascii() and char.isprintable())
    model.generation_config.eos_token_id = tokenizer(letter)["input_ids"][0]
    pieces.clear()
    assert stream_text(model, tokenizer, "go on", pieces.append, **settings) == said[: said.index(letter)]
    assert letter not in "".join(pieces)


def test_one_prompt_is_printed_the_same_streamed_or_not(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_run()
    answer_source(folder, prompt="go on", max_new_tokens=8)
    whole = capsys.readouterr().out
    answer_source(folder, prompt="go on", max_new_tokens=8, stream=True)
    assert capsys.readouterr().out.rstrip("\n\ufffd") == whole.rstrip("\n\ufffd")


def test_a_file_of_prompts(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = make_run()
    prompts = ["one", "the second", "3", "four is more", "5"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    answer_source(folder, prompts=file, batch_size=2, max_new_tokens=6, chat=False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    wanted = generate_texts(model, tiny_tokenizer(), prompts, max_new_tokens=6, chat=False)
    assert [line["answer"] for line in lines] == wanted


def test_files_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \nthree")
    (tmp_path / "b.json").write_text('[{"prompt": "one", "n": 1}, {"prompt": "two\\nlines"}]')
    (tmp_path / "c.csv").write_text("prompt,answer\none,1\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", " two ", "three"]
    assert read_prompts(tmp_path / "b.json") == ["one", "two\nlines"]
    assert read_prompts(tmp_path / "c.csv") == ["one"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"prompts": "x"}', "Is it 'prompts'"),
        ("a.jsonl", '{"text": "x"}', "It has: text"),
        ("a.jsonl", '"x"', "no column prompt"),
        ("a.jsonl", '{"prompt": 7}', "line 1: the prompt must be text"),
        ("a.jsonl", '{"prompt": "x"', "line 1"),
        ("a.txt", "\n\n", "empty"),
        ("a.md", "x", "prompts are read from"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=said):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "either"),
        ({"prompt": "a", "prompts": "a.txt"}, "either"),
        ({"prompts": "nothing.txt"}, "no file"),
        ({"prompts": "nothing.txt", "stream": True}, "--stream"),
        ({"prompt": "a", "batch_size": 0}, "batch_size"),
        ({"prompt": " "}, "empty"),
        ({"prompt": "a", "min_p": 2.0}, "min_p"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        answer_source("no/model/here", **asked)
