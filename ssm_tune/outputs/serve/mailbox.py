"""Updates on their way from the engine's thread to the request that waits for them."""

from __future__ import annotations

import asyncio
import threading

from ssm_tune.outputs.serve.jobs import Job, Update


class Mailbox:
    """Updates of one request's answers. Who does not look for a while finds them put together: a client that reads
    slowly costs the text it has not read, and nobody waits for it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._come = asyncio.Event()
        self._lock = threading.Lock()
        self._updates: dict[Job, Update] = {}

    def listen(self, job: Job, update: Update) -> None:
        """Take an update; in any thread."""
        with self._lock:
            awake = bool(self._updates)
            self._updates[job] = _joined(self._updates[job], update) if job in self._updates else update
        if not awake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._come.set)

    async def take(self) -> dict[Job, Update]:
        """What has come since the last time; waits for something."""
        await self._come.wait()
        self._come.clear()
        with self._lock:
            updates, self._updates = self._updates, {}
        return updates


def _joined(first: Update, then: Update) -> Update:
    return Update(
        text=first.text + then.text,
        tokens=first.tokens + then.tokens,
        prompt=first.prompt + then.prompt,
        finish=then.finish,
        detail=then.detail,
    )
