"""Spreading whole tensors over tensor-parallel ranks and pipeline stages, and joining them again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ssm_tune.architectures.configs import ATTENTION, MLP
from ssm_tune.layouts.layout import Parallel
from ssm_tune.layouts.megatron.arguments import padded_rows
from ssm_tune.layouts.megatron.geometry import Geometry
from ssm_tune.layouts.megatron.naming import EMBEDDING, HEAD
from ssm_tune.layouts.tensors import Piece, StoredTensor, assemble
from ssm_tune.layouts.writing import Outgoing, part
from ssm_tune.recipe import RecipeError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def check_parallel(geometry: Geometry, parallel: Parallel) -> None:
    """RecipeError for everything that so many ranks cannot share equally, as Megatron's layers need it."""
    ranks, stages = parallel.tensor, parallel.pipeline
    shared = {"heads of the mixers": geometry.heads, "n_groups": geometry.groups}
    if ATTENTION in geometry.pattern:
        shared |= {"num_attention_heads": geometry.query_heads}
        shared |= {"rows of q, k and v": geometry.head_dim * (geometry.query_heads + 2 * geometry.key_heads)}
    if MLP in geometry.pattern:
        shared["intermediate_size"] = geometry.ffn
    mistakes = [
        f"{name}: {number} cannot be shared by {ranks} tensor-parallel ranks. Choose another --tp."
        for name, number in shared.items()
        if number % ranks
    ]
    if geometry.layers % stages:
        mistakes.append(f"{geometry.layers} layers cannot be shared by {stages} pipeline stages. Choose another --pp.")
    if mistakes:
        raise RecipeError(mistakes)


def spread(tensors: Mapping[str, Outgoing], geometry: Geometry, parallel: Parallel) -> list[list[dict[str, Outgoing]]]:
    """Whole tensors by Megatron's names -> those of each [stage][rank]; each stage's layers begin at 0."""
    per_stage = geometry.layers // parallel.pipeline
    stages: list[dict[str, Outgoing]] = [{} for _ in range(parallel.pipeline)]
    for name, tensor in tensors.items():
        match = _LAYER.match(name)
        if match is not None:
            stage, number = divmod(int(match[1]), per_stage)
            stages[stage][_LAYER.sub(f"decoder.layers.{number}.", name, count=1)] = tensor
        else:
            stages[0 if name == EMBEDDING else -1][name] = tensor
    if HEAD not in tensors and parallel.pipeline > 1:
        stages[-1][HEAD] = tensors[EMBEDDING]  # a tied head, where the embedding is not
    return [
        [
            {name: _share(name, tensor, geometry, rank, parallel.tensor) for name, tensor in stage.items()}
            for rank in range(parallel.tensor)
        ]
        for stage in stages
    ]


def _share(name: str, tensor: Outgoing, geometry: Geometry, rank: int, ranks: int) -> Outgoing:
    if name in (EMBEDDING, HEAD):
        return _rows(tensor, padded_rows(geometry.vocabulary, ranks), rank, ranks)
    split = geometry.sections(name)
    if split is None or ranks == 1:
        return tensor
    dim, sections = split
    ranges, start = [], 0
    for section in sections:
        size = section or tensor.source.shape[dim]
        share = size // ranks
        ranges.append((start + rank * share, start + (rank + 1) * share))
        start += size
    return part(tensor, ranges, dim)


def _rows(tensor: Outgoing, padded: int, rank: int, ranks: int) -> Outgoing:
    """A rank's rows of the embedding or the head, padded with the last row as Megatron's own converters pad."""
    rows, share = tensor.source.shape[0], padded // ranks
    start, stop = rank * share, (rank + 1) * share
    ranges = [(min(start, rows), min(stop, rows))] if start < rows else []
    missing = share - sum(last - first for first, last in ranges)
    return part(tensor, [*ranges, *[(rows - 1, rows)] * missing])


def gather(stages: Sequence[Sequence[Mapping[str, StoredTensor]]], geometry: Geometry) -> dict[str, StoredTensor]:
    """The way back from `spread`: whole tensors by Megatron's names, the vocabulary still padded.

    Raises:
        RecipeError: ranks of one stage with different tensors, or a tensor that is no equal share.
    """
    whole: dict[str, StoredTensor] = {}
    first = 0
    for ranks in stages:
        numbers = [int(match[1]) for name in ranks[0] if (match := _LAYER.match(name))]
        for rank in ranks:
            _check_names(rank, ranks[0])
        for name in ranks[0]:
            match = _LAYER.match(name)
            number = "" if match is None else f"decoder.layers.{int(match[1]) + first}."
            whole[number + _LAYER.sub("", name, count=1)] = _join(name, [rank[name] for rank in ranks], geometry)
        first += max(numbers, default=-1) + 1
    return whole


def _check_names(rank: Mapping[str, StoredTensor], first: Mapping[str, StoredTensor]) -> None:
    for name in first.keys() ^ rank.keys():
        have, lack = (first, rank) if name in first else (rank, first)
        file = next(iter(lack.values())).file if lack else "a rank's file"
        raise RecipeError(f"{file}: the tensor {name} is missing; {have[name].file} has it.")


def _join(name: str, tensors: Sequence[StoredTensor], geometry: Geometry) -> StoredTensor:
    split = geometry.sections(name)
    if split is None or len(tensors) == 1:
        return tensors[0]
    dim, sections = split
    pieces: list[Piece] = []
    start = 0
    for section in sections:
        share = section // len(tensors) if section else (tensors[0].shape[dim] if len(tensors[0].shape) > dim else 0)
        pieces += [(tensor, start, start + share) for tensor in tensors]
        start += share
    for tensor in tensors:
        if len(tensor.shape) <= dim or tensor.shape[dim] != start:
            shape = " x ".join(map(str, tensor.shape)) or "a single number"
            raise RecipeError(
                f"{tensor.file}: {tensor.name} is {shape}; {start} {('rows', 'columns')[dim]} are a rank's share by "
                "the arguments."
            )
    return assemble(pieces, dim)
