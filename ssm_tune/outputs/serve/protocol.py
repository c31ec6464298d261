"""uvicorn's HTTP protocol, with a limit on how long a request's first lines may take, and errors as OpenAI's.

uvicorn closes connections that are idle between requests, but waits for ever for the end of a request line or of
headers. Clients that never finish them would use up the process's sockets.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssm_tune.outputs.serve.errors import ApiError
from ssm_tune.outputs.serve.responses import to_json


class PatientProtocol(H11Protocol):
    """One connection. `patience`: seconds for the headers of a request."""

    patience: ClassVar[float] = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told as every other mistake is."""
        body = to_json(ApiError(400, "this is not a valid HTTP request.").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Count while headers are awaited, from the first moment on; bytes that drip in do not start it anew."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience, self._give_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
