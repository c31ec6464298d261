"""What a layout is: how one publisher lays a checkpoint's config and weights on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssm_tune.layouts.source import Source
from ssm_tune.layouts.tensors import StoredTensor, open_tensors, shard_files
from ssm_tune.layouts.writing import NewFiles, Outgoing, WeightFile
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Parallel:
    """Over how many ranks a checkpoint is spread: tensors split, and layers in stages."""

    tensor: int = 1
    pipeline: int = 1


@dataclass(frozen=True)
class Writing:
    """How to write a layout.

    Args:
        express: a config in this layout's words. RecipeError names the fields that it has no words for.
        plan: those words, the config, the tensors by transformers' names and the ranks -> the files. RecipeError for
            ranks that the tensors cannot be spread over.
        repeats_tied_head: whether a head that is tied to the embedding is in the file too.
        parallel: whether a checkpoint can be spread over ranks.
    """

    express: Callable[[PreTrainedConfig], dict[str, Any]]
    plan: Callable[[dict[str, Any], PreTrainedConfig, Mapping[str, Outgoing], Parallel], NewFiles]
    repeats_tied_head: bool
    parallel: bool = False


@dataclass(frozen=True)
class Layout:
    """One way to lay a checkpoint on disk; each module of this package that knows one has it as `LAYOUT`.

    Args:
        name: "huggingface", "state-spaces", "mistral", "megatron".
        recognise: whether the source's config is of this layout (reads the config file alone).
        read_config: the config as transformers' classes have it. RecipeError for what they cannot express.
        weight_files: the files with the weights, fetched; empty if there are none.
        read_weights: the tensors of those files by transformers' names, none of them read yet.
        name_in_file: what a tensor of transformers' model is called in the files, for messages.
        writing: how to write it.
        default_tokenizer: the tokenizer that belongs to this layout's checkpoints when they carry none.
    """

    name: str
    recognise: Callable[[Source], bool]
    read_config: Callable[[Source], PreTrainedConfig]
    weight_files: Callable[[Source], list[Path]]
    read_weights: Callable[[list[Path], PreTrainedConfig], dict[str, StoredTensor]]
    name_in_file: Callable[[str, PreTrainedConfig], str]
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


def read_renamed(files: list[Path], rename: Callable[[str], str]) -> dict[str, StoredTensor]:
    """The tensors of some files, each under its new name; RecipeError if two have the same."""
    weights: dict[str, StoredTensor] = {}
    stored_as: dict[str, str] = {}
    for name, tensor in open_tensors(files).items():
        renamed = rename(name)
        if renamed in weights:
            raise RecipeError(
                f"{tensor.file}: {stored_as[renamed]} and {name} are two names of one tensor. Remove one."
            )
        weights[renamed], stored_as[renamed] = tensor, name
    return weights


def plan_one_file(
    config_file: str, values: dict[str, Any], weight_file: str, tensors: Mapping[str, Outgoing]
) -> NewFiles:
    """A config of JSON and one file of weights."""
    return NewFiles({config_file: json.dumps(values, indent=2) + "\n"}, [WeightFile(weight_file, tensors)])


def rename_embedding(name: str) -> str:
    """state-spaces' `backbone.embedding` is `backbone.embeddings` in transformers, which leaves it random if missed."""
    return _swap_prefix(name, "backbone.embedding.", "backbone.embeddings.")


def original_embedding(name: str) -> str:
    """The way back from `rename_embedding`."""
    return _swap_prefix(name, "backbone.embeddings.", "backbone.embedding.")


def _swap_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
