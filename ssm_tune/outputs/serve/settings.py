"""What a server allows."""

from __future__ import annotations

from dataclasses import dataclass

from ssm_tune.recipe import RecipeError


@dataclass(frozen=True)
class ServeSettings:
    """Limits, and who may come in.

    Args:
        name: the model's, as /v1/models tells it; requests may name any model.
        token: what clients send as `Authorization: Bearer TOKEN`; None: everybody who reaches the server may ask.
        max_batch: answers that run together. max_queue: answers that may wait besides; more are refused (429).
        max_body_bytes: of a request (413).
        max_prompt_tokens: of one prompt (400). max_new_tokens: of one answer (400).
        timeout: seconds for one request; an answer that is not ready by then ends where it is.
        body_timeout: seconds for a request's headers, and for its body, to come.
        drain: seconds that running answers are given when the server is told to stop.
    """

    name: str = "ssm-tune"
    token: str | None = None
    max_batch: int = 32
    max_queue: int = 256
    max_body_bytes: int = 8 * 2**20
    max_prompt_tokens: int = 131_072
    max_new_tokens: int = 32_768
    timeout: float = 600.0
    body_timeout: float = 30.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        counts = ("max_batch", "max_body_bytes", "max_prompt_tokens", "max_new_tokens")
        mistakes = [f"{name}: {getattr(self, name)!r} must be 1 or more." for name in counts if getattr(self, name) < 1]
        if self.max_queue < 0:
            mistakes.append(f"max_queue: {self.max_queue!r} must be 0 or more.")
        for name in ("timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                mistakes.append(f"{name}: {getattr(self, name)!r} must be above 0 seconds.")
        if not self.drain >= 0:
            mistakes.append(f"drain: {self.drain!r} must be 0 seconds or more.")
        if self.token is not None and not self.token.strip():
            mistakes.append("token: it is empty. Leave it out, or give one.")
        if mistakes:
            raise RecipeError(mistakes)
