"""How much of the vocabulary TRL's language-model head computes at a time, chosen by what that takes.

TRL takes 32,768 tokens of it: with 4,096 positions 256 MiB in bfloat16, in every forward and backward pass, and as
many columns of a float32 weight cast. Beside the activations of a model that are recorded in a CUDA graph, which are
there all the time, that is the most. Narrower chunks are as exact and, down to some thousand, about as quick: products
are still large, and what is summed in float32 over chunks is read and written a few times more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trl.trainer import utils

# Tokens of the vocabulary at a time, at most; TRL's own where this is more. A multiple of `_STEP`.
WIDEST = 32768
_STEP = 128
_NAME = "_CHUNKED_LOGPROB_CHUNK_SIZE"  # of TRL's, which its head reads in each forward pass


def chunk_width(vocabulary: int, widest: int) -> int:
    """The width of as few chunks as there can be, all but the last alike and that not much narrower."""
    chunks = -(-vocabulary // widest)
    return -(-vocabulary // (chunks * _STEP)) * _STEP


@contextmanager
def narrow_chunks(vocabulary: int) -> Iterator[None]:
    """Within, forward passes of TRL's head take chunks of `WIDEST` at most, and so do their backward passes, whenever.

    Of no effect with a version of TRL that has no such number.
    """
    before = getattr(utils, _NAME, None)
    if before is None or before <= WIDEST:
        yield
        return
    setattr(utils, _NAME, chunk_width(vocabulary, WIDEST))
    try:
        yield
    finally:
        setattr(utils, _NAME, before)
