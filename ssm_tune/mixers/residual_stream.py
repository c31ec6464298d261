"""Residual blocks one after the other, so that one's addition and the next one's norm can be one kernel.

A block called as a module adds what it computed to the stream itself. Here it hands both on, and the next block adds
them while it normalises: the stream is read and written once a block instead of three times, and backward gets it back
from its end (`ssm_tune.kernels.recompute_sums`). A sharded block, whose weights are gathered round its call, is called
and hands both on all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ssm_tune.kernels.recompute_sums import running_sum
from ssm_tune.mixers.decay_rates import rates_together
from ssm_tune.mixers.master_weights import small_weights_cast
from ssm_tune.mixers.watched import is_only_sharded, is_watched


class ResidualBlock:
    """A block that adds to the residual stream what it makes of the stream's norm.

    Its forward is `call`.
    """

    def mix(self, stream: Tensor, added: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor]:
        """The stream after `added` (None: nothing), and what this block adds, both (batch, length, hidden)."""
        raise NotImplementedError

    def call(
        self, stream: Tensor, added: Tensor | None, joined: bool, **arguments: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The stream after this block, or, if joined, what `mix` gives."""
        stream, added = self.mix(stream, added, **arguments)
        return (stream, added) if joined else stream + added


Border = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _pass_on(number: int, stream: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return stream, added


def pass_through(
    blocks: Iterable[nn.Module],
    stream: Tensor,
    *,
    before: Border = _pass_on,
    gathered: bool = False,
    starts: Sequence[int] = (),
    **arguments: Any,
) -> Tensor:
    """What the blocks make of the stream (batch, length, hidden), each called with `arguments`.

    Each is called as a module, and adds to the stream itself, unless all of them can be joined. `before` is given the
    number of each block and what goes into it, the stream and what is to be added to it (None: nothing), and gives the
    same tensors or views of them. `gathered`: sharded blocks are whole, and FSDP2 need not see them called. `starts`:
    numbers of blocks, ascending, from each of which to the next what they have in common may be computed at once.
    """
    blocks = list(blocks)
    if not all(map(can_be_joined, blocks)):
        for number, block in enumerate(blocks):
            stream = block(before(number, stream, None)[0], **arguments)
        return stream
    added, ends = None, dict(zip(starts, [*starts[1:], len(blocks)], strict=False))
    with running_sum() as sums, ExitStack() as common:
        for number, block in enumerate(blocks):
            stream, added = before(number, stream, added)
            if number in ends:
                common.close()
                common.enter_context(rates_together(blocks[number : ends[number]]))
                common.enter_context(small_weights_cast(blocks[number : ends[number]], stream.device.type))
            if is_watched(block) and not gathered:  # by FSDP2
                stream, added = block(stream, added=added, joined=True, **arguments)
            else:
                stream, added = block.mix(stream, added, **arguments)
        if added is None:
            return stream
        total = stream + added
        sums.follow(stream, added, total)
    return total


def can_be_joined(block: nn.Module) -> bool:
    """Whether nobody but FSDP2 has to see the block called: hooks, checkpointing, a forward of its own (accelerate's),
    a compiled one, a wrapper."""
    own = vars(block)
    return (
        isinstance(block, ResidualBlock)
        and (not is_watched(block) or is_only_sharded(block))
        and own.get("_compiled_call_impl") is None
        and not (own.get("gradient_checkpointing", False) and block.training)
    )
