"""HTTP answers of our own: JSON that no text can break, and streams that notice when the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ssm_tune.outputs.serve.body import Disconnected

T = TypeVar("T")
_LAST_READS = 5.0  # seconds after the deadline, for what was written until then


def to_json(value: Any) -> bytes:
    """In ASCII: half a character (a lone surrogate) that a client sent can be told back, which UTF-8 cannot."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


class JsonAnswer(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: each one's data, as JSON; "[DONE]" follows the last one.
        deadline: by time.monotonic(), asked for as it may be brought forward; a client that has not read everything
            some seconds after it is cut off.
        closed: called at the end, however it came.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], deadline: Callable[[], float], closed: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._deadline, self._closed = events, deadline, closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send(_body(b"data: " + to_json(event) + b"\n\n"))
            await send(_body(b"data: [DONE]\n\n", more=False))

        async def patience() -> None:
            while (left := self._deadline() + _LAST_READS - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 1.0))

        try:
            await _first(pump(), _gone(receive), patience())
        finally:
            self._closed()


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises Disconnected as soon as the client has gone, and ends the work."""
    done, result = await _first(work, _gone(request.receive))
    if done != 0:
        raise Disconnected
    return result


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(*works: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """The number and the result of the work that ends first; the others are ended. Its exception is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.wait(tasks)
    for number, task in enumerate(tasks):
        if not task.cancelled():
            return number, task.result()
    raise asyncio.CancelledError
