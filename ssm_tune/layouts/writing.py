"""Writing tensor files one tensor at a time: what is held in memory is one tensor, however large the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from ssm_tune.layouts.tensors import DTYPE_NAMES, StoredTensor, open_tensors

_ALIGNMENT = 8  # of a safetensors file's data (https://github.com/huggingface/safetensors, "Format")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Outgoing:
    """A tensor on its way: where it is read from, and the dtype that it is to have."""

    source: StoredTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in the new file."""
        return torch.Size(self.source.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Outgoing], progress: Progress) -> None:
    """Write a .safetensors or pickled .bin file; `progress` is told of every piece's bytes.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    if path.suffix == ".safetensors":
        _write_safetensors(path, tensors, progress)
    elif all(tensor.dtype == tensor.source.dtype for tensor in tensors.values()):
        _write_pickle(path, {name: tensor.source for name, tensor in tensors.items()}, progress)
    else:
        # A pickle is written from whole tensors. Cast ones would fill the memory, so they go through a file that is
        # mapped into it.
        staged = path.with_suffix(".safetensors.tmp.safetensors")
        _write_safetensors(staged, tensors, lambda count: None)
        _write_pickle(path, open_tensors([staged]), progress)
        staged.unlink()


def _write_safetensors(path: Path, tensors: Mapping[str, Outgoing], progress: Progress) -> None:
    # Wide elements first, as the library itself orders them, so that each tensor is aligned to its elements.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.source.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            values = tensors[name].source.load().to(tensors[name].dtype).contiguous()
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
            progress(tensors[name].nbytes)


def _write_pickle(path: Path, tensors: Mapping[str, StoredTensor], progress: Progress) -> None:
    """As torch.save does, from tensors that are mapped from their files: their pages are read when written.

    One stored tensor under two names is one storage in the new file too.
    """
    loaded: dict[int, torch.Tensor] = {}
    content = {name: loaded.setdefault(id(tensor), tensor.load()) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        torch.save(content, _Counted(file, progress))


class _Counted:
    """A file for torch.save that tells how much was written."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress = file, progress

    def write(self, data: bytes | memoryview) -> int:
        count = self._file.write(data)
        self._progress(count)
        return count

    def flush(self) -> None:
        self._file.flush()
