"""PUT /api, as Megatron-LM's command-line client sends it and reads the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from serving import Reciter, Served, serving

from ssm_tune.outputs.generate import generate_text


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("mamba") as served:
        yield served


def put(served: Served, **fields: Any) -> requests.Response:
    """As the published client does: a text of JSON with its content type."""
    headers = {"Content-Type": "application/json"}
    return requests.put(f"{served.address}/api", data=json.dumps(fields), headers=headers, timeout=60)


def test_the_published_client_is_answered(served: Served) -> None:
    response = put(served, prompts=["Once"], tokens_to_generate=6, top_k=1)
    assert response.status_code == 200
    wanted = generate_text(served.model, served.tokenizer, "Once", chat=False, max_new_tokens=6)
    assert response.json()["text"][0].rstrip("\ufffd") == "Once" + wanted.rstrip("\ufffd")


def test_its_defaults_sample_sixty_four_tokens(served: Served) -> None:
    body = put(served, prompts=["a"]).json()
    assert 2 <= len(body["tokens"][0]) <= 65
    assert put(served, prompts=["a"]).json()["text"] != body["text"]


def test_tokens_segments_and_likelihoods_belong_together(served: Served) -> None:
    body = put(served, prompts=["Once", "more"], tokens_to_generate=5, logprobs=True, top_k=1).json()
    for tokens, segments, likelihoods in zip(body["tokens"], body["segments"], body["logprobs"], strict=True):
        assert len(tokens) == len(segments) == len(likelihoods) + 1
        assert all(value <= 0 for value in likelihoods)
    measured = put(served, prompts=["Once"], tokens_to_generate=0, logprobs=True).json()
    assert measured["logprobs"][0] == pytest.approx(body["logprobs"][0][:3], abs=1e-5)
    assert measured["text"] == ["Once"]


def test_a_seed_gives_the_same_answer(served: Served) -> None:
    fields = {"prompts": ["a", "a"], "tokens_to_generate": 12, "random_seed": 5, "top_p": 0.9, "temperature": 2}
    first = put(served, **fields).json()["text"]
    assert put(served, **fields).json()["text"] == first
    assert first[0] != first[1]


def test_bos_is_put_in_front(served: Served) -> None:
    assert put(served, prompts=[""], add_BOS=True, tokens_to_generate=1).json()["tokens"][0][0] == 1
    assert put(served, prompts=["x"], add_BOS=True, tokens_to_generate=1).json()["tokens"][0][0] == 1


def test_ends_of_lines_stop_and_belong_to_the_answer() -> None:
    with serving(Reciter("one\ntwo\n\nthree")) as served:
        assert put(served, prompts=[">>"], stop_on_eol=True).json()["text"] == [">>one\n"]
        assert put(served, prompts=[">>"], stop_on_double_eol=True).json()["text"] == [">>one\ntwo\n\n"]
        letter = served.tokenizer("w")["input_ids"][0]
        body = put(served, prompts=[">>"], stop_token=letter).json()
        assert body["text"] == [">>one\nt"]
        assert served.tokenizer.decode(body["tokens"][0]) == ">>one\nt"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "prompts is missing"),
        ({"prompts": "a"}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 129}, "128"),
        ({"prompts": [""]}, "add_BOS"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "logprobs"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": 10**9}, "at most"),
        ({"prompts": ["a"], "temperature": 0}, "temperature"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "cannot set both"),
        ({"prompts": ["a"], "top_k": 1001}, "top_k"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "without top_p"),
        ({"prompts": ["a"], "top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound"),
        ({"prompts": ["a"], "beam_width": 2}, "beam"),
        ({"prompts": ["a"], "max_len": 5}, "max_len is not a field"),
        ({"prompts": ["a"], "sentences": ["a"]}, "sentences is not a field"),
        ({"prompts": ["a"], "prevent_newline_after_colon": True}, "not supported"),
        ({"prompts": ["\ud800"]}, "surrogate"),
    ],
    ids=str,
)
def test_mistakes_are_told_where_the_client_looks(served: Served, fields: dict[str, Any], said: str) -> None:
    response = put(served, **fields)
    assert response.status_code == 400
    assert said in response.json()["message"]
