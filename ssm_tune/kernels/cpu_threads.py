"""Compiled loops on as many threads as PyTorch uses, from any thread and in any process.

The loops release the interpreter's lock, so plain Python threads run them side by side. Numba's own thread pools are
not used: one aborts the process when two Python threads enter it at once, the other after a fork, as in a
DataLoader's worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# Channels that a loop works on at once: long enough that what is done once a token does not count, short enough that
# the states of a block stay in cache.
BLOCK = 128
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def run_parallel(jobs: Iterable[Callable[[], None]]) -> None:
    """Run every job, on torch.get_num_threads() threads of this process; the first exception is raised here.

    The threads flush denormal numbers to zero: a state that decays, or the gradient of tokens without loss, ends in
    numbers below 1e-38, with which a processor computes a hundred times slower. The caller's own setting is not
    touched.
    """
    queue = iter(list(jobs))
    threads = max(1, torch.get_num_threads())
    # A forked process inherits the pool's record but not its threads, hence a pool for each process.
    key = (os.getpid(), threads)
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(
            key,
            ThreadPoolExecutor(threads, "ssm-tune-kernel", initializer=torch.set_flush_denormal, initargs=(True,)),
        )
    for done in [pool.submit(_work, queue) for _ in range(threads)]:
        done.result()


def _work(queue: Iterator[Callable[[], None]]) -> None:
    for job in queue:
        job()


def split_ranges(batch: int, total: int, block: int = 1) -> list[tuple[int, int]]:
    """0 to total in ranges of whole blocks, enough that rows times ranges keep every thread busy."""
    threads = torch.get_num_threads()
    blocks = -(-total // block)
    wanted = 1 if threads == 1 else -(-2 * threads // max(batch, 1))
    size = -(-blocks // min(blocks, wanted)) * block
    return [(first, min(first + size, total)) for first in range(0, total, size)]


def float_array(tensor: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor as a float32 array, rows side by side; zeros of this shape where there is none."""
    if tensor is None:
        return np.zeros(shape, np.float32)
    # Not by `numpy()`, after which a storage cannot be resized: FSDP2 frees a layer's whole weights so.
    return np.from_dlpack(tensor.detach().to(torch.float32).contiguous())


def empty(*shape: int) -> np.ndarray:
    """An array for results, float32 whatever PyTorch's default is."""
    return np.empty(shape, np.float32)


def zeros(*shape: int) -> np.ndarray:
    """The same, of zeros."""
    return np.zeros(shape, np.float32)


def tensor_like(tensor: Tensor | None, array: np.ndarray) -> Tensor | None:
    """The gradient by a tensor, in its dtype; None where there was no tensor."""
    return None if tensor is None else torch.from_numpy(array).to(tensor.dtype)
