"""Choosing every row's next token at once, on the device that has the logits, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NO_TOKEN = -1  # of a row whose logits are not numbers


class Choice:
    """logits (rows, vocabulary) -> tokens (rows,): transformers' rules in transformers' order.

    Args:
        prompts: (rows, length), and `mask` of the same shape, 0 for padding: what repetition_penalty counts as seen.
        never: tokens that are not chosen, those that only fill the vocabulary up.
        temperature: 0 takes the likeliest. top_k 0, top_p 1, min_p 0, repetition_penalty 1: no such rule.
    """

    def __init__(
        self,
        prompts: Tensor,
        mask: Tensor,
        vocabulary: int,
        *,
        never: Sequence[int] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> None:
        device = prompts.device
        self._never = torch.tensor(list(never), dtype=torch.long, device=device)
        self._sampled = temperature > 0
        self._penalty = repetition_penalty
        self._seen: Tensor | None = None
        if repetition_penalty != 1.0:
            # One place more takes the padding. A table has one size, whatever is read and said.
            places = torch.where(mask != 0, prompts, vocabulary)
            seen = torch.zeros((len(prompts), vocabulary + 1), dtype=torch.bool, device=device)
            self._seen = seen.scatter_(1, places, True)[:, :vocabulary]
        rules: list[Any] = []
        if self._sampled:
            rules.append(TemperatureLogitsWarper(float(temperature)))
            rules += [TopKLogitsWarper(top_k)] if top_k else []
            rules += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
            rules += [MinPLogitsWarper(float(min_p))] if min_p > 0 else []
        self._rules = LogitsProcessorList(rules)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: float32, left as they are. Returns the tokens, and the same with NO_TOKEN where there is none."""
        if self._seen is not None:
            lower = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
            logits = torch.where(self._seen, lower, logits)
        if self._never.numel():
            logits = logits.index_fill(1, self._never, -torch.inf)
        best, tokens = logits.max(1)
        if self._sampled:
            probabilities = self._rules(None, logits).softmax(1)
            # As torch.multinomial draws, which however asks the device whether these are probabilities.
            tokens = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1)
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        return tokens, torch.where(best.isfinite(), tokens, NO_TOKEN)
