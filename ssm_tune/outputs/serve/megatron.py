"""Megatron-LM's text generation request: PUT /api, as tools/text_generation_cli.py and its forks send it.

Field names, limits and the answer's fields are those of Megatron-LM's text_generation_server. Its server answers some
mistakes with status 200; here they are 400, with the `message` that the client prints.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ssm_tune.outputs.serve.mailbox import Mailbox
from ssm_tune.outputs.serve.openai_answers import Answer
from ssm_tune.outputs.serve.responses import JsonAnswer
from ssm_tune.outputs.serve.sampling import Rules
from ssm_tune.outputs.serve.service import Service

_MAX_PROMPTS = 128
_DEFAULT_TOKENS = 64

Share = Annotated[float, Field(ge=0, le=1)]


class MegatronRequest(BaseModel):
    """Its fields. `top_p` 0 means no limit, as `top_k` 0 does; without either, all tokens can come."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompts: Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
    tokens_to_generate: Annotated[int, Field(ge=0)] = _DEFAULT_TOKENS
    logprobs: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Share = 0.0
    top_p_decay: Share = 0.0
    top_p_bound: Share = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    stop_token: int | None = None
    length_penalty: float = 1.0  # of beam search alone
    beam_width: int | None = None
    no_log: bool = False  # requests are never logged

    @field_validator("prevent_newline_after_colon")
    @classmethod
    def _not_supported(cls, value: bool) -> bool:
        if value:
            raise ValueError("is not supported by this server")
        return value

    @field_validator("beam_width")
    @classmethod
    def _no_beams(cls, value: int | None) -> int | None:
        if value is not None:
            raise ValueError("beam search is not supported by this server")
        return value

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> MegatronRequest:
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ValueError("tokens_to_generate=0 implies logprobs should be True")
        if self.top_p > 0 and self.top_k > 0:
            raise ValueError("cannot set both top-k and top-p samplings")
        if self.top_p == 0 and (self.top_p_decay or self.top_p_bound):
            raise ValueError("top_p_decay and top_p_bound cannot be set without top_p")
        if self.top_p_bound > self.top_p:
            raise ValueError("top_p_bound must be less than or equal to top_p")
        if not all(self.prompts) and not self.add_BOS:
            raise ValueError("Empty prompts require add_BOS=true")
        return self

    def rules(self, row: int) -> Rules:
        """How a prompt's tokens are chosen; a top_k of 1 takes the likeliest, as in Megatron."""
        return Rules(
            temperature=0.0 if self.top_k == 1 else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            top_p_decay=self.top_p_decay or 1.0,
            top_p_bound=self.top_p_bound,
            seed=None if self.random_seed < 0 else (self.random_seed + row) % 2**63,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer, and belong to it."""
        return ("\n",) if self.stop_on_eol else ("\n\n",) if self.stop_on_double_eol else ()


async def answer_megatron(service: Service, request: Request, asked: MegatronRequest) -> Response:
    """text (prompt and answer), segments and tokens of both, and with `logprobs` those of all tokens but the first.

    Raises ApiError, Disconnected.
    """
    reader, mailbox = service.reader, Mailbox()
    limit = service.check_length(asked.tokens_to_generate, "tokens_to_generate", _DEFAULT_TOKENS)
    prompts = await service.in_thread(
        lambda: [reader.read_prompt(prompt, "prompts", asked.add_BOS) for prompt in asked.prompts]
    )
    ends = None if asked.stop_token is None else frozenset({asked.stop_token})
    answers = []
    for row, ids in enumerate(prompts):
        job = service.make_job(
            mailbox,
            ids,
            asked.rules(row),
            limit,
            asked.stops,
            context=ids,
            beside=0 if asked.logprobs else None,
            show_stop=True,
            ends=ends,
        )
        job.measure_prompt = asked.logprobs
        answers.append(Answer(row, job))
    await service.collect(request, answers, mailbox)
    tokens = [[*answer.job.prompt, *answer.job.shown] for answer in answers]
    body: dict[str, Any] = {
        "text": [prompt + answer.text for prompt, answer in zip(asked.prompts, answers, strict=True)],
        "segments": [[reader.text([token]) for token in row] for row in tokens],
        "tokens": tokens,
    }
    if asked.logprobs:
        body["logprobs"] = [
            [one.value for one in (*answer.prompt, *answer.tokens) if one is not None] for answer in answers
        ]
    return JsonAnswer(body)
