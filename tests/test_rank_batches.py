"""The rows of several processes, together, are those of one process, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from ssm_tune.rank_batches import FilledRows, filled_sampler, tell_epochs


def make_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [n, n], "labels": [n, n], "seq_lengths": [2], "rows": [n]} for n in range(count)]


def make_loader(rows: list[dict[str, Any]], rank: int, processes: int, batch: int) -> Any:
    filled = FilledRows(rows)
    torch.manual_seed(7)  # the sampler's seed, as `set_seed` gives it to every process
    sampler = filled_sampler(RandomSampler(rows), filled, batch * processes, None)
    loader = DataLoader(filled, batch, sampler=sampler, collate_fn=list)
    loader = prepare_data_loader(loader, torch.device("cpu"), processes, rank, use_seedable_sampler=True)
    return tell_epochs(loader, sampler)


def order(loaders: list[Any]) -> list[int]:
    """The numbers of the rows, step by step over all processes; rows that fill up have none."""
    return [n for step in zip(*loaders, strict=True) for batch in step for row in batch for n in row["rows"]]


@pytest.mark.parametrize("count", [16, 13, 5, 1])
@pytest.mark.parametrize(("processes", "batch"), [(2, 2), (4, 1), (3, 2)])
def test_several_processes_take_the_rows_of_one_in_its_order(count: int, processes: int, batch: int) -> None:
    rows = make_rows(count)
    one = order([make_loader(rows, 0, 1, batch)])
    assert sorted(one) == list(range(count))
    assert order([make_loader(rows, rank, processes, batch) for rank in range(processes)]) == one


def test_what_fills_up_has_no_labels() -> None:
    filled = FilledRows(make_rows(3))
    assert len(filled) == 3
    assert filled[3] == {"input_ids": [0, 0], "labels": [-100, -100], "seq_lengths": [2], "rows": []}
    assert filled[0]["labels"] == [0, 0]


def test_a_resumed_epoch_has_its_own_order() -> None:
    rows = make_rows(16)

    def epoch(loaders: list[Any], number: int) -> list[int]:
        for loader in loaders:
            loader.set_epoch(number)
        return order(loaders)

    whole = epoch([make_loader(rows, rank, 2, 2) for rank in (0, 1)], 3)
    assert whole != epoch([make_loader(rows, rank, 2, 2) for rank in (0, 1)], 0)
    rest = [skip_first_batches(make_loader(rows, rank, 2, 2), 1) for rank in (0, 1)]
    for loader in rest:  # as transformers' Trainer does it
        loader.set_epoch(3)
        loader.batch_sampler.batch_sampler.set_epoch(3)
    assert order(rest) == whole[4:]
