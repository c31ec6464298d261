"""A server with a tiny model, running in a thread of the test's own process."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tiny import EOS, VOCAB_SIZE, tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model


@dataclass(frozen=True)
class Served:
    """Where it is, and what it serves."""

    port: int
    model: Any
    tokenizer: Any
    service: Any
    server: Any

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> tuple[int, Any]:
        """Status and body (read as JSON where it is) of one request; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(text) if kind.startswith("application/json") else text.decode()

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions; greedy unless said otherwise."""
        status, body = self.send("POST", "/v1/completions", {"temperature": 0, **fields})
        assert status == 200, body
        return body

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream, without [DONE], which must be the last."""
        status, text = self.send("POST", path, {"temperature": 0, "stream": True, **fields})
        assert status == 200, text
        return read_events(text)


def read_events(text: str) -> list[Any]:
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def texts(events: Sequence[Any], index: int = 0) -> list[str]:
    """The texts of a choice's pieces, of either kind of stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


class Reciter(torch.nn.Module):
    """Stands in for a model: answers every prompt with the same text, one token of the tiny tokenizer at a time.

    Args:
        seconds: that a step takes. broken: what a step does after the first token, instead of answering.
    """

    def __init__(self, text: str, seconds: float = 0.0, broken: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="mamba")
        self.generation_config = SimpleNamespace(eos_token_id=EOS)
        self.head = torch.nn.Linear(1, VOCAB_SIZE)
        self.script = [*tiny_tokenizer()(text)["input_ids"], EOS]
        self.seconds, self.broken = seconds, broken

    def get_input_embeddings(self) -> torch.nn.Linear:
        return self.head

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, cache: Any = None, logits_to_keep: int = 0, **_: Any) -> Any:
        cache = SimpleNamespace(said=-1) if cache is None else cache
        cache.said = 0 if input_ids.shape[1] > 1 else cache.said + 1
        if cache.said:
            time.sleep(self.seconds)
            if self.broken is not None:
                self.broken()
        logits = torch.zeros(1, 1, VOCAB_SIZE)
        logits[0, 0, self.script[min(cache.said, len(self.script) - 1)]] = 50.0
        return SimpleNamespace(logits=logits, cache=cache)


@contextlib.contextmanager
def serving(
    model: Any = "mamba", tokenizer: Any = None, *, buffer: int | None = None, **settings: Any
) -> Iterator[Served]:
    """Serve a tiny model (a kind, or one that is there) until the block ends.

    buffer: bytes that the system takes from the server for a client that does not read; None: as many as it likes.
    """
    from ssm_tune.outputs.serve import server
    from ssm_tune.outputs.serve.settings import ServeSettings

    if isinstance(model, str):
        model = patch_model(tiny_model(model))
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    service = server.make_service(model, tokenizer, ServeSettings(**{"drain": 1.0, **settings}))
    listener = server.bind("127.0.0.1", 0)
    if buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)  # connections inherit it
    started = threading.Event()
    running = server._Server(server.make_config(service), service, started.set)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert started.wait(60), "the server did not start"
        yield Served(listener.getsockname()[1], model, tokenizer, service, running)
    finally:
        running.should_exit = True
        thread.join(60)
        listener.close()
    assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Any, seconds: float = 30) -> None:
    """Fails if the condition does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
