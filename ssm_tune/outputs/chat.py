"""The terminal client: `ssm-tune chat URL` talks to `ssm-tune serve`, or to any server of OpenAI's requests."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

from ssm_tune.recipe import RecipeError

_HELP = "/new begins anew · /quit or Ctrl-D ends · Ctrl-C stops an answer"


@dataclass
class Conversation:
    """A conversation with a server.

    Args:
        url: of the server: http://127.0.0.1:6000, with or without http:// and /v1.
        token: sent as `Authorization: Bearer`. system: what the assistant is told first.
        settings: fields of each request: max_tokens, temperature, top_p, ...
        plain: continue each line as a text, for models without a chat template; nothing is remembered then.
        timeout: seconds without a word from the server.
    """

    url: str
    token: str | None = None
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    timeout: float = 600.0
    turns: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        try:
            port = parts.port
        except ValueError as error:
            raise RecipeError(f"chat: {self.url} is no address of a server ({error}).") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RecipeError(f"chat: {self.url} is no address of a server. It looks like http://127.0.0.1:6000.")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.turns = [] if self.system is None else [{"role": "system", "content": self.system}]

    def describe(self) -> str:
        """The model's name, as the server tells it. Finds out whether it can chat.

        Raises RecipeError: there is no such server, or it does not let us in.
        """
        with closing(self._connect()) as connection:
            models = self._read(self._send(connection, "GET", "/v1/models", None))
        try:
            name = str(models["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise RecipeError(f"chat: {self.url} does not answer as a server of OpenAI's requests does.") from error
        with closing(self._connect()) as connection:
            answer = self._send(connection, "GET", "/health", None)
            state = answer.read()
        if answer.status == 200 and state.startswith(b"{"):  # ours; others answer otherwise, or not at all
            self.plain = self.plain or json.loads(state).get("chat") is False
        return name

    def say(self, text: str) -> Iterator[str]:
        """The answer to a text, piece by piece. An answer that is not read to its end is remembered as far as it was.

        Raises RecipeError: the server cannot be reached, or refuses.
        """
        asked: dict[str, Any] = {"model": "", "stream": True, **self.settings}
        if self.plain:
            path, asked["prompt"] = "/v1/completions", text
        else:
            path, asked["messages"] = "/v1/chat/completions", [*self.turns, {"role": "user", "content": text}]
        said = ""
        with closing(self._connect()) as connection:
            answer = self._send(connection, "POST", path, asked)
            if answer.status != 200:
                self._read(answer)
            try:
                for piece in self._pieces(answer):
                    said += piece
                    yield piece
            finally:
                if said and not self.plain:
                    self.turns = [*asked["messages"], {"role": "assistant", "content": said}]

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[str]:
        try:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RecipeError(f"chat: {event['error']['message']}")
                for choice in event["choices"]:
                    yield (choice["text"] if self.plain else choice["delta"].get("content")) or ""
        except (OSError, http.client.HTTPException) as error:
            raise RecipeError(f"chat: the connection broke off ({error or type(error).__name__}).") from error

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self.timeout)

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Any:
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}".encode().decode("latin-1")
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise RecipeError(f"chat: {self.url} cannot be reached ({error}). Start it with ssm-tune serve.") from error

    def _read(self, answer: http.client.HTTPResponse) -> Any:
        """The body of a whole answer. Raises RecipeError for one that is not what was asked for."""
        text = answer.read()
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        if answer.status != 200:
            told = body["error"]["message"] if isinstance(body, dict) and "error" in body else f"status {answer.status}"
            hint = " Give it with --token." if answer.status == 401 else ""
            raise RecipeError(f"chat: {self.url} answers: {told}{hint}")
        return body


def talk(conversation: Conversation, lines: TextIO | None = None, out: TextIO | None = None) -> int:
    """Lines in, answers out, until the lines end; returns the exit code.

    Args:
        lines, out: a terminal has a prompt and a greeting; anything else gets the answers alone, one after each line.

    Raises:
        RecipeError: the server cannot be reached at the beginning. Later mistakes are told, and the next line is read.
    """
    lines, out = lines or sys.stdin, out or sys.stdout
    terminal = lines.isatty()
    name = conversation.describe()
    if terminal:
        if importlib.util.find_spec("readline") is not None:
            importlib.import_module("readline")  # gives input() a line editor
        how = "texts are continued; the model has no chat template" if conversation.plain else "chat"
        print(f"{name} at {conversation.url} ({how})\n{_HELP}", file=out)
    for text in _read_lines(lines, terminal):
        if text.strip() in ("/quit", "/exit"):
            break
        if text.strip() == "/new":
            conversation.forget()
        elif text.strip():
            _answer(conversation, text, out)
    return 0


def _answer(conversation: Conversation, text: str, out: TextIO) -> None:
    pieces = conversation.say(text)
    try:
        for piece in pieces:
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=out)
    except RecipeError as error:
        print(error, end="", file=sys.stderr, flush=True)
    finally:
        pieces.close()
    print(file=out, flush=True)


def _read_lines(lines: TextIO, terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if terminal and lines is sys.stdin else lines.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if not line and not (terminal and lines is sys.stdin):
            return
        yield line.rstrip("\n")


def start_chat(
    url: str,
    *,
    token: str | None = None,
    system: str | None = None,
    plain: bool = False,
    stop: Sequence[str] = (),
    **settings: Any,
) -> int:
    """What the command line calls.

    Args:
        settings: max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed; None: the server's default.
    """
    fields = {name: value for name, value in settings.items() if value is not None}
    if stop:
        fields["stop"] = list(stop)
    return talk(Conversation(url, token=token, system=system, plain=plain, settings=fields))
