"""The engine: one thread that reads prompts and decodes all running answers together, a token each at a time.

Prompts are read in pieces between the steps, so that a long one does not hold up the answers that are running; each
row is a prompt of its own, so that nothing of one request can enter another. Whoever listens is told of updates and
never waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssm_tune.families import family_of
from ssm_tune.model import padded_token_ids
from ssm_tune.outputs.decoding.states import States, make_states
from ssm_tune.outputs.generate import compute_scope, evaluating
from ssm_tune.outputs.serve.jobs import FAILED, LATE, LENGTH, STOP, Job, Update
from ssm_tune.outputs.serve.sampling import Chooser, Likelihood, choose_tokens, measure

logger = logging.getLogger(__name__)

_PIECE = 512  # tokens of prompts that are read between two steps
_MEASURED_PIECE = 64  # where logits of the whole piece are needed: each has the size of the vocabulary


class Full(Exception):
    """There are as many requests waiting as may wait."""


class Stopping(Exception):
    """No new requests are taken."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is: answers that run, and that wait."""

    running: int
    waiting: int


class Engine:
    """Runs a model for many askers.

    Args:
        model: patched; put into evaluation mode while the engine runs.
        tokenizer: for the rows of the vocabulary that no token has.
        max_batch: answers that run together. max_queue: answers that may wait besides.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, max_batch: int = 32, max_queue: int = 256) -> None:
        self._model = model
        self._max_batch, self._max_queue = max_batch, max_queue
        self._device = model.get_input_embeddings().weight.device
        self._never = torch.tensor(padded_token_ids(model, tokenizer), dtype=torch.long, device=self._device)
        # transformers' own mixers of some hybrids lose their state when a cache is continued by several tokens
        self._in_pieces = family_of(model.config.model_type).exact
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._rows: list[Job] = []
        self._states: States | None = None
        self._changed = threading.Condition()
        self._stopping = self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- called by others ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Take no new requests, and let those that are there end within so many seconds."""
        with self._changed:
            self._draining = True
            for job in (*self._rows, *self._reading, *self._waiting):
                job.deadline = min(job.deadline, time.monotonic() + seconds)

    def stop(self) -> None:
        """Fail what is left, and wait for the thread to end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def load(self) -> Load:
        return Load(len(self._rows) + len(self._reading), len(self._waiting))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take in the answers of one request, all or none. Raises Full, Stopping."""
        with self._changed:
            room = self._max_queue + max(0, self._max_batch - len(self._rows) - len(self._reading))
            if self._stopping or self._draining:
                raise Stopping
            if len(self._waiting) + len(jobs) > room:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody listens any more: their rows are given to others at the next step."""
        for job in jobs:
            job.cancelled = True

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with evaluating(self._model), compute_scope(self._model), torch.no_grad():
                while self._wait():
                    self._admit()
                    self._read_prompts()
                    self._decode()
        finally:  # whatever ended it, nobody is left waiting
            with self._changed:
                self._stopping = True
                jobs = [*self._rows, *self._reading, *self._waiting]
            for job in jobs:
                job.listen(job, Update(finish=FAILED, detail="the server is stopping"))

    def _wait(self) -> bool:
        with self._changed:
            while not (self._stopping or self._waiting or self._reading or self._rows):
                self._changed.wait()
            return not self._stopping

    def _admit(self) -> None:
        with self._changed:
            waiting = [job for job in self._waiting if not job.cancelled and not job.late]
            dropped = [job for job in self._waiting if not job.cancelled and job.late]
            room = max(0, self._max_batch - len(self._rows) - len(self._reading))
            self._reading.extend(waiting[:room])
            self._waiting = deque(waiting[room:])
        for job in dropped:
            job.listen(job, Update(finish=LATE))

    def _read_prompts(self) -> None:
        """A piece's worth of tokens, taken from the prompts in turn: short ones get through beside a long one."""
        left = _PIECE
        while self._reading and left > 0:
            job = self._reading[0]  # and it stays there, to be counted
            if job.cancelled or job.late:
                self._reading.popleft()
                job.listen(job, Update(finish=LATE))
                continue
            size = _MEASURED_PIECE if job.measure_prompt else _PIECE
            if not self._in_pieces:
                size = len(job.prompt)
            piece = job.prompt[job.read : job.read + size]
            left -= len(piece)
            try:
                logits = self._read(job, piece)
            except torch.OutOfMemoryError as error:
                logger.error("serve: out of memory while reading a prompt of %d tokens", len(job.prompt))
                job.cache = None
                self._reading.popleft()
                job.listen(job, Update(finish=FAILED, detail=f"out of memory: {str(error).splitlines()[0]}"))
                continue
            if job.read < len(job.prompt):
                self._reading.rotate(-1)
            else:
                self._begin(job, logits)
                self._reading.popleft()

    def _read(self, job: Job, piece: list[int]) -> Tensor:
        """Logits (1, vocabulary) after a piece of a prompt."""
        ids = torch.tensor([piece], device=self._device)
        keep = 0 if job.measure_prompt else 1
        output = self._model(input_ids=ids, cache=job.cache, use_cache=True, logits_to_keep=keep)
        job.cache = output.cache
        logits = self._mask(output.logits[0].float())
        if job.measure_prompt:
            job.measured = job.measured or [None]
            following = job.prompt[job.read + 1 : job.read + 1 + len(piece)]
            for row, token in zip(logits, following):  # noqa: B905  after the last token there is none
                job.measured.append(measure(row, token, job.beside or 0))
        job.read += len(piece)
        return logits[-1:]

    def _begin(self, job: Job, logits: Tensor) -> None:
        """The prompt is read: choose the first token, and join the rows."""
        prompt, job.measured = tuple(job.measured), []
        cache, job.cache = job.cache, None
        if job.max_tokens == 0:
            job.listen(job, Update(prompt=prompt, finish=LENGTH))
            return
        job.chooser = Chooser(job.rules, job.prompt, self._device)
        if self._advance([job], logits, prompt):
            return
        if self._states is None:
            self._states = make_states(self._model, cache)
        self._states.add(cache, len(job.prompt))
        self._rows.append(job)

    def _decode(self) -> None:
        """One token more for every row. Rows that nobody listens to leave first."""
        self._leave([row for row, job in enumerate(self._rows) if job.cancelled])
        if not self._rows:
            return
        try:
            logits = self._mask(self._states.step([job.answer[-1] for job in self._rows]))
        except torch.OutOfMemoryError as error:  # some layers have gone on and others have not: the states are lost
            logger.error("serve: out of memory with %d answers running; they are given up", len(self._rows))
            for job in self._rows:
                job.listen(job, Update(finish=FAILED, detail=f"out of memory: {str(error).splitlines()[0]}"))
            self._rows, self._states = [], None
            return
        self._leave(self._advance(self._rows, logits))

    def _mask(self, logits: Tensor) -> Tensor:
        """Without the rows of the output layer that no token has."""
        return logits.index_fill(-1, self._never, -torch.inf) if self._never.numel() else logits

    def _advance(self, jobs: list[Job], logits: Tensor, prompt: tuple[Likelihood | None, ...] = ()) -> list[int]:
        """Choose each job's next token and tell it; returns the places of those that are done."""
        done = []
        for place, (job, token) in enumerate(
            zip(jobs, choose_tokens([job.chooser for job in jobs], logits), strict=True)
        ):
            if token is None:
                update = Update(finish=FAILED, detail="the model's logits are not numbers (NaN or infinite)")
            else:
                update = _extend(job, token, logits[place], prompt)
            job.listen(job, update)
            if update.finish is not None:
                done.append(place)
        return done

    def _leave(self, places: list[int]) -> None:
        for place in reversed(places):  # from the last one on: the last row takes the place of one that leaves
            self._states.remove(place)
            self._rows[place] = self._rows[-1]
            self._rows.pop()


def _extend(job: Job, token: int, logits: Tensor, prompt: tuple[Likelihood | None, ...]) -> Update:
    """Put a token to a job's answer."""
    job.answer.append(token)
    if token in job.ends:
        return Update(text=job.text.finish(), prompt=prompt, finish=STOP)
    finish, text = None, job.text.push(token)
    if job.text.stopped:
        finish = STOP
    elif len(job.answer) >= job.max_tokens or job.late:
        text += job.text.finish()
        finish = STOP if job.text.stopped else LENGTH
    tokens = () if job.beside is None else (measure(logits, token, job.beside),)
    return Update(text=text, tokens=tokens, prompt=prompt, finish=finish)
