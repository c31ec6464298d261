"""OpenAI's requests: their fields, what each may be, and what they come to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ssm_tune.outputs.serve.sampling import Rules

MAX_CHOICES = 128
_MAX_STOPS = 16
_SEEDS = 2**63


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=False)


class StreamOptions(_Fields):
    """What a stream has besides."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(_Fields):
    """Only plain text can be had."""

    type: Literal["text"]


class SharedFields(_Fields):
    """The fields that both kinds of requests share. null is as good as leaving a field out.

    `top_k`, `min_p` and `repetition_penalty` are not OpenAI's; other servers have them too.
    """

    model: Any = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)] | None = None
    stop: Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # About the account, not the answer.
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(value):
            raise ValueError("an empty text would end every answer at once")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _token_numbers(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"its keys are numbers of tokens, not {key[:40]!r}")
        return value

    @model_validator(mode="after")
    def _options_of_streams(self) -> SharedFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only a stream (stream: true) has them")
        return self

    def rules(self, choice: int = 0) -> Rules:
        """How tokens are chosen; choices of one request differ by their seeds."""
        return Rules(
            temperature=_given(self.temperature, 1.0),
            top_k=max(0, _given(self.top_k, 0)),
            top_p=_given(self.top_p, 1.0),
            min_p=_given(self.min_p, 0.0),
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            logit_bias={int(token): value for token, value in (self.logit_bias or {}).items()},
            seed=None if self.seed is None else (self.seed + choice) % _SEEDS,
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: list[Any]  # each a text or a list of tokens; a single one is put into a list
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_of_prompts(cls, value: Any) -> list[str | list[int]]:
        single = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
        prompts = [value] if single else value
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("must be a text, a list of texts, a list of tokens or a list of such lists")
        if len(prompts) > MAX_CHOICES:
            raise ValueError(f"there may be {MAX_CHOICES} prompts in a request, not {len(prompts)}")
        for prompt in prompts:
            tokens = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
            if not tokens and not isinstance(prompt, str):
                raise ValueError("must be a text, a list of texts, a list of tokens or a list of such lists")
        return prompts

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int | None) -> int | None:
        if value is not None and value != 1:
            raise ValueError("only 1 is supported")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("text before a suffix cannot be generated")
        return value

    @model_validator(mode="after")
    def _something_to_answer(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 asks for nothing, unless echo is true")
        return self


class TextPart(_Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart]  # a text is put into a list
    name: str | None = None
    refusal: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _one_part(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            raise ValueError("must be a text or a list of parts of type text")
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": "".join(part.text for part in self.content), **named}


class ChatRequest(SharedFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    # About the account, not the answer.
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true as well")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.max_tokens == 0:
            raise ValueError("max_tokens: must be 1 or more")
        return self
