"""The rows of a stream, in one order for every number of processes and workers, and exactly resumable.

Row r of the run is the next row of virtual shard r % V (`ssm_tune.data.blocks`). With R processes, process k takes the
rows r = k, k + R, ...; so an optimizer step of so many rows has the same rows whatever R is. A process makes the blocks
of the shards that its rows are from, and its workers share those out; each has a loader of its own, since one loader of
several workers would hand blocks over in turns and not as they are needed.

Where R does not divide V a shard's blocks are made by several processes: the order is the same, the work is more.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ssm_tune.data.blocks import Block, ShardBlocks, StreamPlan
from ssm_tune.data.loading import leave_signals_to_the_run, send
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from trl import SFTConfig

_REMEMBERED = 3  # blocks a shard whose documents' names are kept, for messages
_CPU = torch.device("cpu")
_HISTORY = 4  # batches beyond an optimizer step whose positions are kept: the trainer fetches some in advance

Rows = Sequence[dict[str, Any]]


class _ShardRows:
    """The rows of one shard as they are taken: the block under way, and the number of its first row in the shard."""

    def __init__(self, first: int, state: dict[str, Any]) -> None:
        self.first, self.state = first, state
        self.block: Block | None = None
        self.pending: deque[Block] = deque()
        self.places: deque[dict[int, str]] = deque(maxlen=_REMEMBERED)

    def end(self) -> int:
        return self.first + (len(self.block) if self.block is not None else 0)

    def put(self, block: Block) -> None:
        self.first, self.block, self.state = self.end(), block, block.state
        self.places.append(block.places)


class TokenStream:
    """This process's batches of a stream, for ever.

    Args:
        plan: what is read and how.
        batch_size: rows of a batch of this process.
        collator: makes tensors of rows.
        rank, world_size: of the processes that share the rows.
        workers: processes that read and tokenise ahead; 0: none, it is done when a batch is due.
        prefetch: blocks that a worker makes ahead; None: one of each of its shards, since a round of shards comes to
            its blocks' ends at about the same time. A block is about a megabyte, or eight rows.
        accumulation: batches of an optimizer step.
        device, pinned: where batches are put, and how (`ssm_tune.data.loading.send`).
        state: as from `state_at`, of all processes merged by `read_state`; None: from the beginning.
    """

    def __init__(
        self,
        plan: StreamPlan,
        batch_size: int,
        collator: Callable[[Rows], dict[str, torch.Tensor]],
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int | None = None,
        accumulation: int = 1,
        device: torch.device = _CPU,
        pinned: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.plan, self.batch_size, self.collator = plan, batch_size, collator
        self.rank, self.world_size = rank, world_size
        step = math.gcd(world_size, plan.shards)
        owned = range(rank % step, plan.shards, step)
        self.workers, self.prefetch = min(workers, len(owned)), prefetch
        self.device, self.pinned = device, pinned
        begun = state["shards"] if state is not None else {}
        missing = [shard for shard in owned if state is not None and shard not in begun]
        if missing:
            raise RecipeError(f"--resume: the checkpoint does not hold the stream's virtual shards {missing}.")
        self.shards = {shard: _ShardRows(*begun.get(shard, (0, {}))) for shard in owned}
        self.start: int = state["row"] if state is not None else 0  # the first row of all processes together
        self.history: deque[tuple[int, dict[int, tuple[int, dict[str, Any]]]]] = deque(maxlen=accumulation + _HISTORY)
        self.history.append((0, self._positions()))
        self.batches = 0  # given out by this process

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Raises RecipeError for a row that cannot be read, naming it."""
        next_block = self._feed()
        row = self.start + self.batches * self.batch_size * self.world_size + self.rank
        while True:
            rows = []
            for _ in range(self.batch_size):
                rows.append(self._row(row, next_block))
                row += self.world_size
            self.batches += 1
            self.history.append((self.batches, self._positions()))
            yield send(self.collator(rows), self.device, pinned=self.pinned)

    def _row(self, row: int, next_block: Callable[[int], Block]) -> dict[str, Any]:
        number, shard = divmod(row, self.plan.shards)
        rows = self.shards[shard]
        while number >= rows.end():
            rows.put(next_block(shard))
        assert rows.block is not None
        return rows.block.row(number - rows.first)

    def _positions(self) -> dict[int, tuple[int, dict[str, Any]]]:
        return {shard: (rows.first, rows.state) for shard, rows in self.shards.items()}

    def state_at(self, batches: int) -> dict[str, Any]:
        """What a run needs to go on after so many batches of this process, which is one of the last ones given out."""
        found = dict(self.history)
        if batches not in found:
            raise ValueError(f"the position after batch {batches} is not kept; kept are {sorted(found)}")
        return {"row": self.start + batches * self.batch_size * self.world_size, "shards": found[batches]}

    def row_name(self, number: int) -> str:
        """Where a document of one of the last rows is from; `number` as in the batches' `rows`."""
        rows = self.shards.get(number % self.plan.shards)
        names = [places[number] for places in (rows.places if rows else ()) if number in places]
        return names[-1] if names else f"document {number}"

    # -- where blocks come from -----------------------------------------------------------------------------------

    def _feed(self) -> Callable[[int], Block]:
        begun = {shard: (rows.first, rows.state) for shard, rows in self.shards.items()}
        for rows in self.shards.values():  # the block under way is made again
            rows.block = None
        if not self.workers:
            makers = {shard: ShardBlocks(self.plan, shard, state) for shard, (_, state) in begun.items()}
            return lambda shard: makers[shard].make()
        shares = [
            {shard: begun[shard] for shard in list(begun)[worker :: self.workers]} for worker in range(self.workers)
        ]
        feeds = [iter(_loader(self.plan, share, self.prefetch or len(share))) for share in shares]
        worker_of = {shard: worker for worker, share in enumerate(shares) for shard in share}

        def next_block(shard: int) -> Block:
            pending = self.shards[shard].pending
            while not pending:
                made = next(feeds[worker_of[shard]])
                if isinstance(made, list):
                    raise RecipeError(made)
                self.shards[made.shard].pending.append(made)
            return pending.popleft()

        return next_block


class _BlockFeed(IterableDataset):
    """In a worker: the blocks of some shards in the order in which their rows are due, or a mistake's words."""

    def __init__(self, plan: StreamPlan, begun: dict[int, tuple[int, dict[str, Any]]]) -> None:
        self.plan, self.begun = plan, begun

    def __iter__(self) -> Iterator[Block | list[str]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are gone in a forked process
        due = {shard: first * self.plan.shards + shard for shard, (first, _) in self.begun.items()}
        try:
            makers = {shard: ShardBlocks(self.plan, shard, state) for shard, (_, state) in self.begun.items()}
            while True:
                shard = min(due, key=due.__getitem__)
                block = makers[shard].make()
                due[shard] += len(block) * self.plan.shards
                yield block
        except RecipeError as error:
            yield error.mistakes  # raised here, its traceback would become part of the message


def _loader(plan: StreamPlan, begun: dict[int, tuple[int, dict[str, Any]]], prefetch: int) -> DataLoader:
    # A generator of its own: else the loader's seed would be drawn from the run's random numbers.
    return DataLoader(
        _BlockFeed(plan, begun),
        batch_size=None,
        num_workers=1,
        collate_fn=_unchanged,
        prefetch_factor=prefetch,
        worker_init_fn=leave_signals_to_the_run,
        generator=torch.Generator(),
    )


def _unchanged(item: Any) -> Any:
    return item


def make_stream(
    plan: StreamPlan, arguments: SFTConfig, collator: Callable[[Rows], dict[str, torch.Tensor]], checkpoint: Path | None
) -> TokenStream:
    """The stream of a run's process, from where its checkpoint was. Raises RecipeError for a checkpoint without one."""
    return TokenStream(
        plan,
        arguments.train_batch_size,
        collator,
        rank=arguments.process_index,
        world_size=arguments.world_size,
        workers=arguments.dataloader_num_workers,
        prefetch=arguments.dataloader_prefetch_factor,
        accumulation=arguments.gradient_accumulation_steps,
        device=arguments.device,
        pinned=arguments.device.type == "cuda" and arguments.dataloader_pin_memory,
        state=None if checkpoint is None else read_state(checkpoint),
    )


# -- checkpoints -----------------------------------------------------------------------------------------------------


def write_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Write a process's state beside a checkpoint's other files."""
    torch.save(state, folder / f"stream-{rank}.pt")


def read_state(folder: Path) -> dict[str, Any]:
    """The state of all processes that wrote the checkpoint. Raises RecipeError if there is none, or parts disagree."""
    files = sorted(folder.glob("stream-*.pt"))
    if not files:
        raise RecipeError(f"--resume: {folder} is not of a run that streams its data (it has no stream-0.pt).")
    states = [torch.load(file, weights_only=True) for file in files]
    if len({state["row"] for state in states}) > 1:
        raise RecipeError(f"--resume: the parts of the stream in {folder} are of different steps.")
    merged: dict[int, tuple[int, dict[str, Any]]] = defaultdict()
    for state in states:
        for shard, (first, begun) in state["shards"].items():
            known = merged.get(shard)
            if known is None or first < known[0]:
                merged[shard] = (first, begun)
    return {"row": states[0]["row"], "shards": dict(merged)}
