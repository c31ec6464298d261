"""What a layout is: how one publisher lays a checkpoint's config and weights on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Writing:
    """How to write a layout.

    Args:
        config_file: the name of its config.
        weight_file: the name of its weights, whose suffix says the format.
        express: a config's values in its config file. RecipeError names the fields that it has no words for.
        rename: a tensor's name in transformers' model -> its name in the file.
        repeats_tied_head: whether a head that is tied to the embedding is in the file too.
    """

    config_file: str
    weight_file: str
    express: Callable[[PreTrainedConfig], dict[str, Any]]
    rename: Callable[[str], str]
    repeats_tied_head: bool


@dataclass(frozen=True)
class Layout:
    """One way to lay a checkpoint on disk; each module of this package that knows one has it as `LAYOUT`.

    Args:
        name: "huggingface", "state-spaces", "mistral".
        recognise: whether the source's config is of this layout (reads the config file alone).
        read_config: the config as transformers' classes have it. RecipeError for what they cannot express.
        weight_files: the files with the weights, fetched; empty if there are none.
        rename: a tensor's name in the file -> its name in transformers' model.
        writing: how to write it.
        default_tokenizer: the tokenizer that belongs to this layout's checkpoints when they carry none.
    """

    name: str
    recognise: Callable[[Source], bool]
    read_config: Callable[[Source], PreTrainedConfig]
    weight_files: Callable[[Source], list[Path]]
    rename: Callable[[str], str]
    writing: Writing
    default_tokenizer: str | None = None


def transformers_weight_files(source: Source) -> list[Path]:
    """The weight files as transformers names them: safetensors before pickles, an index of shards before one file."""
    for index, single in (
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        files = shard_files(source, index) or single_file(source, single)
        if files:
            return files
    return []


def single_file(source: Source, name: str) -> list[Path]:
    """One weight file as a list, empty if the source has none of that name."""
    path = source.get(name)
    return [] if path is None else [path]


def rename_embedding(name: str) -> str:
    """state-spaces' `backbone.embedding` is `backbone.embeddings` in transformers, which leaves it random if missed."""
    return _swap_prefix(name, "backbone.embedding.", "backbone.embeddings.")


def original_embedding(name: str) -> str:
    """The way back from `rename_embedding`."""
    return _swap_prefix(name, "backbone.embeddings.", "backbone.embedding.")


def _swap_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
