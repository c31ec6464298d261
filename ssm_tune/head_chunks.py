"""How much of the vocabulary TRL's language-model head computes at a time: in as many chunks as TRL has, all alike.

TRL takes 32,768 tokens of it, and what is left in the last chunk: with 4,096 positions 256 MiB in bfloat16, in every
forward and backward pass, and as many columns of a float32 weight cast. Of 50,280 tokens two chunks alike take 197.
Narrower ones would take less, but their products are smaller and do not fill a GPU as well: seven chunks of 7,296 cost
mamba-130m 2.3 ms of 66, and mamba-1.4b with adapters 1.3 of 180, for 200 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trl.trainer import utils

_STEP = 128  # a width is a multiple of this
_NAME = "_CHUNKED_LOGPROB_CHUNK_SIZE"  # of TRL's, which its head reads in each forward pass


def chunk_width(vocabulary: int, widest: int) -> int:
    """The width of as few chunks as there can be, all but the last alike and that not much narrower."""
    chunks = -(-vocabulary // widest)
    return -(-vocabulary // (chunks * _STEP)) * _STEP


@contextmanager
def even_chunks(vocabulary: int) -> Iterator[None]:
    """Within, forward passes of TRL's head take chunks that are alike, and so do their backward passes, whenever.

    Of no effect with a version of TRL that has no such number.
    """
    before = getattr(utils, _NAME, None)
    if before is None:
        yield
        return
    setattr(utils, _NAME, chunk_width(vocabulary, before))
    try:
        yield
    finally:
        setattr(utils, _NAME, before)
