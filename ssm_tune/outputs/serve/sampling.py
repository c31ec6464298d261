"""Choosing tokens for rows that decode together, each by its own rules and its own random numbers."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

_COLD = 1e-5  # temperatures below it take the likeliest token: the division would overflow


@dataclass(frozen=True)
class Rules:
    """How one row's tokens are chosen. The order is transformers': penalties, temperature, top_k, top_p, min_p.

    `frequency_penalty`, `presence_penalty`, `logit_bias`: OpenAI's; they count the answer's own tokens.
    `repetition_penalty`: transformers'; it counts the prompt's too. `top_p_decay`, `top_p_bound`: Megatron's: top_p is
    multiplied by the decay after each token, and does not fall below the bound. `seed` None: another answer each time.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    top_p_decay: float = 1.0
    top_p_bound: float = 0.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < _COLD

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is taken by the model's own logits, so that rows can be done at once."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return self.greedy and penalties == (1.0, 0.0, 0.0) and not self.logit_bias


@dataclass(frozen=True)
class Likelihood:
    """A token's natural log-probability by the model itself, before any rule, and the likeliest ones beside it."""

    token: int
    value: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses one row's tokens. The same rules and prompt give the same tokens, whatever runs beside them."""

    def __init__(self, rules: Rules, prompt: Sequence[int], device: torch.device) -> None:
        self.rules = rules
        self._prompt = tuple(set(prompt)) if rules.repetition_penalty != 1.0 else ()
        self._counts: Counter[int] = Counter()
        self._top_p = rules.top_p
        self._generator: torch.Generator | None = None
        if not rules.greedy:
            self._generator = torch.Generator(device)
            self._generator.manual_seed(secrets.randbits(63) if rules.seed is None else rules.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token by this row's logits (vocabulary,) in float32, which are left as they are."""
        logits = self._penalise(logits)
        if self.rules.greedy:
            return int(logits.argmax())
        probabilities = self._narrow((logits - logits.max()) / self.rules.temperature)
        self._top_p = max(self._top_p * self.rules.top_p_decay, self.rules.top_p_bound)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def take(self, token: int) -> None:
        """Count a token of the answer."""
        self._counts[token] += 1

    def _penalise(self, logits: Tensor) -> Tensor:
        rules = self.rules
        if rules.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self._prompt, *self._counts}), device=logits.device)
            penalised = logits[seen]
            low = penalised * rules.repetition_penalty
            logits = logits.scatter(0, seen, torch.where(penalised < 0, low, penalised / rules.repetition_penalty))
        changes = dict(rules.logit_bias)
        if rules.frequency_penalty or rules.presence_penalty:
            for token, count in self._counts.items():
                less = rules.frequency_penalty * count + rules.presence_penalty
                changes[token] = changes.get(token, 0.0) - less
        if changes:
            tokens = torch.tensor(list(changes), device=logits.device)
            added = torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device)
            logits = logits.index_add(0, tokens, added)
        return logits

    def _narrow(self, logits: Tensor) -> Tensor:
        """Probabilities (vocabulary,) with the tokens that top_k, top_p and min_p leave out at zero."""
        rules = self.rules
        if 0 < rules.top_k < logits.shape[0]:
            logits = logits.masked_fill(logits < logits.topk(rules.top_k).values[-1], -torch.inf)
        if self._top_p < 1.0:
            ordered, order = logits.sort(descending=True)
            before = ordered.softmax(0).cumsum(0).roll(1)
            before[0] = 0.0
            out = before >= self._top_p  # the first token to reach top_p is in
            out[0] = False
            logits = logits.index_fill(0, order[out], -torch.inf)
        probabilities = logits.softmax(0)
        if rules.min_p > 0:
            probabilities = probabilities * (probabilities >= rules.min_p * probabilities.max())
        return probabilities


def choose_tokens(choosers: Sequence[Chooser], logits: Tensor) -> list[int | None]:
    """One token for each row of logits (rows, vocabulary), float32; None for a row whose logits are not numbers."""
    best, likeliest = logits.max(1)
    tokens: list[int | None] = []
    for row, (chooser, value, token) in enumerate(zip(choosers, best.tolist(), likeliest.tolist(), strict=True)):
        if not math.isfinite(value):
            tokens.append(None)
            continue
        if not chooser.rules.plain:
            token = chooser.choose(logits[row])
        chooser.take(token)
        tokens.append(token)
    return tokens


def measure(logits: Tensor, token: int, beside: int) -> Likelihood:
    """How likely a token was by these logits (vocabulary,), with so many of the likeliest beside it."""
    values = logits.log_softmax(0)
    likeliest: tuple[tuple[int, float], ...] = ()
    if beside:
        top = values.topk(min(beside, values.shape[0]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likeliest = tuple(pair for pair in pairs if math.isfinite(pair[1]))  # a vocabulary may have fewer tokens
    return Likelihood(token, float(values[token]), likeliest)
