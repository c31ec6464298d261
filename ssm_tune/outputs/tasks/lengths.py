"""Making a text of so many tokens, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_FIRST_GUESS = 16

# The tokenizer of the model that is measured. lm-eval calls the makers of rows with the task's metadata, which is
# written into its results, so a tokenizer cannot come that way.
_TOKENIZER: ContextVar[Any] = ContextVar("tokenizer of the tasks", default=None)


@contextmanager
def counting_with(tokenizer: Any) -> Iterator[None]:
    """Within this scope, tasks count tokens with this tokenizer."""
    before = _TOKENIZER.set(tokenizer)
    try:
        yield
    finally:
        _TOKENIZER.reset(before)


def find_tokenizer(name: str | None) -> Any:
    """The tokenizer to count with: that of `counting_with`, or one by name, as lm-eval's command line gives it.

    Raises ValueError if there is neither.
    """
    tokenizer = _TOKENIZER.get()
    if tokenizer is not None:
        return tokenizer
    if name is None:
        raise ValueError('no tokenizer to count tokens with: --metadata \'{"tokenizer": "NAME"}\'')
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def fit_to_length(make: Callable[[int], str], length: int, tokenizer: Any) -> str:
    """The longest of the texts make(0), make(1), ... that has at most `length` tokens.

    Raises ValueError if make(0) has more already.
    """

    def count(size: int) -> int:
        return len(tokenizer(make(size))["input_ids"])

    smallest = count(0)
    if smallest > length:
        raise ValueError(f"the text has {smallest} tokens at least, which are more than the {length} asked for")
    # Tokens grow about evenly with the size, so the next size to try is where a straight line says. Long texts take a
    # while to count, and this counts few of them.
    low, of_low = 0, smallest
    high, of_high = _FIRST_GUESS, count(_FIRST_GUESS)
    while of_high <= length:
        low, of_low, grown = high, of_high, high + (length - of_high) * high // max(1, of_high - smallest) + 1
        high, of_high = grown, count(grown)
    while high - low > 1:
        middle = low + (length - of_low) * (high - low) // max(1, of_high - of_low)
        middle = min(max(middle, low + 1), high - 1)
        of_middle = count(middle)
        if of_middle <= length:
            low, of_low = middle, of_middle
        else:
            high, of_high = middle, of_middle
    return make(low)
