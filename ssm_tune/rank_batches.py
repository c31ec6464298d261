"""The rows of each process: together, what one process would take at each step, and each row once.

accelerate fills the last batches of an epoch with rows from its beginning, so that all processes have as many: those
would be trained twice, and the last step of an epoch would not be that of one process. Here what is missing is filled
with a row without labels, which has neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler


class FilledRows(Dataset[dict[str, Any]]):
    """Token rows, and behind the last one a row that nothing is learned from: the first, without labels.

    `len` counts the real ones.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.rows[index]
        row = dict(self.rows[0])
        return {**row, "labels": [-100] * len(row["labels"]), "rows": []}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class FilledSampler(Sampler[int]):
    """The order of `sampler`, filled up to a multiple of `step` with the number of `FilledRows`' last row."""

    def __init__(self, sampler: Sampler[int], rows: int, step: int) -> None:
        self.sampler, self.rows, self.step = sampler, rows, step

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.step) * self.step

    def __iter__(self) -> Iterator[int]:
        count = 0
        for index in self.sampler:
            yield index
            count += 1
        for _ in range(-count % self.step):
            yield self.rows

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def filled_sampler(sampler: Sampler[int] | None, rows: FilledRows, step: int, data_seed: int | None) -> FilledSampler:
    """`sampler` (None: in order), filled up to a multiple of `step`: batch size x processes."""
    sampler = SequentialSampler(rows) if sampler is None else _seeded(sampler, data_seed)
    return FilledSampler(sampler, len(rows), step)


def tell_epochs(loader: DataLoader, sampler: Sampler[int]) -> DataLoader:
    """Let the number of the epoch reach the sampler, through the part that picks one process's batches.

    What skips the batches of a resumed epoch stands between the loader and that part, and neither accelerate nor
    transformers looks further: a run resumed inside its second epoch would take the rows of its first.
    """
    if isinstance(loader.batch_sampler, BatchSamplerShard) and hasattr(sampler, "set_epoch"):
        loader.batch_sampler.set_epoch = sampler.set_epoch
    return loader


def _seeded(sampler: Sampler[int], data_seed: int | None) -> Sampler[int]:
    """A random sampler with accelerate's order, a function of seed and epoch: accelerate does not see this one."""
    if type(sampler) is not RandomSampler:
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
