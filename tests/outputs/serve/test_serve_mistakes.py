"""A hundred kinds of requests that cannot be answered, and every one is told why: never a 5xx, and the next is fine."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Reciter, Served, serving

LIMIT = 40_000
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        Reciter("fine"),
        max_body_bytes=LIMIT,
        max_prompt_tokens=100,
        max_new_tokens=50,
        body_timeout=1.0,
        max_batch=4,
        max_queue=4,
    ) as served:
        yield served


def nested(depth: int) -> bytes:
    return b'{"prompt":' * depth + b"1" + b"}" * depth


BODIES: list[tuple[str, Any, int]] = [
    (COMPLETE, b"", 400),
    (COMPLETE, b"   ", 400),
    (COMPLETE, b"{", 400),
    (COMPLETE, b'{"prompt": "a"', 400),
    (COMPLETE, b'{"prompt": "a"}}', 400),
    (COMPLETE, b'{"prompt": "a",}', 400),
    (COMPLETE, b"{'prompt': 'a'}", 400),
    (COMPLETE, b'{"prompt": NaN}', 400),
    (COMPLETE, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETE, b'{"prompt": "a", "temperature": Infinity}', 400),
    (COMPLETE, b'{"prompt": "a", "temperature": 1e999}', 400),
    (COMPLETE, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    (COMPLETE, b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", 400),
    (COMPLETE, b'{"prompt": "\xff\xfe"}', 400),
    (COMPLETE, b"\xff\xfe{\x00}\x00", 400),
    (COMPLETE, b"\x00" * 100, 400),
    (COMPLETE, b"[]", 400),
    (COMPLETE, b'"prompt"', 400),
    (COMPLETE, b"7", 400),
    (COMPLETE, b"null", 400),
    (COMPLETE, b"true", 400),
    (COMPLETE, nested(3000), 400),
    (COMPLETE, b"[" * 30_000, 400),
    (COMPLETE, b'{"prompt": "a"}' + b" " * LIMIT, 413),
    (COMPLETE, {"prompt": "a" * LIMIT}, 413),
    (COMPLETE, {"prompt": "a" * 101}, 400),
    (COMPLETE, {"prompt": [7] * 101}, 400),
    (COMPLETE, {}, 400),
    (COMPLETE, {"prompt": None}, 400),
    (COMPLETE, {"prompt": ""}, 400),
    (COMPLETE, {"prompt": []}, 400),
    (COMPLETE, {"prompt": [[]]}, 400),
    (COMPLETE, {"prompt": ["a", ""]}, 400),
    (COMPLETE, {"prompt": ["a", 7]}, 400),
    (COMPLETE, {"prompt": [7, "a"]}, 400),
    (COMPLETE, {"prompt": [7, True]}, 400),
    (COMPLETE, {"prompt": [1.5]}, 400),
    (COMPLETE, {"prompt": [-1]}, 400),
    (COMPLETE, {"prompt": [262]}, 400),  # a row of the model that no token has
    (COMPLETE, {"prompt": [10**30]}, 400),
    (COMPLETE, {"prompt": {"text": "a"}}, 400),
    (COMPLETE, {"prompt": 7}, 400),
    (COMPLETE, {"prompt": True}, 400),
    (COMPLETE, {"prompt": ["a"] * 129}, 400),
    (COMPLETE, {"prompt": ["a"] * 9}, 400),  # more than may ever run and wait
    (COMPLETE, {"prompt": "a", "n": 9}, 400),
    (COMPLETE, b'{"prompt": "\\ud800"}', 400),
    (COMPLETE, b'{"prompt": "a", "\\ud800": 1}', 400),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400),
    (COMPLETE, {"prompt": "a", "max_tokens": -1}, 400),
    (COMPLETE, {"prompt": "a", "max_tokens": 51}, 400),
    (COMPLETE, {"prompt": "a", "max_tokens": 1.5}, 400),
    (COMPLETE, {"prompt": "a", "max_tokens": "5"}, 400),
    (COMPLETE, {"prompt": "a", "max_tokens": True}, 400),
    (COMPLETE, {"prompt": "a", "temperature": -0.1}, 400),
    (COMPLETE, {"prompt": "a", "temperature": 101}, 400),
    (COMPLETE, {"prompt": "a", "temperature": "hot"}, 400),
    (COMPLETE, {"prompt": "a", "temperature": [1]}, 400),
    (COMPLETE, {"prompt": "a", "temperature": False}, 400),
    (COMPLETE, {"prompt": "a", "top_p": 1.1}, 400),
    (COMPLETE, {"prompt": "a", "top_p": -1}, 400),
    (COMPLETE, {"prompt": "a", "top_k": -2}, 400),
    (COMPLETE, {"prompt": "a", "top_k": 2.5}, 400),
    (COMPLETE, {"prompt": "a", "min_p": 2}, 400),
    (COMPLETE, {"prompt": "a", "repetition_penalty": 0}, 400),
    (COMPLETE, {"prompt": "a", "frequency_penalty": 2.1}, 400),
    (COMPLETE, {"prompt": "a", "presence_penalty": -2.1}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": {"a": 1}}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": {"-1": 1}}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": {"\u0665": 1}}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": {"5": 101}}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": {"99999": 1}}, 400),
    (COMPLETE, {"prompt": "a", "logit_bias": [1]}, 400),
    (COMPLETE, {"prompt": "a", "seed": 1.5}, 400),
    (COMPLETE, {"prompt": "a", "seed": 2**63}, 400),
    (COMPLETE, {"prompt": "a", "stop": ""}, 400),
    (COMPLETE, {"prompt": "a", "stop": ["x", ""]}, 400),
    (COMPLETE, {"prompt": "a", "stop": [7]}, 400),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 17}, 400),
    (COMPLETE, {"prompt": "a", "stop": {"x": 1}}, 400),
    (COMPLETE, {"prompt": "a", "n": 0}, 400),
    (COMPLETE, {"prompt": "a", "n": 129}, 400),
    (COMPLETE, {"prompt": "a", "n": None, "best_of": 2}, 400),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400),
    (COMPLETE, {"prompt": "a", "logprobs": True}, 400),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, 400),
    (COMPLETE, {"prompt": "a", "stream": "yes"}, 400),
    (COMPLETE, {"prompt": "a", "stream": 1}, 400),
    (COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}}, 400),
    (COMPLETE, {"prompt": "a", "stream": True, "stream_options": {"usage": True}}, 400),
    (COMPLETE, {"prompt": "a", "max_token": 5}, 400),
    (COMPLETE, {"prompt": "a", "messages": USER}, 400),
    (COMPLETE, {"prompt": "a", "x" * 3000: 1}, 400),
    (CHAT, {}, 400),
    (CHAT, {"messages": None}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": "hi"}, 400),
    (CHAT, {"messages": ["hi"]}, 400),
    (CHAT, {"messages": [{}]}, 400),
    (CHAT, {"messages": [{"role": "user"}]}, 400),
    (CHAT, {"messages": [{"content": "hi"}]}, 400),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400),
    (CHAT, {"messages": [{"role": "tool", "content": "hi", "tool_call_id": "1"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "extra": 1}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 101}]}, 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\udc00"}]}', 400),
    (CHAT, {"messages": USER, "max_tokens": 0}, 400),
    (CHAT, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, 400),
    (CHAT, {"messages": USER, "max_completion_tokens": 51}, 400),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400),
    (CHAT, {"messages": USER, "logprobs": 2}, 400),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, 400),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
    (CHAT, {"messages": USER, "tool_choice": "required"}, 400),
    (CHAT, {"messages": USER, "prompt": "a"}, 400),
    (CHAT, {"messages": USER, "n": 5.0}, 400),
]


@pytest.mark.parametrize(
    ("path", "body", "status"), BODIES, ids=[f"{i}-{str(b[1])[:40]}" for i, b in enumerate(BODIES)]
)
def test_bodies(served: Served, path: str, body: Any, status: int) -> None:
    got, answer = served.send("POST", path, body)
    assert got == status, answer
    error = answer["error"]
    assert error["message"] and len(error["message"]) < 2000 and error["type"] == "invalid_request_error"


def test_all_mistakes_are_told_at_once_with_the_nearest_field(served: Served) -> None:
    _, answer = served.send("POST", COMPLETE, {"promt": "a", "temperature": 1000, "n": "two"})
    message = answer["error"]["message"]
    for part in ("prompt is missing", "Did you mean prompt?", "temperature", "n: "):
        assert part in message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", COMPLETE, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/api", 405),
        ("PATCH", "/", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/" + "a" * 5000, 404),
        ("BREW", COMPLETE, 405),
    ],
)
def test_places_and_methods(served: Served, method: str, path: str, status: int) -> None:
    got, answer = served.send(method, path)
    assert got == status
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"]
)
def test_other_types_than_json(served: Served, kind: str) -> None:
    status, answer = served.send("POST", COMPLETE, {"prompt": "a"}, {"content-type": kind})
    assert (status, "application/json" in answer["error"]["message"]) == (415, True)


@pytest.mark.parametrize("kind", ["application/json; charset=UTF-8", "Application/JSON", "application/vnd.api+json"])
def test_json_by_other_names(served: Served, kind: str) -> None:
    assert served.send("POST", COMPLETE, {"prompt": "a"}, {"content-type": kind})[0] == 200


def send_raw(served: Served, data: bytes, *, shut: bool = True, wait: float = 5.0) -> bytes:
    """What comes back for bytes on a bare socket, until the server closes it or nothing comes for a while."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=wait) as connection:
        connection.sendall(data)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            pass
        except ConnectionResetError:
            pass
    return answer


def post(length: Any, body: bytes, path: str = COMPLETE, more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}Content-Length: {length}\r\n\r\n"
    )
    return head.encode() + body


GOOD = json.dumps({"prompt": "a"}).encode()
CHUNKED = post(0, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")

# What is sent, and the statuses that come back. Nothing comes back where the client has closed its side.
RAW: dict[str, tuple[bytes, list[int]]] = {
    "nothing": (b"", []),
    "noise": (bytes(range(256)) * 4, [400]),
    "tls": (bytes.fromhex("16030100a5010000a10303") + bytes(160), [400]),
    "no version": (b"GET /\r\n\r\n", [400]),
    "half a request line": (b"POST /v1/compl", []),
    "half a header": (f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nConte".encode(), []),
    "no host": (f"POST {COMPLETE} HTTP/1.1\r\n\r\n".encode(), [400]),
    "two hosts": (f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n".encode(), [400]),
    "broken header": (b"GET / HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n", [400]),
    "endless header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000, [400]),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000, [400]),
    "header with zero": (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", [400]),
    "body cut off": (post(1000, GOOD), []),
    "body missing": (post(1000, b""), []),
    "no length": (
        f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n".encode() + GOOD,
        [400],
    ),
    "length is no number": (post("many", GOOD), [400]),
    "length is negative": (post(-5, GOOD), [400]),
    "length is huge": (post(10**15, GOOD), [413]),
    "length is beyond reason": (post("9" * 400, GOOD), [400]),
    "two lengths": (post(5, GOOD, more="Content-Length: 15\r\n"), [400]),
    "length too short": (post(5, GOOD), [400]),
    "both lengths": (post(15, GOOD, more="Transfer-Encoding: chunked\r\n"), []),
    "chunk size is no number": (CHUNKED + b"zz\r\n", [400]),
    "chunk cut off": (CHUNKED + b"ff\r\nab", []),
    "chunk too long": (CHUNKED + b"2\r\nabcdef\r\n0\r\n\r\n", [400]),
    "chunks without end": (CHUNKED + b"2\r\n{}\r\n", []),
    "chunks beyond the limit": (CHUNKED + (b"2000\r\n" + b"a" * 0x2000 + b"\r\n") * 8 + b"0\r\n\r\n", [413]),
    "compressed": (post(20, b"\x1f\x8b\x08\x00" + bytes(16), more="Content-Encoding: gzip\r\n"), [400]),
    "other transfer encoding": (post(15, GOOD, more="Transfer-Encoding: gzip\r\n"), [400]),
    "websocket": (
        b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        [405],
    ),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64), [404, 400]),
    "expects to be asked": (post(1000, b"", more="Expect: 100-continue\r\n"), [100]),
    "two at once": (post(len(GOOD), GOOD) + post(len(GOOD), GOOD), [200, 200]),
    "a good one and noise": (post(len(GOOD), GOOD) + b"\x00\x01\x02\r\n\r\n", [200, 400]),
}


@pytest.mark.parametrize("name", RAW)
def test_broken_http(served: Served, name: str) -> None:
    data, wanted = RAW[name]
    answer = send_raw(served, data, shut=not wanted or wanted == [100])
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", answer)] == wanted
    if wanted and wanted[-1] >= 400:
        assert json.loads(answer[answer.rindex(b"\r\n\r\n") :])["error"]["message"]
    assert served.send("POST", COMPLETE, {"prompt": "a"})[0] == 200


def test_lengths_beyond_the_limit_are_refused_before_they_are_read(served: Served) -> None:
    assert send_raw(served, post(10**9, b""), shut=False).startswith(b"HTTP/1.1 413")


def test_bodies_that_do_not_come_are_not_waited_for(served: Served) -> None:
    started = time.monotonic()
    answer = send_raw(served, post(1000, b'{"prompt"'), shut=False, wait=20)
    assert answer.startswith(b"HTTP/1.1 408")
    assert 0.8 < time.monotonic() - started < 15


@pytest.mark.parametrize("before", [b"", post(len(GOOD), GOOD)], ids=["at first", "after an answer"])
def test_headers_that_do_not_come_are_not_waited_for(served: Served, before: bytes) -> None:
    """Bytes that drip in do not prolong it."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(before)
        if before:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for number in range(60):
                connection.sendall(b"X: %d\r\n" % number)
                time.sleep(0.1)


def test_a_token_is_asked_for() -> None:
    with serving(Reciter("fine"), token="sécret") as served:
        for path in (COMPLETE, CHAT):
            assert served.send("POST", path, {"prompt": "a"})[0] == 401
        assert served.send("PUT", "/api", {"prompts": ["a"]})[0] == 401
        assert served.send("GET", "/v1/models")[0] == 401
        for wrong in ("Bearer", "Bearer ", "Bearer secret", "Basic s\u00e9cret", "s\u00e9cret", "Bearer s\u00e9cret2"):
            status, answer = served.send(
                "GET", "/v1/models", None, {"authorization": wrong.encode("utf-8").decode("latin1")}
            )
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        right = {"authorization": "Bearer s\u00e9cret".encode().decode("latin1")}
        assert served.send("GET", "/v1/models", None, right)[0] == 200
        assert served.send("POST", COMPLETE, {"prompt": "a"}, right)[0] == 200
        assert served.send("GET", "/health")[0] == 200
        assert served.send("GET", "/")[0] == 200
