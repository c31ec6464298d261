"""OpenAI's answers: whole ones, and the pieces of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssm_tune.outputs.serve.jobs import Job
from ssm_tune.outputs.serve.sampling import Likelihood

Decode = Callable[[Sequence[int]], str]


@dataclass
class Answer:
    """One choice, as it has come so far. `echo`: the prompt's text, where it is to be given back."""

    index: int
    job: Job
    echo: str = ""
    text: str = ""
    tokens: list[Likelihood] = field(default_factory=list)
    prompt: list[Likelihood | None] = field(default_factory=list)
    finish: str | None = None


def count_tokens(answers: Sequence[Answer], prompts: int) -> dict[str, int]:
    """OpenAI's `usage`: a prompt counts once, however many choices it has."""
    choices = max(1, len(answers) // max(1, prompts))
    read = sum(len(answer.job.prompt) for answer in answers[::choices])
    written = sum(len(answer.job.answer) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class CompletionShape:
    """text_completion. `offset` of tokens counts characters from the beginning of the choice's text."""

    kind = "text_completion"

    def __init__(self, model: str, decode: Decode) -> None:
        self._decode = decode
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._offsets: dict[int, int] = {}

    def whole(self, answers: Sequence[Answer], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request without stream."""
        choices = [
            self._choice(answer, answer.echo + answer.text, answer.prompt, answer.tokens, answer.finish)
            for answer in answers
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def first(self, answer: Answer) -> dict[str, Any] | None:
        """What a stream's choice begins with."""
        return None

    def piece(self, answer: Answer, text: str, prompt: Any, tokens: Any, finish: str | None) -> dict[str, Any]:
        """What is new of a choice."""
        choice = self._choice(answer, text, prompt, tokens, finish)
        return {**self._head, "object": self.kind, "choices": [choice]}

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """A stream's last piece, where it was asked for."""
        return {**self._head, "object": self.kind, "choices": [], "usage": usage}

    def _choice(
        self,
        answer: Answer,
        text: str,
        prompt: Sequence[Likelihood | None],
        tokens: Sequence[Likelihood],
        finish: str | None,
    ) -> dict[str, Any]:
        likelihoods = None
        if answer.job.beside is not None:
            likelihoods = self._likelihoods(answer, prompt, tokens)
        return {"index": answer.index, "text": text, "logprobs": likelihoods, "finish_reason": finish}

    def _likelihoods(
        self, answer: Answer, prompt: Sequence[Likelihood | None], tokens: Sequence[Likelihood]
    ) -> dict[str, Any]:
        ids = [*(answer.job.prompt if prompt else []), *(token.token for token in tokens)]
        measured: list[Likelihood | None] = [*prompt, *tokens]
        names = [self._decode([token]) for token in ids]
        at, offsets = self._offsets.get(answer.index, 0), []
        for name in names:
            offsets.append(at)
            at += len(name)
        self._offsets[answer.index] = at
        beside = [
            {self._decode([token]): value for token, value in reversed(one.likeliest)} if one is not None else None
            for one in measured
        ]
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else one.value for one in measured],
            "top_logprobs": beside if answer.job.beside else None,
            "text_offset": offsets,
        }


class ChatShape:
    """chat.completion, and chat.completion.chunk in streams."""

    def __init__(self, model: str, decode: Decode) -> None:
        self._decode = decode
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request without stream."""
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._likelihoods(answer, answer.tokens),
                "finish_reason": answer.finish,
            }
            for answer in answers
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def first(self, answer: Answer) -> dict[str, Any] | None:
        """What a stream's choice begins with."""
        return self._chunk(answer, {"role": "assistant", "content": ""}, None, None)

    def piece(self, answer: Answer, text: str, prompt: Any, tokens: Any, finish: str | None) -> dict[str, Any]:
        """What is new of a choice."""
        return self._chunk(answer, {"content": text} if text else {}, self._likelihoods(answer, tokens), finish)

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """A stream's last piece, where it was asked for."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _chunk(self, answer: Answer, delta: dict[str, str], likelihoods: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": answer.index, "delta": delta, "logprobs": likelihoods, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _likelihoods(self, answer: Answer, tokens: Sequence[Likelihood]) -> dict[str, Any] | None:
        if answer.job.beside is None:
            return None
        content = [
            {**self._named(one.token, one.value), "top_logprobs": [self._named(*pair) for pair in one.likeliest]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self._decode([token])
        whole = "\ufffd" not in text  # else it is only a part of a character, whose bytes the tokenizer keeps to itself
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}
