"""Counting the memory that a forward pass leaves behind for backward."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Every storage that is made (or looked at) inside; `alive` is the bytes of those that still are, but `known`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[len(self.made)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self, *known: torch.Tensor) -> int:
        gc.collect()
        found = {ref.cdata: size for ref, size in self.made.values() if not ref.expired()}
        for tensor in known:
            found.pop(tensor.untyped_storage()._cdata, None)
        return sum(found.values())
