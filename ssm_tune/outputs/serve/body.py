"""Reading a request's body, from clients that may send too much, too slowly, nothing or no JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ssm_tune.outputs.serve.errors import ApiError

_CLOSE = {"connection": "close"}  # what is still on its way is not read


class Disconnected(Exception):
    """The client has gone; there is nobody to answer."""


async def read_json(request: Request, max_bytes: int, timeout: float) -> dict[str, Any]:
    """The body as an object.

    Args:
        max_bytes: of the body. timeout: seconds until it has come.

    Raises:
        ApiError: too long (413), too slow (408), of another type (415), not JSON or not an object (400).
        Disconnected: the client broke off.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Also keeps other sites' pages out: browsers send no JSON across sites without asking first.
        raise ApiError(415, f"content-type is {kind[:80]!r}; send application/json.", headers=_CLOSE)
    data = await _read(request, max_bytes, timeout)
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply.") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start}).") from error
    except ValueError as error:
        said = str(error) if data.strip() else "it is empty"
        raise ApiError(400, f"the body is not valid JSON: {said[:200]}.") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_JSON_NAMES[type(value)]}.")
    return value


_JSON_NAMES = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


async def _read(request: Request, max_bytes: int, timeout: float) -> bytes:
    too_long = ApiError(413, f"the body is longer than {max_bytes} bytes.", code="request_too_large", headers=_CLOSE)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {timeout:g} s.", headers=_CLOSE) from error
    except ClientDisconnect as error:
        raise Disconnected from error
    return bytes(data)
