"""Tensor files, opened without being read: names, shapes and dtypes first, each tensor's values when asked for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ssm_tune.layouts.source import Source, check_files, read_json_object
from ssm_tune.recipe import RecipeError

# What safetensors calls the dtypes (https://github.com/huggingface/safetensors, "Format").
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: known by shape and dtype, read by `load()` or by an index (`tensor[...]`, `tensor[:8]`).

    It answers as safetensors' slices do, which transformers reads from, so that a mapping of these can be its
    `state_dict`. `name`: in the file. `whole`: its values lie in the file as they are, else it is made when it is read
    (`assemble`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    name: str
    _read: Callable[[Any], torch.Tensor]
    whole: bool = True

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(index)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return DTYPE_NAMES[self.dtype]

    def load(self) -> torch.Tensor:
        """The values, on the CPU, in the file's dtype."""
        return self._read(...)


Piece = tuple[StoredTensor, int, int]  # a tensor, and from where to where of it


def assemble(pieces: Sequence[Piece], dim: int = 0) -> StoredTensor:
    """The tensor that pieces of others make, one after the other along a dimension; nothing is read yet.

    Raises:
        RecipeError: pieces of different dtypes, or whose other dimensions differ.
    """
    first, start, stop = pieces[0]
    if len(pieces) == 1 and (start, stop) == (0, first.shape[dim]):
        return first
    for tensor, _, _ in pieces:
        if tensor.dtype != first.dtype or _without(tensor.shape, dim) != _without(first.shape, dim):
            raise RecipeError(
                f"{first.file}: tensors that belong together do not fit: one is {tuple(first.shape)} {first.dtype}, "
                f"another {tuple(tensor.shape)} {tensor.dtype} ({tensor.file.name})."
            )
    size = sum(stop - start for _, start, stop in pieces)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    before = (slice(None),) * dim

    def read(index: Any) -> torch.Tensor:
        parts = [tensor[(*before, slice(start, stop))] for tensor, start, stop in pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim))[index]

    return StoredTensor(shape, first.dtype, first.file, first.name, read, whole=False)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def open_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of some .safetensors or pickled .bin files, by name.

    Raises:
        RecipeError: a file is empty, truncated, corrupt, not of tensors alone, or a name is in two files.
    """
    paths = list(paths)
    check_files(paths)
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        opened = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
        for name, tensor in opened.items():
            if name in tensors:
                raise RecipeError(f"{path}: the tensor {name} is in {tensors[name].file.name} too. Fetch both again.")
            tensors[name] = tensor
    return tensors


def shard_files(source: Source, index: str) -> list[Path] | None:
    """The files that a *.index.json names, in its order; None if there is no such index.

    Raises:
        RecipeError: the index is no index, or names a file that is missing or outside of the checkpoint.
    """
    path = source.get(index)
    if path is None:
        return None
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RecipeError(f"{path} has no weight_map, so it names no weights. Fetch it again.")
    files = list(dict.fromkeys(weight_map.values()))
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise RecipeError(f"{path} names {file!r}, which is no file of this checkpoint.")
    return [source.require(file, because=f"{index} names it") for file in files]


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as error:
        raise RecipeError(f"{path} is truncated or corrupt ({error}). Fetch it again.") from error
    tensors = {}
    for name, piece in slices.items():
        if piece.get_dtype() not in _DTYPES:
            raise RecipeError(f"{path}: {name} has the dtype {piece.get_dtype()}, which is not read here.")
        shape = tuple(piece.get_shape())
        # A slice of no dimensions cannot be indexed, so such a tensor is read whole.
        read = piece.__getitem__ if shape else (lambda index, name=name: file.get_tensor(name)[index])
        tensors[name] = StoredTensor(shape, _DTYPES[piece.get_dtype()], path, name, read)
    return tensors


def _open_pickle(path: Path) -> dict[str, StoredTensor]:
    """A torch.save file: weights only (a pickle may run any code), mapped into memory where its format allows that."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        raise RecipeError(
            f"{path} is corrupt, or holds more than tensors, which is not loaded because it could run code "
            f"({_first_line(error)})."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise RecipeError(f"{path} is truncated or corrupt ({_first_line(error)}). Fetch it again.") from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise RecipeError(f"{path} is not a table of tensors by name.")
    tensors = {name: value.detach() for name, value in content.items()}  # some files hold Parameters
    return {name: stored_tensor(path, name, value) for name, value in tensors.items()}


def stored_tensor(path: Path, name: str, value: torch.Tensor) -> StoredTensor:
    """A tensor that is mapped from a file."""
    return StoredTensor(tuple(value.shape), value.dtype, path, name, value.__getitem__)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
