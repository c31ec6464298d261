"""Rows of the tasks about recalling: associative recall, induction, selective copying.

The functions are named in the tasks' YAML files; lm-eval calls them with the task's metadata. Each gives
{"test": rows of `text` and `target`}. A model answers rightly if the target is what it finds likeliest, token by token.
"""

from __future__ import annotations

import random
from typing import Any

from ssm_tune.outputs.tasks.lengths import find_tokenizer, fit_to_length
from ssm_tune.outputs.tasks.words import WORDS

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def make_mqar(pairs: int, rows: int = 64, queries: int = 4, seed: int = 0, **_: Any) -> dict[str, Any]:
    """Multi-query associative recall: so many pairs of words, then some of the first words again, in any order.

    Each query is a row of its own, after the queries before it with their right answers.
    """
    if 2 * pairs > len(WORDS):
        raise ValueError(f"pairs: {pairs} is more than the {len(WORDS) // 2} that there are words for")
    chosen = random.Random(f"mqar {seed} {pairs}")
    made = []
    for _row in range(rows):
        words = chosen.sample(WORDS, 2 * pairs)
        values = dict(zip(words[:pairs], words[pairs:], strict=True))
        text = "".join(f"{key}: {value}\n" for key, value in values.items()) + "\n"
        for key in chosen.sample(words[:pairs], min(queries, pairs)):
            made.append({"text": f"{text}{key}:", "target": f" {values[key]}"})
            text += f"{key}: {values[key]}\n"
    return as_dataset(made)


def make_induction(
    length: int,
    rows: int = 100,
    seed: int = 0,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Induction: random words, one of which comes once within them and again at the end. What followed it then?

    length: of a row, in tokens.
    """
    counter = find_tokenizer(tokenizer or pretrained)
    chosen = random.Random(f"induction {seed} {length}")
    made = []
    for row in range(rows):
        trigger, target, *others = chosen.sample(WORDS, len(WORDS))
        place = spread_place(row)
        drawn = _Draws(chosen, others)

        def write(
            size: int, trigger: str = trigger, target: str = target, place: float = place, drawn: Any = drawn
        ) -> str:
            words = drawn.take(size)
            at = round(place * size)
            return " ".join([*words[:at], trigger, target, *words[at:], trigger])

        made.append({"text": fit_to_length(write, length, counter), "target": f" {target}"})
    return as_dataset(made)


def make_selective_copying(
    length: int,
    letters: int = 16,
    rows: int = 100,
    seed: int = 0,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Selective copying: letters here and there among dots; then the letters alone, in order.

    length: of a row, in tokens.
    """
    counter = find_tokenizer(tokenizer or pretrained)
    chosen = random.Random(f"selective copying {seed} {length} {letters}")
    made = []
    for _row in range(rows):
        wanted = chosen.choices(_LETTERS, k=letters)
        places = sorted(chosen.random() for _ in wanted)

        def write(size: int, wanted: list[str] = wanted, places: list[float] = places) -> str:
            line = ["."] * (size + len(wanted))
            for number, (letter, place) in enumerate(zip(wanted, places, strict=True)):
                line[number + int(place * (size + 1))] = letter
            return " ".join(line) + "\nLetters:"

        made.append({"text": fit_to_length(write, length, counter), "target": " " + " ".join(wanted)})
    return as_dataset(made)


class _Draws:
    """Words drawn at random; a longer text begins as a shorter one does."""

    def __init__(self, chosen: random.Random, words: list[str]) -> None:
        self._chosen, self._words, self._drawn = chosen, words, []

    def take(self, size: int) -> list[str]:
        while len(self._drawn) < size:
            self._drawn.append(self._chosen.choice(self._words))
        return self._drawn[:size]


def spread_place(number: int) -> float:
    """The place of this number in [0, 1): spread evenly, however many are taken (van der Corput's sequence, base 2)."""
    value, share = 0.0, 0.5
    number += 1
    while number:
        value += share * (number % 2)
        number //= 2
        share /= 2
    return value


def as_dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(rows)}
