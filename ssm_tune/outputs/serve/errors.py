"""Errors as OpenAI writes them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN = 160  # characters of a value, in a message


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP. message: what is wrong and what to do.
        kind: OpenAI's `type`. param: the field it is about. code: a short name of the mistake.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def from_validation(error: ValidationError, schema: type[BaseModel]) -> ApiError:
    """All mistakes of a request's fields in one error; a field that is not known is told with the nearest one."""
    messages, params = [], []
    for mistake in error.errors(include_url=False, include_context=False):
        place = ".".join(str(part) for part in mistake["loc"])
        param = str(mistake["loc"][0]) if mistake["loc"] else None
        if mistake["type"] == "extra_forbidden" and len(mistake["loc"]) == 1:
            near = get_close_matches(place, schema.model_fields, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            text = f"{_shorten(place)} is not a field of this request.{hint}"
        elif mistake["type"] == "missing":
            text = f"{place} is missing."
        else:
            given = f" (given: {_shorten(repr(mistake['input']))})" if mistake["loc"] else ""
            text = f"{place or 'the body'}: {mistake['msg'].removeprefix('Value error, ')}{given}."
        if text not in messages:
            messages.append(text)
            params.append(param)
    more = f" And {len(messages) - 5} more mistakes." if len(messages) > 5 else ""
    return ApiError(400, " ".join(messages[:5]) + more, param=params[0])


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
