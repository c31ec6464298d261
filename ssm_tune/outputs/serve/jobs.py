"""One answer to be given: what was asked, how far it is, and what the asker hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ssm_tune.outputs.serve.sampling import Chooser, Likelihood, Rules
from ssm_tune.outputs.text_stream import TextStream

# Why an answer ended, in OpenAI's words where it has them.
STOP, LENGTH = "stop", "length"
# And why there is none: not OpenAI's words, answers with these are told as errors.
LATE, FAILED = "late", "failed"


@dataclass(frozen=True)
class Update:
    """What is new of an answer: text that is certain, tokens, and how it ended if it has."""

    text: str = ""
    tokens: tuple[Likelihood, ...] = ()
    prompt: tuple[Likelihood | None, ...] = ()  # of the prompt's tokens; the first has none
    finish: str | None = None
    detail: str = ""  # what failed


@dataclass(eq=False)
class Job:
    """An answer in the making. The engine's thread alone changes it, but for `cancelled`.

    Args:
        prompt: its tokens, at least one.
        max_tokens: of the answer; 0 only measures the prompt.
        ends: tokens that end the answer.
        beside: how many of the likeliest tokens to tell with each token; None: no likelihoods at all.
        measure_prompt: tell the likelihoods of the prompt's tokens too.
        deadline: by time.monotonic().
        listen: hears every update, in the engine's thread.
    """

    prompt: list[int]
    rules: Rules
    max_tokens: int
    ends: frozenset[int]
    text: TextStream
    deadline: float
    listen: Callable[[Job, Update], None]
    beside: int | None = None
    measure_prompt: bool = False
    cancelled: bool = False
    # how far it is
    read: int = 0  # tokens of the prompt
    cache: Any = None  # while the prompt is read
    chooser: Chooser | None = None
    answer: list[int] = field(default_factory=list)
    measured: list[Likelihood | None] = field(default_factory=list)

    @property
    def shown(self) -> list[int]:
        """The answer's tokens without the one that ended it."""
        ended = bool(self.answer) and self.answer[-1] in self.ends
        return self.answer[:-1] if ended else self.answer

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.deadline
