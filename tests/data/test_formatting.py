from __future__ import annotations

from typing import Any

import pytest

from ssm_tune.data.formatting import Example, Formatter, check_columns
from ssm_tune.recipe import RecipeError

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}


def format_one(row: Any, columns: dict[str, str] | None = None, task: str = "sft") -> Example:
    return Formatter(columns, task=task).format(row, "rows.jsonl, line 7")


def refusal(row: Any, columns: dict[str, str] | None = None, task: str = "sft") -> str:
    with pytest.raises(RecipeError) as caught:
        format_one(row, columns, task)
    assert str(caught.value).startswith("rows.jsonl, line 7: ")
    return str(caught.value).removeprefix("rows.jsonl, line 7: ")


def turns(*pairs: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, SAID]}, Example("chat", messages=(USER, SAID), part="assistant")),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            Example("chat", messages=(USER, SAID), part="assistant"),
        ),
        ({"prompt": "Hi", "completion": " Hello"}, Example("completion", prompt="Hi", completion=" Hello")),
        ({"prompt": "", "completion": "Hello"}, Example("completion", completion="Hello")),
        ({"prompt": [USER], "completion": [SAID]}, Example("chat", messages=(USER, SAID), loss_from=1)),
        ({"question": "Hi", "answer": "Hello"}, Example("chat", messages=(USER, SAID))),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, Example("chat", messages=(USER, SAID))),
        ({"instruction": "Hi", "output": "Hello"}, Example("chat", messages=(USER, SAID))),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            Example("chat", messages=turns("user", "Add\n\n1 2", "assistant", "3")),
        ),
        ({"text": " a document\n"}, Example("text", text=" a document\n")),
    ],
)
def test_known_shapes(row, expected):
    assert format_one(row) == expected


def test_named_columns():
    row = {"q": "Hi", "a": "Hello", "text": "not this"}
    assert format_one(row, {"prompt": "q", "completion": "a"}) == Example("completion", prompt="Hi", completion="Hello")
    assert format_one(row, {"question": "q", "answer": "a"}) == Example("chat", messages=(USER, SAID))
    assert format_one(row, {"text": "a"}) == Example("text", text="Hello")
    swapped = format_one({"prompt": "P", "completion": "C"}, {"prompt": "completion", "completion": "prompt"})
    assert swapped == Example("completion", prompt="C", completion="P")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "prompt", "answer": "completion", "x": "y"}, "x is not one of"),
        ({"q": "prompt", "a": "completion"}, "the other way round: {prompt: q, completion: a}"),
        ({"promt": "q", "completion": "a"}, "Did you mean prompt?"),
        ({"prompt": "q"}, "but not completion"),
        ({"prompt": "q", "text": "a"}, "do not belong together"),
    ],
)
def test_wrong_mappings_are_refused(columns, message):
    with pytest.raises(RecipeError) as caught:
        check_columns(columns, "data.train.0")
    assert str(caught.value).startswith("data.train.0.columns") and message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "a row must be an object of columns, not text"),
        ([1], "a row must be an object of columns, not a list"),
        ({}, "the columns are none. Known shapes: messages"),
        ({"a": "x", "b": "y"}, "name two columns"),
        ({"prompt": "x"}, "column completion is missing beside prompt"),
        ({"prompt": "x", "completion": None}, "column completion is null beside prompt"),
        ({"question": 7, "answer": "x"}, "column question must be text, not a number"),
        ({"text": True}, "column text must be text, not true or false"),
        ({"text": ["a"]}, "column text must be text, not a list"),
        ({"text": "  \n"}, "column text is empty"),
        ({"prompt": "x", "completion": ""}, "column completion is empty"),
        ({"question": "x", "answer": "half \ud83d"}, "lone surrogate \\ud83d at position 5"),
        (
            {"prompt": "x", "completion": [SAID]},
            "must both be text, or lists of messages; they are text and a list",
        ),
        ({"prompt": [USER], "completion": [USER]}, "no turn of the assistant"),
        ({"prompt": [USER, SAID], "completion": [USER]}, "column completion has no assistant turn"),
        ({"messages": "Hi"}, "column messages must be a list of turns, not text"),
        ({"messages": []}, "column messages must be a list of turns, not an empty list"),
        ({"messages": [{"role": "user"}]}, "turn 1 of messages must be an object with role and content"),
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, "turn 2 of messages has the role 'asistant'"),
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, "Did you mean assistant?"),
        ({"messages": [USER, {"role": None, "content": "x"}]}, "turn 2 of messages has the role None"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "turn 2 of messages is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "turn 2 of messages must be text, not null"),
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [SAID, USER, SAID]}, "the assistant speaks first"),
        ({"messages": [{"role": "system", "content": "x"}, SAID]}, "the assistant speaks first"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "turn 1 of conversations has the from 'bot'"),
    ],
)
def test_unusable_rows_are_refused(row, message):
    assert message in refusal(row)


def test_named_columns_that_are_not_there():
    assert "no column promt; this row has: prompt, reply. Did you mean prompt?" in refusal(
        {"prompt": "x", "reply": "y"}, {"prompt": "promt", "completion": "reply"}
    )
    assert "column reply is null" in refusal({"q": "x", "reply": None}, {"prompt": "q", "completion": "reply"})


def test_every_row_has_the_shape_of_the_first():
    formatter = Formatter()
    formatter.format({"question": "x", "answer": "y"}, "a.jsonl, line 1")
    with pytest.raises(RecipeError, match=r"a.jsonl, line 2: this row has messages, the first \(a.jsonl, line 1\) has"):
        formatter.format({"messages": [USER, SAID]}, "a.jsonl, line 2")
    with pytest.raises(RecipeError, match=r"a\.jsonl, line 3: no value in column answer"):
        formatter.format({"question": "x"}, "a.jsonl, line 3")


def test_pretraining_reads_text_alone():
    assert format_one({"text": "x", "prompt": "p", "completion": "c"}, task="pretrain") == Example("text", text="x")
    assert "pretraining needs a column text" in refusal({"prompt": "x", "completion": "y"}, task="pretrain")
    assert "pretraining reads text" in refusal({"a": "x", "b": "y"}, {"prompt": "a", "completion": "b"}, "pretrain")


def test_what_is_left_out_is_counted():
    formatter = Formatter()
    system = {"role": "system", "content": " "}
    example = formatter.format({"messages": [system, USER, SAID, USER], "id": 3, "source": "x"}, "here")
    assert example.messages == (USER, SAID)
    formatter.format({"messages": [USER, SAID]}, "there")
    assert formatter.notes() == [
        "columns not used: id, source",
        "1 empty system turns left out",
        "1 conversations cut after their last assistant turn",
    ]


def test_keys_tell_contents_apart():
    rows = [
        Example("text", text="a"),
        Example("completion", prompt="a"),
        Example("completion", completion="a"),
        Example("chat", messages=(USER, SAID)),
        Example("chat", messages=(USER, SAID), loss_from=1),
    ]
    assert len({row.key() for row in rows}) == len(rows)
    assert Example("chat", messages=(dict(USER), dict(SAID))).key() == rows[3].key()
    assert rows[3].texts() == ["Hi", "Hello"]


def test_prompt_and_completion_of_a_wrong_type():
    assert "they are a number and text" in refusal({"prompt": 3, "completion": "x"})
