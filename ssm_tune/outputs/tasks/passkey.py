"""Rows of the passkey tasks: a number, somewhere in a long text about nothing. The model writes the number.

The answer is generated, not measured by likelihood: lm-eval keeps the logits of every token of a row that it measures,
26 GB for one of 128K tokens.
"""

from __future__ import annotations

import random
import re
from typing import Any

from ssm_tune.outputs.tasks.lengths import find_tokenizer, fit_to_length
from ssm_tune.outputs.tasks.recall import as_dataset, spread_place

_TASK = "Somewhere in this long text there is a pass key, a number. Find it and remember it.\n\n"
_FILLER = "The grass is green. The sky is blue. The sun is warm. We go on. It goes there and back again.\n"
_KEY = "The pass key is {key}. Remember it: {key} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"


def make_passkey(
    length: int,
    rows: int = 20,
    seed: int = 0,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Rows of `text`, at most `length` tokens long, and `target`, five digits; the keys' places are spread evenly."""
    counter = find_tokenizer(tokenizer or pretrained)
    chosen = random.Random(f"passkey {seed} {length}")
    made = []
    for row in range(rows):
        key, place = str(chosen.randrange(10_000, 100_000)), spread_place(row)

        def write(size: int, key: str = key, place: float = place) -> str:
            before = round(place * size)
            return _TASK + _FILLER * before + _KEY.format(key=key) + _FILLER * (size - before) + _QUESTION

        made.append({"text": fit_to_length(write, length, counter), "target": key, "depth": place})
    return as_dataset(made)


def match_key(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the first number of the answer is the key."""
    found = re.search(r"\d+", results[0])
    return {"exact_match": float(found is not None and found[0] == row["target"])}
