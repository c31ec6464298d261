from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ssm_tune.data import demo
from ssm_tune.recipe import RecipeError

SPLITS = [(name, split) for name in demo.NAMES for split in demo.SPLITS]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], list[dict[str, str]]]:
    return {(name, split): demo.read_demo(name, split) for name, split in SPLITS}


def test_there_is_enough_to_learn_from(rows):
    assert 1000 < len(rows[demo.QUESTIONS, "train"]) < 5000
    assert 100 < len(rows[demo.QUESTIONS, "eval"]) < 1000
    assert sum(len(row["text"]) for row in rows[demo.TEXT, "train"]) > 500_000


def test_no_topic_is_both_trained_on_and_evaluated(rows):
    trained = {row["topic"] for name in demo.NAMES for row in rows[name, "train"]}
    held = {row["topic"] for name in demo.NAMES for row in rows[name, "eval"]}
    assert held and trained and not held & trained


def test_no_answer_is_both_trained_on_and_evaluated(rows):
    for name, key in ((demo.QUESTIONS, "answer"), (demo.TEXT, "text")):
        trained = {row[key] for row in rows[name, "train"]}
        assert not [row for row in rows[name, "eval"] if row[key] in trained]


def test_answers_are_short_clean_sentences(rows):
    for row in rows[demo.QUESTIONS, "train"] + rows[demo.QUESTIONS, "eval"]:
        assert 40 <= len(row["answer"]) <= 320
        assert row["question"].endswith("?") and row["question"].count("?") == 1
        assert row["answer"] == " ".join(row["answer"].split())
        assert not row["answer"].endswith(":")


def test_a_well_known_function_is_explained(rows):
    both = rows[demo.QUESTIONS, "train"] + rows[demo.QUESTIONS, "eval"]
    found = {row["question"]: row for row in both}["What does shlex.quote do?"]
    assert found["answer"] == "Return a shell-escaped version of the string *s*."
    assert found["topic"] == "shlex"


def test_another_process_reads_the_same_rows(rows):
    program = (
        "from ssm_tune.data.demo import *; import hashlib, json;"
        "print(hashlib.sha256(json.dumps([read_demo(n, s) for n in NAMES for s in SPLITS]).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    run = [sys.executable, "-c", program]
    other = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
    import hashlib
    import json

    here = hashlib.sha256(json.dumps([rows[key] for key in SPLITS]).encode()).hexdigest()
    assert other.stdout.strip() == here


def test_without_the_language_reference_the_library_remains(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    demo._entries.cache_clear()
    try:
        assert len(demo.read_demo(demo.QUESTIONS)) > 1000
    finally:
        demo._entries.cache_clear()


def test_a_python_without_documentation_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr(demo, "_COMPILED", ())
    monkeypatch.setattr(demo, "_library", lambda: tmp_path)
    demo._entries.cache_clear()
    try:
        with pytest.raises(RecipeError, match="installed without most of it"):
            demo.read_demo(demo.QUESTIONS)
    finally:
        demo._entries.cache_clear()


def test_an_unknown_split_is_refused():
    with pytest.raises(RecipeError, match=r"no split 'test'. It has: train, eval"):
        demo.read_demo(demo.QUESTIONS, "test")
