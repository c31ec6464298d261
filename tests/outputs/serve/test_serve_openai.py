"""OpenAI's official client, and what it is answered: the same as a prompt generated alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Reciter, Served, serving, texts
from tiny import EOS, tiny_tokenizer

from ssm_tune.outputs.generate import generate_text

PROMPT = "The state of things"


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(request.param) as served:
        yield served


@pytest.fixture(scope="module")
def reciting() -> Iterator[Served]:
    with serving(Reciter("One é€😀 two. STOP three\n\nfour")) as served:
        yield served


def client(served: Served, **settings: Any) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{served.address}/v1", api_key="anything", max_retries=0, timeout=120, **settings)


def alone(served: Served, prompt: str = PROMPT, **settings: Any) -> str:
    return whole(generate_text(served.model, served.tokenizer, prompt, **{"chat": False, **settings}))


def whole(text: str) -> str:
    """Without the bytes at the end that are no character, or not yet one: random models say many."""
    return text.rstrip("\ufffd")


def test_completions_are_what_the_prompt_gives_alone(served: Served) -> None:
    answer = client(served).completions.create(model="any", prompt=PROMPT, max_tokens=12, temperature=0)
    assert whole(answer.choices[0].text) == alone(served, max_new_tokens=12)
    assert answer.object == "text_completion" and answer.model == "any"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.total_tokens == len(PROMPT) + answer.usage.completion_tokens


def test_chat_is_what_the_conversation_gives_alone(served: Served) -> None:
    answer = client(served).chat.completions.create(
        model="any", messages=[{"role": "user", "content": PROMPT}], max_completion_tokens=12, temperature=0
    )
    assert whole(answer.choices[0].message.content) == alone(served, chat=True, max_new_tokens=12)
    assert answer.choices[0].message.role == "assistant"


def test_a_whole_conversation_is_written_by_the_template(served: Served) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    answer = client(served).chat.completions.create(model="", messages=turns, max_tokens=9, temperature=0)
    assert whole(answer.choices[0].message.content) == alone(
        served, "<|s|>Be brief.<|u|>ab<|a|>c<e><|u|>d<|a|>", max_new_tokens=9
    )


def test_streams_are_the_same_text_in_pieces(served: Served) -> None:
    wanted = served.complete(prompt=PROMPT, max_tokens=16)
    with client(served).completions.create(
        model="", prompt=PROMPT, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted["choices"][0]["text"]
    assert chunks[-2].choices[0].finish_reason == wanted["choices"][0]["finish_reason"]
    assert chunks[-1].choices == [] and chunks[-1].usage.model_dump(exclude_none=True) == wanted["usage"]


def test_chat_streams_begin_with_the_role(served: Served) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    with client(served).chat.completions.create(
        model="", messages=messages, max_tokens=8, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole(said) == alone(served, chat=True, max_new_tokens=8)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_the_asynchronous_client_is_answered(served: Served) -> None:
    import asyncio

    from openai import AsyncOpenAI

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.address}/v1", api_key="x", max_retries=0) as asker:
            answers = await asyncio.gather(
                *(asker.completions.create(model="", prompt="x" * i, max_tokens=5, temperature=0) for i in (1, 7, 30))
            )
        return [whole(answer.choices[0].text) for answer in answers]

    assert asyncio.run(ask()) == [alone(served, "x" * i, max_new_tokens=5) for i in (1, 7, 30)]


def test_several_prompts_and_choices(served: Served) -> None:
    answer = served.complete(prompt=["ab", "cde"], n=2, max_tokens=4, temperature=1, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    again = served.complete(prompt=["ab", "cde"], n=2, max_tokens=4, temperature=1, seed=3)
    said = [choice["text"] for choice in answer["choices"]]
    assert [choice["text"] for choice in again["choices"]] == said
    assert said[0] != said[1]


def test_streams_of_several_choices_are_told_apart(served: Served) -> None:
    fields = {"prompt": ["ab", "cde"], "max_tokens": 6}
    wanted = served.complete(**fields)
    events = served.stream("/v1/completions", **fields)
    for index in (0, 1):
        assert "".join(texts(events, index)) == wanted["choices"][index]["text"]


def test_tokens_are_a_prompt_too(served: Served) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    wanted = served.complete(prompt=PROMPT, max_tokens=5)["choices"][0]["text"]
    assert served.complete(prompt=ids, max_tokens=5)["choices"][0]["text"] == wanted
    assert served.complete(prompt=[ids, ids], max_tokens=5)["choices"][1]["text"] == wanted


def test_likelihoods_and_echo(served: Served) -> None:
    import torch

    answer = served.complete(prompt=PROMPT, max_tokens=3, logprobs=2, echo=True)["choices"][0]
    told = answer["logprobs"]
    assert answer["text"].startswith(PROMPT)
    with torch.no_grad():
        ids = torch.tensor([served.tokenizer(PROMPT)["input_ids"]])
        logits = served.model(ids).logits[0]
    logits[:, 262:] = -torch.inf
    values = logits.log_softmax(-1)
    wanted = [float(values[place, token]) for place, token in enumerate(ids[0, 1:])]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(PROMPT)] == pytest.approx(wanted, abs=1e-4)
    assert told["token_logprobs"][len(PROMPT)] == pytest.approx(float(values[-1].max()), abs=1e-4)
    assert told["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["token_logprobs"])


def test_a_prompt_can_be_measured_without_an_answer(served: Served) -> None:
    answer = served.complete(prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert answer["choices"][0]["text"] == PROMPT
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0


def test_likelihoods_of_chat(served: Served) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = client(served).chat.completions.create(
        model="", messages=messages, max_tokens=3, temperature=0, logprobs=True, top_logprobs=4
    )
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 4
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)  # the likeliest was taken
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


def test_a_bias_decides(served: Served) -> None:
    letter = served.tokenizer("Z")["input_ids"][0]
    answer = served.complete(prompt=PROMPT, max_tokens=4, logit_bias={str(letter): 100})
    assert answer["choices"][0]["text"] == "ZZZZ"


def test_rows_that_no_token_has_are_never_sampled(served: Served) -> None:
    """The model has 300 rows, the tokenizer 262 tokens. Hot sampling would meet the others within a few tokens."""
    status, body = served.send("PUT", "/api", {"prompts": ["x"] * 4, "tokens_to_generate": 60, "temperature": 100.0})
    assert status == 200
    assert max(token for row in body["tokens"] for token in row) < 262


def test_the_end_token_ends_the_answer(served: Served) -> None:
    answer = served.complete(prompt=PROMPT, max_tokens=5, logit_bias={str(EOS): 100}, logprobs=1)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["tokens"] == []


def test_models_may_have_any_name(served: Served) -> None:
    assert [model.id for model in client(served).models.list()] == ["ssm-tune"]
    assert client(served).models.retrieve("some/model").id == "some/model"
    for name in ("gpt-x", "", None, 7, {"a": 1}):
        status, answer = served.send("POST", "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert status == 200
        assert answer["model"] == (name if isinstance(name, str) and name else "ssm-tune")


@pytest.mark.parametrize(
    ("stop", "said", "finish"),
    [
        (None, "One é€😀 two. STOP three\n\nfour", "stop"),
        ("STOP", "One é€😀 two. ", "stop"),
        (["three", "STOP"], "One é€😀 two. ", "stop"),
        ("😀", "One é€", "stop"),
        (["\n\n"], "One é€😀 two. STOP three", "stop"),
        ("STOPPED", "One é€😀 two. STOP three\n\nfour", "stop"),
    ],
)
def test_stop_texts_and_characters_come_whole(reciting: Served, stop: Any, said: str, finish: str) -> None:
    fields = {"prompt": "go on", "max_tokens": 200, "stop": stop}
    choice = reciting.complete(**fields)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (said, finish)
    pieces = texts(reciting.stream("/v1/completions", **fields))
    assert "".join(pieces) == said
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("count", range(1, 20))
def test_an_answer_that_is_cut_ends_with_a_whole_character(reciting: Served, count: int) -> None:
    choice = reciting.complete(prompt="go on", max_tokens=count)["choices"][0]
    wanted = tiny_tokenizer().decode(reciting.model.script[:count]).rstrip("\ufffd")
    assert (choice["text"], choice["finish_reason"]) == (wanted, "length")


def test_a_model_without_template_completes_and_says_why_it_does_not_chat() -> None:
    with serving("mamba", tiny_tokenizer(template=None)) as served:
        status, body = served.send("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, body["error"]["code"]) == (400, "no_chat_template")
        assert served.complete(prompt="a", max_tokens=2)["object"] == "text_completion"
        assert served.send("GET", "/health")[1]["chat"] is False


def test_the_chat_page_and_health(served: Served) -> None:
    status, page = served.send("GET", "/")
    assert status == 200 and "/v1/chat/completions" in page
    assert "innerHTML" not in page and "http" not in page  # nothing from elsewhere
    status, health = served.send("GET", "/health")
    assert status == 200 and health["status"] == "ok"
