"""From a request that is read to its answer: jobs for the engine, and what becomes of their updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ssm_tune.outputs.serve.engine import Engine, Full, Stopping
from ssm_tune.outputs.serve.errors import ApiError
from ssm_tune.outputs.serve.jobs import FAILED, LATE, Job, Update
from ssm_tune.outputs.serve.mailbox import Mailbox
from ssm_tune.outputs.serve.openai_answers import Answer, ChatShape, CompletionShape, count_tokens
from ssm_tune.outputs.serve.openai_requests import ChatRequest, CompletionRequest
from ssm_tune.outputs.serve.prompts import PromptReader
from ssm_tune.outputs.serve.responses import EventStream, JsonAnswer, unless_gone
from ssm_tune.outputs.serve.sampling import Rules
from ssm_tune.outputs.serve.settings import ServeSettings
from ssm_tune.outputs.text_stream import TextStream

T = TypeVar("T")
_COMPLETION_TOKENS = 16  # OpenAI's default
_CHAT_TOKENS = 2048


class Service:
    """Answers requests with one model.

    Args:
        engine: runs, or will before the first request comes.
    """

    def __init__(self, engine: Engine, reader: PromptReader, settings: ServeSettings) -> None:
        self.engine, self.reader, self.settings = engine, reader, settings
        # Tokenising a long prompt takes a second; the event loop must go on meanwhile.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        """/v1/completions. Raises ApiError, Disconnected."""
        mailbox = Mailbox()
        limit = self.check_length(asked.max_tokens, "max_tokens", _COMPLETION_TOKENS)
        prompts = await self.in_thread(lambda: [self.reader.read_prompt(prompt) for prompt in asked.prompt])
        self.reader.check_bias([int(token) for token in asked.logit_bias or {}])
        answers: list[Answer] = []
        for prompt, ids in zip(asked.prompt, prompts, strict=True):
            for choice in range(asked.n or 1):
                job = self.make_job(
                    mailbox, ids, asked.rules(choice), limit, asked.stop or (), context=ids, beside=asked.logprobs
                )
                job.measure_prompt = bool(asked.echo) and asked.logprobs is not None
                echo = (prompt if isinstance(prompt, str) else self.reader.text(ids)) if asked.echo else ""
                answers.append(Answer(len(answers), job, echo))
        shape = CompletionShape(self._name(asked.model), self.reader.text)
        return await self._respond(request, asked, answers, mailbox, shape, len(prompts))

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """/v1/chat/completions. Raises ApiError, Disconnected."""
        mailbox = Mailbox()
        wanted = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        limit = self.check_length(wanted, "max_tokens", _CHAT_TOKENS)
        messages = [message.plain for message in asked.messages]
        ids = await self.in_thread(lambda: self.reader.read_messages(messages))
        self.reader.check_bias([int(token) for token in asked.logit_bias or {}])
        beside = (asked.top_logprobs or 0) if asked.logprobs else None
        answers = [
            Answer(choice, self.make_job(mailbox, ids, asked.rules(choice), limit, asked.stop or (), beside=beside))
            for choice in range(asked.n or 1)
        ]
        shape = ChatShape(self._name(asked.model), self.reader.text)
        return await self._respond(request, asked, answers, mailbox, shape, 1)

    # -- parts of it, for Megatron's requests too ------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work that takes long, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_length(self, wanted: int | None, param: str, default: int) -> int:
        """How many tokens an answer may have. Raises ApiError if more are wanted than this server gives."""
        most = self.settings.max_new_tokens
        if wanted is not None and wanted > most:
            raise ApiError(400, f"{param}: this server gives at most {most} tokens in one answer.", param=param)
        return min(default, most) if wanted is None else wanted

    def make_job(
        self,
        mailbox: Mailbox,
        ids: list[int],
        rules: Rules,
        max_tokens: int,
        stops: Sequence[str] = (),
        *,
        context: Sequence[int] = (),
        beside: int | None = None,
        show_stop: bool = False,
        ends: frozenset[int] | None = None,
    ) -> Job:
        """An answer to be given, whose updates come into the mailbox."""
        return Job(
            prompt=ids,
            rules=rules,
            max_tokens=max_tokens,
            ends=self.reader.ends if ends is None else ends,
            text=TextStream(self.reader.tokenizer, stops, context, show_stop),
            deadline=time.monotonic() + self.settings.timeout,
            listen=mailbox.listen,
            beside=beside,
        )

    def submit(self, jobs: Sequence[Job]) -> None:
        """Give jobs to the engine. Raises ApiError: 429 if too many wait, 503 if the server is stopping."""
        most = self.settings.max_batch + self.settings.max_queue
        if len(jobs) > most:
            raise ApiError(400, f"{len(jobs)} answers in one request; this server takes {most} at most.")
        try:
            self.engine.submit(jobs)
        except Full as error:
            raise _too_busy("too many requests are waiting. Try again later.") from error
        except Stopping as error:
            raise ApiError(503, "the server is stopping.", kind="server_error", code="stopping") from error

    async def collect(self, request: Request, answers: Sequence[Answer], mailbox: Mailbox) -> None:
        """Run answers to their ends. Raises ApiError, Disconnected."""

        async def run() -> None:
            open_answers = {answer.job: answer for answer in answers}
            while open_answers:
                for job, update in (await mailbox.take()).items():
                    add_update(open_answers[job], update)
                    if update.finish is not None:
                        del open_answers[job]

        jobs = [answer.job for answer in answers]
        self.submit(jobs)
        try:
            await unless_gone(request, run())
        finally:
            self.engine.cancel(jobs)

    # -- answering -------------------------------------------------------------------------------------------------

    async def _respond(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        answers: list[Answer],
        mailbox: Mailbox,
        shape: CompletionShape | ChatShape,
        prompts: int,
    ) -> Response:
        if not asked.stream:
            await self.collect(request, answers, mailbox)
            return JsonAnswer(shape.whole(answers, count_tokens(answers, prompts)))
        jobs = [answer.job for answer in answers]
        self.submit(jobs)
        with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        events = self._events(answers, mailbox, shape, prompts if with_usage else None)
        return EventStream(events, lambda: jobs[0].deadline, lambda: self.engine.cancel(jobs))

    async def _events(
        self,
        answers: list[Answer],
        mailbox: Mailbox,
        shape: CompletionShape | ChatShape,
        prompts: int | None,
    ) -> AsyncIterator[Any]:
        """A stream's pieces; `prompts`: how many there were, if usage is to be told at the end."""
        for answer in answers:
            if (first := shape.first(answer)) is not None:
                yield first
        open_answers = {answer.job: answer for answer in answers}
        while open_answers:
            for job, update in (await mailbox.take()).items():
                answer = open_answers[job]
                try:
                    add_update(answer, update)
                except ApiError as error:
                    yield error.body()
                    return
                text = update.text
                if answer.echo:
                    text, answer.echo = answer.echo + text, ""
                if text or update.tokens or update.prompt or update.finish is not None:
                    yield shape.piece(answer, text, update.prompt, update.tokens, update.finish)
                if update.finish is not None:
                    del open_answers[job]
        if prompts is not None:
            yield shape.usage(count_tokens(answers, prompts))

    def _name(self, asked: Any) -> str:
        return asked if isinstance(asked, str) and 0 < len(asked) <= 256 else self.settings.name


def add_update(answer: Answer, update: Update) -> None:
    """Put what is new to an answer. Raises ApiError if there will be none."""
    if update.finish == LATE:
        raise _too_busy("the request waited for its whole time and was not begun. Try again later.")
    if update.finish == FAILED:
        raise ApiError(500, f"{update.detail}.", kind="server_error", code="failed")
    answer.text += update.text
    answer.tokens.extend(update.tokens)
    answer.prompt.extend(update.prompt)
    answer.finish = update.finish


def _too_busy(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"})
