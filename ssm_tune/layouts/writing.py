"""Writing tensor files one tensor at a time: what is held in memory is one tensor, however large the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ssm_tune.layouts.tensors import DTYPE_NAMES, StoredTensor, assemble, open_tensors
from ssm_tune.recipe import RecipeError

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


def part(tensor: Outgoing, ranges: Sequence[tuple[int, int]], dim: int = 0) -> Outgoing:
    """Ranges of a tensor along a dimension, one after the other."""
    return Outgoing(assemble([(tensor.source, start, stop) for start, stop in ranges], dim), tensor.dtype)


def joined(tensors: Sequence[Outgoing], dim: int = 0) -> Outgoing:
    """Tensors one after the other along a dimension; RecipeError if they do not fit."""
    whole = assemble([(tensor.source, 0, tensor.source.shape[dim]) for tensor in tensors], dim)
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise RecipeError(f"{whole.file}: tensors that are one in the new layout have different dtypes here.")
    return Outgoing(whole, tensors[0].dtype)


@dataclass(frozen=True)
class WeightFile:
    """A file to write: its path in the new folder, its tensors, and what a pickle holds in the place of their table."""

    path: str
    tensors: Mapping[str, Outgoing]
    wrap: Callable[[dict[str, torch.Tensor]], Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path, progress: Progress) -> None:
        """Write it; `progress` is told of every piece's bytes.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        path = folder / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            _write_safetensors(path, self.tensors, progress)
        elif all(tensor.dtype == tensor.source.dtype and tensor.source.whole for tensor in self.tensors.values()):
            _write_pickle(path, {name: tensor.source for name, tensor in self.tensors.items()}, progress, self.wrap)
        else:
            # A pickle is written from whole tensors. Those that are made here would fill the memory, so they go
            # through a file that is mapped into it.
            staged = path.with_suffix(".tmp.safetensors")
            _write_safetensors(staged, self.tensors, lambda count: None)
            stored = open_tensors([staged])
            _write_pickle(path, {name: stored[name] for name in self.tensors}, progress, self.wrap)
            staged.unlink()


@dataclass(frozen=True)
class NewFiles:
    """What a new folder is to hold: files of text by name, and files of weights."""

    texts: Mapping[str, str]
    weights: Sequence[WeightFile]


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


def _write_pickle(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    progress: Progress,
    wrap: Callable[[dict[str, torch.Tensor]], Any] | None,
) -> None:
    """As torch.save does, from tensors that are mapped from their files: their pages are read when written.

    One stored tensor under two names is one storage in the new file too.
    """
    loaded: dict[int, torch.Tensor] = {}
    content: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in loaded:
            loaded[id(tensor)] = tensor.load()
        content[name] = loaded[id(tensor)]
    with path.open("wb") as file:
        torch.save(content if wrap is None else wrap(content), _Counted(file, progress))


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
