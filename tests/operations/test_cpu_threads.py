"""Compiled loops from several Python threads, after a fork, and in a DataLoader's workers."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from comparison import scan_tensors
from torch import Tensor
from torch.utils.data import DataLoader

from ssm_tune.kernels import cpu_threads, selective_scan
from ssm_tune.kernels.cpu_threads import run_parallel, split_ranges


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def scan_and_back(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    y = selective_scan(**leaves)
    y.square().sum().backward()
    return y.detach(), leaves["x"].grad


def make_tensors() -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in scan_tensors(dim=300, length=33).items()}


def test_every_job_runs_once_on_as_many_threads_as_pytorch_uses(two_threads: None) -> None:
    done: list[tuple[int, str]] = []
    together = threading.Barrier(2, timeout=30)

    def job(number: int) -> None:
        if number < 2:
            together.wait()  # passes only if two threads are here at once
        done.append((number, threading.current_thread().name))

    run_parallel(partial(job, number) for number in range(20))
    assert sorted(number for number, _ in done) == list(range(20))
    assert len({name for _, name in done}) == 2
    torch.set_num_threads(1)
    done.clear()
    run_parallel(partial(job, number) for number in range(2, 20))
    assert len({name for _, name in done}) == 1


def test_the_exception_of_a_job_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_parallel([lambda: None, lambda: 1 // 0])


def test_denormal_numbers_are_flushed_in_the_jobs_alone() -> None:
    found = []
    run_parallel([lambda: found.append((torch.tensor(1e-30) * 1e-10).item())])
    assert found == [0.0]
    assert (torch.tensor(1e-30) * 1e-10).item() > 0


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    ("batch", "total", "block"), [(1, 1, 128), (2, 512, 128), (1, 300, 128), (64, 24, 1), (3, 24, 1)]
)
def test_ranges_cover_everything_once(threads: int, batch: int, total: int, block: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ranges = split_ranges(batch, total, block)
    finally:
        torch.set_num_threads(before)
    assert [first for first, _ in ranges] == [0, *[last for _, last in ranges[:-1]]]
    assert ranges[-1][1] == total
    assert all(first % block == 0 for first, _ in ranges)
    if threads > 1 and batch == 1 and total > threads * block:
        assert len(ranges) >= threads


def test_several_python_threads_at_once(two_threads: None) -> None:
    tensors = make_tensors()
    y, gradient = scan_and_back(tensors)
    with ThreadPoolExecutor(6) as pool:
        for y_there, gradient_there in pool.map(scan_and_back, [tensors] * 24):
            assert torch.equal(y_there, y)
            assert torch.equal(gradient_there, gradient)


def scan_in_child(tensors: dict[str, Tensor], results: multiprocessing.SimpleQueue) -> None:
    y, gradient = scan_and_back(tensors)
    results.put((y.sum().item(), gradient.sum().item(), torch.get_num_threads()))


def test_after_a_fork(two_threads: None) -> None:
    tensors = make_tensors()
    y, gradient = scan_and_back(tensors)  # the parent's pool has run before the fork
    assert cpu_threads._pools
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=scan_in_child, args=(tensors, results), daemon=True) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    for _ in children:
        assert results.get()[:2] == (y.sum().item(), gradient.sum().item())


class Scanned(torch.utils.data.Dataset):
    """A data set whose items are scans."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return selective_scan(**self.tensors)


def test_in_the_workers_of_a_data_loader(two_threads: None) -> None:
    data = Scanned(make_tensors())
    expected = data[0]
    for item in DataLoader(data, batch_size=None, num_workers=2, timeout=60, multiprocessing_context="fork"):
        torch.testing.assert_close(item, expected, rtol=1e-6, atol=1e-6)
