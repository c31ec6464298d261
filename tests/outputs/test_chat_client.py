"""The terminal client, against the server."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from serving import Reciter, Served, serving
from tiny import tiny_tokenizer

from ssm_tune.outputs.chat import Conversation, talk
from ssm_tune.recipe import RecipeError


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Reciter("Yes. €\nno"), name="parrot") as served:
        yield served


def say(served: Served, text: str, **settings: object) -> str:
    out = io.StringIO()
    assert talk(Conversation(served.address, **settings), io.StringIO(text), out) == 0
    return out.getvalue()


def test_each_line_is_answered(served: Served) -> None:
    assert say(served, "one\n\ntwo\n/quit\nthree\n") == "Yes. €\nno\n" * 2


def test_the_conversation_is_remembered_until_it_begins_anew(served: Served) -> None:
    conversation = Conversation(served.address, system="Be brief.", settings={"stop": ["."], "temperature": 0})
    assert "".join(conversation.say("one")) == "Yes"
    assert "".join(conversation.say("two")) == "Yes"
    assert [(turn["role"], turn["content"]) for turn in conversation.turns] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "Yes"),
        ("user", "two"),
        ("assistant", "Yes"),
    ]
    conversation.forget()
    assert conversation.turns == [{"role": "system", "content": "Be brief."}]


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_came(served: Served) -> None:
    conversation = Conversation(served.address)
    pieces = conversation.say("one")
    first = next(piece for piece in pieces if piece)
    pieces.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": first}


@pytest.mark.parametrize("url", ["{host}", "http://{host}", "http://{host}/v1", "http://{host}/v1/"])
def test_addresses(served: Served, url: str) -> None:
    assert Conversation(url.format(host=f"127.0.0.1:{served.port}")).describe() == "parrot"


@pytest.mark.parametrize("url", ["", "http://", "ftp://a", "http://a:port", "http://a:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(RecipeError, match="address"):
        Conversation(url)


def test_no_server() -> None:
    with pytest.raises(RecipeError, match="ssm-tune serve"):
        Conversation("127.0.0.1:9").describe()


def test_mistakes_are_told_and_the_next_line_is_read(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(served, "one\ntwo\n", settings={"max_tokens": 10**9}) == "\n\n"
    assert capsys.readouterr().err.count("at most") == 2


def test_a_token() -> None:
    with serving(Reciter("Yes."), token="sécret") as served:
        with pytest.raises(RecipeError, match="--token"):
            Conversation(served.address).describe()
        assert say(served, "one\n", token="sécret") == "Yes.\n"


def test_a_model_without_template_continues_lines() -> None:
    with serving(Reciter(" and so on"), tiny_tokenizer(template=None)) as served:
        conversation = Conversation(served.address)
        conversation.describe()
        assert conversation.plain
        assert "".join(conversation.say("one")) == " and so on"
