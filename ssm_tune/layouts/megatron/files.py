"""Megatron's folders and files."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ssm_tune.layouts.inert_pickle import Inert, read_inertly
from ssm_tune.layouts.layout import Layout, Parallel, Writing
from ssm_tune.layouts.megatron.arguments import express, padded_rows, read_arguments
from ssm_tune.layouts.megatron.geometry import geometry_of
from ssm_tune.layouts.megatron.naming import EMBEDDING, HEAD, entries, from_megatron, older_name, to_megatron
from ssm_tune.layouts.megatron.parallel import check_parallel, gather, spread
from ssm_tune.layouts.source import Source, check_files
from ssm_tune.layouts.tensors import StoredTensor, assemble, stored_tensor
from ssm_tune.layouts.writing import NewFiles, Outgoing, WeightFile
from ssm_tune.recipe import RecipeError

_TRACKER = "latest_checkpointed_iteration.txt"
_FILE = "model_optim_rng.pt"
_VERSION = 3.0  # of Megatron's checkpoints: q, k and v in groups
# Of TransformerEngine's layers, which hold nothing in these models; without them Megatron's strict loading fails.
_ENGINE = ("in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")


@dataclass(frozen=True)
class _Shard:
    """One file: the arguments in it, and its tensors by Megatron's present names."""

    arguments: dict[str, Any]
    tensors: dict[str, StoredTensor]


def recognise(source: Source) -> bool:
    """Whether there is Megatron's tracker file, or a rank's file itself."""
    return source.get(_TRACKER) is not None or _first_file(source, "") is not None


def read_config(source: Source) -> PreTrainedConfig:
    """The config that the arguments in the first rank's file stand for.

    Raises:
        RecipeError: files that are not there or not readable, arguments that no class here computes.
    """
    path = _first_file(source, _folder(source))
    if path is None:
        raise RecipeError(_no_ranks(source))
    shard = _open_shard(path)
    if EMBEDDING not in shard.tensors:
        raise RecipeError(f"{path}: the tensor {EMBEDDING} is missing.")
    parallel = _parallel(shard.arguments, path)
    rows = shard.tensors[EMBEDDING].shape[0] * parallel.tensor
    return read_arguments(shard.arguments, rows, where=str(path))


def weight_files(source: Source) -> list[Path]:
    """The files of all ranks, tensor-parallel ranks of one stage together; empty if there is none."""
    folder = _folder(source)
    path = _first_file(source, folder)
    if path is None:
        return []
    parallel = _parallel(_open_shard(path).arguments, path)
    return [
        source.require(folder + _rank(rank, stage, parallel.pipeline), because=f"{path} says how many ranks there are")
        for stage in range(parallel.pipeline)
        for rank in range(parallel.tensor)
    ]


def _read_weights(files: list[Path], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    shards = [_open_shard(file) for file in files]
    ranks = _parallel(shards[0].arguments, files[0]).tensor
    stages = [[shard.tensors for shard in shards[start : start + ranks]] for start in range(0, len(shards), ranks)]
    whole = gather(stages, geometry_of(config))
    for name in (EMBEDDING, HEAD):
        if name in whole and len(whole[name].shape) == 2 and whole[name].shape[0] > config.vocab_size:
            whole[name] = assemble([(whole[name], 0, config.vocab_size)])
    return from_megatron(whole, config)


def name_in_file(name: str, config: PreTrainedConfig) -> str:
    """Megatron's name of a tensor of transformers' model, its layers numbered through all stages."""
    return next((entry.megatron for entry in entries(config) if name in entry.model), name)


def _folder(source: Source) -> str:
    """The folder of the ranks, with a slash after it, or nothing if they lie at the top."""
    tracker = source.get(_TRACKER)
    if tracker is None:
        return ""
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return "release/"
    if not text.isdecimal():
        raise RecipeError(f"{tracker} holds {text[:40]!r}; an iteration or the word release is expected.")
    return f"iter_{int(text):07d}/"


def _rank(rank: int, stage: int, stages: int) -> str:
    return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "") + f"/{_FILE}"


def _first_file(source: Source, folder: str) -> Path | None:
    return source.get(folder + _rank(0, 0, 1)) or source.get(folder + _rank(0, 0, 2))


def _no_ranks(source: Source) -> str:
    folder = _folder(source)
    if source.get(f"{folder}.metadata") is not None or source.get(f"{folder}metadata.json") is not None:
        return (
            f"{source.label}: {folder or 'the folder'} holds a distributed checkpoint, not the files of ranks. Write "
            "it with Megatron's --ckpt-convert-format torch first."
        )
    return f"{source.label}: {folder}mp_rank_00/{_FILE} is missing. Fetch the checkpoint again."


def _open_shard(path: Path) -> _Shard:
    """A rank's file, its tensors not read yet. RecipeError: it is not one, or not of a kind that can be read."""
    check_files([path])
    content = read_inertly(path)
    if not isinstance(content, dict) or "args" not in content:
        raise RecipeError(f"{path} is no checkpoint of Megatron: it holds no arguments (args).")
    if "model0" in content:
        raise RecipeError(f"{path} is of a virtual pipeline (model0, model1, ...), which is not read.")
    arguments, model = content["args"], content.get("model")
    if isinstance(arguments, Inert):
        arguments = arguments.state
    if not isinstance(arguments, dict) or not isinstance(model, dict):
        raise RecipeError(f"{path} is no checkpoint of Megatron: its args or its model are not what they should be.")
    tensors: dict[str, StoredTensor] = {}
    for name, value in model.items():
        if not isinstance(name, str) or name.endswith("_extra_state") or name == "rotary_pos_emb.inv_freq":
            continue
        if not isinstance(value, torch.Tensor):
            kind = value.origin if isinstance(value, Inert) else type(value).__name__
            raise RecipeError(f"{path}: {name} is a {kind}, not a tensor.")
        tensors[older_name(name)] = stored_tensor(path, name, value.detach())
    return _Shard(arguments, tensors)


def _parallel(arguments: Mapping[str, Any], path: Path) -> Parallel:
    sizes = [
        arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size", 1)),
        arguments.get("pipeline_model_parallel_size", 1),
    ]
    if not all(type(size) is int and 0 < size < 1000 for size in sizes):
        raise RecipeError(f"{path}: the arguments say {sizes} ranks, which is no number of files.")
    return Parallel(*sizes)


def _plan(
    values: dict[str, Any], config: PreTrainedConfig, tensors: Mapping[str, Outgoing], parallel: Parallel
) -> NewFiles:
    geometry = geometry_of(config)
    check_parallel(geometry, parallel)
    size, stages = geometry.layers // parallel.pipeline, parallel.pipeline
    arguments = {
        **values,
        "hybrid_layer_pattern": "|".join(geometry.pattern[n * size : (n + 1) * size] for n in range(stages)),
        "padded_vocab_size": padded_rows(geometry.vocabulary, parallel.tensor),
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": stages,
    }
    files = []
    for stage, ranks in enumerate(spread(to_megatron(tensors, config), geometry, parallel)):
        for rank, own in enumerate(ranks):
            path = f"iter_0000000/{_rank(rank, stage, stages)}"
            files.append(WeightFile(path, own, lambda table: _content(table, arguments)))
    return NewFiles({_TRACKER: "0"}, files)


def _content(table: dict[str, torch.Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    """A rank's file, as Megatron's save_checkpoint has it."""
    model: OrderedDict[str, torch.Tensor | None] = OrderedDict()
    for name, tensor in table.items():
        model[name] = tensor
        module = name.removesuffix(".weight")
        if module != name and module.rsplit(".", 1)[-1] in _ENGINE:
            if module.endswith("linear_proj"):
                model[module.replace("linear_proj", "core_attention._extra_state")] = None
            model[f"{module}._extra_state"] = None
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": _VERSION,
        "iteration": 0,
        "model": model,
        "rng_state": [],
    }


LAYOUT = Layout(
    "megatron",
    recognise,
    read_config,
    weight_files,
    _read_weights,
    name_in_file,
    Writing(express, _plan, repeats_tied_head=False, parallel=True),
)
