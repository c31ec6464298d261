"""The residual stream in backward, from its end: every sum is the next one less what was added.

Each layer keeps the stream, in float32: 4 bytes a number. What a layer adds to it has 2, under autocast or in a model
of that precision. So a sum is kept only until the next one is made; then what was added is kept instead, and the last
sum of all. Backward, which goes from the last layer to the first, subtracts. Out of that order it would be as right: a
sum asks for the one after it.

A sum that was got back is off by at most one rounding a layer of the sums after it: by 6e-8 of their size, where the
norm's reader, in bfloat16, is off by 4e-3 of what it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ssm_tune.kernels.recompute import recomputable, recomputing, reference_to

_local = threading.local()


class _Sum:
    """A sum: the tensor itself, until it is known which sum comes after it and what that has more."""

    def __init__(self, tensor: Tensor) -> None:
        kept = tensor.detach()
        self.address = kept.untyped_storage().data_ptr()
        self.give: Callable[[], tuple[Tensor, Tensor | None]] = lambda: (kept, None)


class RunningSum:
    """The sums of one stream, one after the other."""

    def __init__(self) -> None:
        self.last: _Sum | None = None

    def follow(self, before: Tensor, added: Tensor, total: Tensor) -> None:
        """Keep `added` instead of `before`, if that is the last sum here; total = before + added."""
        last, self.last = self.last, None
        if last is None or last.address != before.untyped_storage().data_ptr():
            return
        after, less = reference_to(total), added.detach()
        last.give = lambda: (after(), less)


@contextmanager
def running_sum() -> Iterator[RunningSum]:
    """Sums that are made inside by `add_to_sum`, of one stream, are kept as above.

    The last must be followed by one that is kept: it is for the caller to say `follow`.
    """
    before, _local.sums = getattr(_local, "sums", None), RunningSum()
    try:
        yield _local.sums
    finally:
        _local.sums = before


def add_to_sum(
    before: Tensor,
    added: Tensor,
    total: Tensor,
    made_of_it: Tensor,
    again: Callable[[Tensor, Tensor | None], Sequence[Tensor]],
) -> bool:
    """Say that total = before + added, all (..., dim), before anyone saves `total`, which is new, or `made_of_it`.

    Of no effect outside `running_sum` and scopes of recomputation, or where nothing is gained: for what is added has to
    be kept, and the subtraction has to be one in float32.

    Args:
        again: of a sum and what is to be subtracted from it (None: nothing), the difference, which is `total` again,
            and `made_of_it` again.

    Returns:
        Whether both are got back by `again` from here on.
    """
    sums: RunningSum | None = getattr(_local, "sums", None)
    if sums is None:
        return False
    if not recomputing() or total.dtype != torch.float32 or added.element_size() >= total.element_size():
        sums.last = None
        return False
    made = _Sum(total)
    recomputable([total, made_of_it], lambda: again(*made.give()))
    sums.follow(before, added, total)
    sums.last = made
    return True
