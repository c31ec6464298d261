"""The HTTP interface: what is asked where, who may ask, and that every mistake gets an answer."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ssm_tune.outputs.serve.body import Disconnected, read_json
from ssm_tune.outputs.serve.errors import ApiError, from_validation
from ssm_tune.outputs.serve.megatron import MegatronRequest, answer_megatron
from ssm_tune.outputs.serve.openai_requests import ChatRequest, CompletionRequest
from ssm_tune.outputs.serve.responses import JsonAnswer
from ssm_tune.outputs.serve.service import Service

logger = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=BaseModel)

# The page runs its own script, talks to its own server and nothing else.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def make_app(service: Service) -> FastAPI:
    """The application. The engine runs as long as the application does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.stop()
        service.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_answers(app)
    _add_openai(app, service)
    _add_pages(app, service)

    @app.put("/api")
    @app.post("/api")
    async def megatron(request: Request) -> Response:
        asked = await _read(request, service, MegatronRequest)
        return await answer_megatron(service, request, asked)

    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    started = int(time.time())
    model = {"id": service.settings.name, "object": "model", "created": started, "owned_by": "ssm-tune"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(request, await _read(request, service, CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.chat(request, await _read(request, service, ChatRequest))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_token(request, service)
        return JsonAnswer({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        # Requests may name any model, so any name is known.
        _check_token(request, service)
        return JsonAnswer({**model, "id": name})


def _add_pages(app: FastAPI, service: Service) -> None:
    page = files("ssm_tune.outputs.serve").joinpath("chat.html").read_bytes()

    @app.get("/")
    async def chat_page() -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    @app.get("/health")
    async def health() -> Response:
        load = service.engine.load
        body = {
            "status": "ok" if service.engine.alive else "stopping",
            "model": service.settings.name,
            "chat": service.reader.chat,
            "running": load.running,
            "waiting": load.waiting,
        }
        return JsonAnswer(body, status_code=200 if service.engine.alive else 503)


async def _read(request: Request, service: Service, schema: type[Fields]) -> Fields:
    _check_token(request, service)
    settings = service.settings
    body = await read_json(request, settings.max_body_bytes, settings.body_timeout)
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, schema) from error


def _check_token(request: Request, service: Service) -> None:
    wanted = service.settings.token
    if wanted is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are bytes, which Starlette reads as Latin-1.
    right = hmac.compare_digest(given.strip().encode("latin-1"), wanted.encode("utf-8", "surrogateescape"))
    if scheme.lower() != "bearer" or not right:
        raise ApiError(
            401,
            "this server wants a token: send it as the header Authorization: Bearer TOKEN.",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )


def _add_error_answers(app: FastAPI) -> None:
    def answer(request: Request, error: ApiError) -> Response:
        body = error.body()
        if request.url.path == "/api":  # what Megatron's client prints
            body["message"] = error.message
        return JsonAnswer(body, status_code=error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @app.exception_handler(Disconnected)
    async def gone(request: Request, error: Disconnected) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        told = {404: f"there is nothing at {request.url.path!r}.", 405: f"{request.method} is not possible here."}
        message = told.get(error.status_code, str(error.detail))
        return answer(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        # Starlette logs it with its traceback.
        return answer(
            request, ApiError(500, "the server made a mistake; its log has the details.", kind="server_error")
        )


def describe(service: Service, address: str) -> list[str]:
    """What to tell whoever started the server."""
    settings: Any = service.settings
    lines = [
        f"serving {settings.name} at {address} (Ctrl-C stops it)",
        f"  OpenAI clients: base_url={address}/v1    Megatron's client: PUT {address}/api    in a browser: {address}/",
    ]
    if not service.reader.chat:
        lines.append("  the tokenizer has no chat template: /v1/completions only")
    return lines
