"""Full queues, time that is over, clients that go or do not read, and a model that breaks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from serving import Reciter, Served, read_events, serving, texts, wait_until

COMPLETE = "/v1/completions"
LONG = "abcdefghij" * 40


def request(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "go", "temperature": 0, "max_tokens": 400, **fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def open_stream(served: Served, buffer: int | None = None, **fields: Any) -> Iterator[socket.socket]:
    """A stream that was asked for and is not read; `buffer`: how much the system may read ahead, in bytes."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(request(stream=True, **fields))
    try:
        yield connection
    finally:
        connection.close()


def load(served: Served) -> tuple[int, int]:
    state = served.service.engine.load
    return state.running, state.waiting


def test_too_many_requests_are_sent_away_and_come_later() -> None:
    with serving(Reciter(LONG, seconds=0.02), max_batch=1, max_queue=1) as served, open_stream(served):
        wait_until(lambda: load(served) == (1, 0))
        with open_stream(served):
            wait_until(lambda: load(served) == (1, 1))
            status, body = served.send("POST", COMPLETE, {"prompt": "a"})
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            assert served.send("POST", COMPLETE, {"prompt": "a", "stream": True})[0] == 429
        wait_until(lambda: load(served) == (1, 0))  # the one that waited has gone
        with ThreadPoolExecutor(1) as threads:
            later = threads.submit(served.complete, prompt="a", max_tokens=3)
            wait_until(lambda: load(served)[1] == 1)
            served.service.engine.cancel(served.service.engine._rows)
            assert later.result(30)["choices"][0]["text"] == "abc"


def test_rows_of_clients_that_go_are_given_to_others() -> None:
    with serving(Reciter(LONG, seconds=0.1)) as served:
        with open_stream(served) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            wait_until(lambda: load(served) == (1, 0))
        wait_until(lambda: load(served) == (0, 0), seconds=20)  # the whole answer would take forty
        connection = socket.create_connection(("127.0.0.1", served.port))
        connection.sendall(request())
        wait_until(lambda: load(served) == (1, 0))
        connection.close()
        wait_until(lambda: load(served) == (0, 0), seconds=20)


def test_clients_that_do_not_read_hold_up_nobody() -> None:
    with serving(Reciter(LONG * 5), buffer=4096) as served, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(open_stream(served, buffer=4096, max_tokens=1500, logprobs=5)) for _ in range(3)]
        connections = served.server.server_state.connections
        wait_until(lambda: sum(connection.flow.write_paused for connection in connections) == 3)
        wait_until(lambda: load(served) == (0, 0))  # their answers are complete, though not read
        started = time.monotonic()
        assert served.complete(prompt="a", max_tokens=20)["choices"][0]["text"] == LONG[:20]
        assert time.monotonic() - started < 20
        text = b""
        while not text.endswith(b"0\r\n\r\n"):  # and each of them can still be read
            text += idle[0].recv(65536)
        assert b"[DONE]" in text


def test_time_that_is_over_ends_an_answer_where_it_is() -> None:
    with serving(Reciter(LONG, seconds=0.05), timeout=1.0, max_batch=1) as served:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(served.complete, prompt="a", max_tokens=400)
            wait_until(lambda: load(served) == (1, 0))
            waited = threads.submit(served.send, "POST", COMPLETE, {"prompt": "b", "max_tokens": 5})
            choice = first.result()["choices"][0]
            status, body = waited.result()
        assert choice["finish_reason"] == "length"
        assert LONG.startswith(choice["text"]) and 0 < len(choice["text"]) < 200
        # The second one's time may be over before its turn, or just as it comes.
        assert status in (200, 429)
        if status == 429:
            assert "not begun" in body["error"]["message"]


def test_long_prompts_do_not_hold_up_short_ones() -> None:
    """A long prompt is read in pieces; a short one comes first though it was asked for later."""
    with serving("mamba") as served, ThreadPoolExecutor(2) as threads:
        served.complete(prompt="warm", max_tokens=2)
        ended: dict[str, float] = {}

        def ask(prompt: str) -> None:
            served.complete(prompt=prompt, max_tokens=2)
            ended[prompt[0]] = time.monotonic()

        long = threads.submit(ask, "l" * 60_000)
        wait_until(lambda: load(served) == (1, 0))
        threads.submit(ask, "short").result(60)
        assert not long.done()
        long.result(120)
        assert ended["s"] < ended["l"]


def test_a_piecewise_prompt_gives_what_the_whole_gives() -> None:
    with serving("mamba2") as served, torch.no_grad():
        prompt = "The quick brown fox. " * 60  # three pieces
        ids = torch.tensor([served.tokenizer(prompt)["input_ids"]])
        logits = served.model(ids).logits[0]
        logits[:, 262:] = -torch.inf  # rows that no token has
        wanted = logits.log_softmax(-1)
        told = served.complete(prompt=prompt, max_tokens=1, logprobs=5)["choices"][0]["logprobs"]
        assert told["token_logprobs"][0] == pytest.approx(float(wanted[-1].max()), abs=1e-4)
        measured = served.complete(prompt=prompt, max_tokens=1, logprobs=0, echo=True)["choices"][0]["logprobs"]
        alone = wanted[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert measured["token_logprobs"][1:-1] == pytest.approx(alone.tolist(), abs=1e-3)


def test_logits_that_are_not_numbers_fail_one_request_alone() -> None:
    with serving("mamba") as served:
        row = served.model.get_input_embeddings().weight.data
        letter = served.tokenizer("q")["input_ids"][0]
        row[letter] = torch.nan
        status, body = served.send("POST", COMPLETE, {"prompt": "aqa", "max_tokens": 3})
        assert status == 500 and "NaN" in body["error"]["message"]
        row[letter] = 0.0
        assert served.send("POST", COMPLETE, {"prompt": "aba", "max_tokens": 3})[0] == 200


def test_memory_that_runs_out_fails_what_ran_and_nothing_after() -> None:
    model = Reciter("abc")

    def out() -> None:
        raise torch.OutOfMemoryError("no room")

    with serving(model) as served:
        model.broken = out
        status, body = served.send("POST", COMPLETE, {"prompt": "ab"})
        assert status == 500 and "out of memory" in body["error"]["message"]
        model.broken = None
        assert served.complete(prompt="ab")["choices"][0]["text"] == "abc"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_leaves_nobody_waiting() -> None:
    def die() -> None:
        raise RuntimeError("a bug")

    with serving(Reciter("abc", broken=die)) as served:
        assert served.send("POST", COMPLETE, {"prompt": "ab"})[0] == 500
        assert served.service.engine.alive is False


def test_stopping_lets_answers_end() -> None:
    said: list[str] = []
    with serving(Reciter(LONG, seconds=0.01), drain=20.0) as served:

        def ask() -> None:
            said.extend(texts(served.stream(COMPLETE, prompt="a", max_tokens=100)))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: load(served) == (1, 0))
    asking.join()
    assert "".join(said) == LONG[:100]


def test_stopping_does_not_wait_for_ever() -> None:
    started = time.monotonic()
    with serving(Reciter(LONG, seconds=0.05), drain=0.5) as served, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(served.send, "POST", COMPLETE, {"prompt": "a", "max_tokens": 400, "stream": True})
        wait_until(lambda: load(served) == (1, 0))
        served.service.engine.drain(0.5)
        assert served.send("POST", COMPLETE, {"prompt": "a"})[0] == 503
        status, text = asked.result(10)
    assert status == 200
    assert read_events(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - started < 60  # the whole answer would take twenty, and a server that waits, for ever
