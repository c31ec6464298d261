"""Starting and stopping the server: `ssm-tune serve RUN|MODEL`."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from torch import nn

from ssm_tune.outputs.serve.app import describe, make_app
from ssm_tune.outputs.serve.engine import Engine
from ssm_tune.outputs.serve.prompts import PromptReader
from ssm_tune.outputs.serve.protocol import PatientProtocol
from ssm_tune.outputs.serve.service import Service
from ssm_tune.outputs.serve.settings import ServeSettings
from ssm_tune.recipe import RecipeError

logger = logging.getLogger(__name__)


def _say(line: str) -> None:
    print(line, flush=True)  # who waits for the address may read it through a pipe


def serve_source(
    source: str | Path, host: str, port: int, settings: ServeSettings, say: Callable[[str], None] = _say
) -> int:
    """Load a run or a model and serve it until a signal comes; returns the exit code.

    Args:
        port: 0 takes a free one. say: is told the address when requests can come.

    Raises:
        RecipeError: the address cannot be had (told before the model is loaded), or the source cannot be loaded.
    """
    from ssm_tune.outputs.run import load_source

    with contextlib.closing(bind(host, port)) as listener:
        model, tokenizer = load_source(source)
        return serve_model(model, tokenizer, listener, settings, say)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which listens once the server runs. Raises RecipeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise RecipeError(f"serve: --host {host} --port {port} is no address here ({error}).") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise RecipeError(f"serve: {host}:{port} cannot be used ({error}). Choose another with --port.") from error
    return listener


def serve_model(
    model: nn.Module,
    tokenizer: Any,
    listener: socket.socket,
    settings: ServeSettings,
    say: Callable[[str], None] = _say,
) -> int:
    """Serve a loaded model at a bound socket until a signal comes; returns the exit code: 0, or 1 if it broke."""
    service = make_service(model, tokenizer, settings)
    address = _address(listener)
    server = _Server(make_config(service), service, lambda: [say(line) for line in describe(service, address)])
    _warn_if_open(listener, settings)
    server.run(sockets=[listener])
    return 1 if server.broken else 0


def make_service(model: nn.Module, tokenizer: Any, settings: ServeSettings) -> Service:
    """Everything that answers requests, not running yet."""
    engine = Engine(model, tokenizer, max_batch=settings.max_batch, max_queue=settings.max_queue)
    return Service(engine, PromptReader(model, tokenizer, settings.max_prompt_tokens), settings)


def make_config(service: Service) -> uvicorn.Config:
    """uvicorn's settings. h11 whatever else is installed: its answers to broken HTTP are the ones that are tested."""
    protocol = type("Protocol", (PatientProtocol,), {"patience": service.settings.body_timeout})
    return uvicorn.Config(
        make_app(service),
        http=protocol,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Answers end within `drain`; the rest is for clients that read slowly.
        timeout_graceful_shutdown=round(service.settings.drain) + 10,
    )


class _Server(uvicorn.Server):
    """Ends when a signal comes or when the engine has died, and gives control back to the caller."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], Any]) -> None:
        super().__init__(config)
        self._service, self._tell_started = service, started
        self.broken = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.engine.drain(self._service.settings.drain)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if not self._service.engine.alive:
            logger.error("serve: the engine has died; its traceback is above. Stopping.")
            self.broken = True
            return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn, which raises the signal again at the end: to stop a server is not to break it off."""
        if threading.current_thread() is not threading.main_thread():  # where no signals come
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_open(listener: socket.socket, settings: ServeSettings) -> None:
    host = listener.getsockname()[0]
    if settings.token is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "serve: %s is reached from other machines, and no token is asked for. Set one with --token.", host
        )
