"""Megatron's names of a hybrid's tensors, and which of transformers' each of them is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ssm_tune.architectures.configs import ATTENTION, MIXER
from ssm_tune.layouts.megatron.geometry import Geometry, geometry_of
from ssm_tune.layouts.tensors import StoredTensor, assemble
from ssm_tune.layouts.writing import Outgoing, joined, part
from ssm_tune.recipe import RecipeError

EMBEDDING, FINAL_NORM, HEAD = "embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"
_MIXER = ("dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight")
# What Megatron of another time, or without TransformerEngine, calls the same tensors.
_OLDER = (
    (re.compile(r"(decoder\.layers\.\d+\.)mixer\.in_proj\.layer_norm_weight"), r"\1norm.weight"),
    (re.compile(r"(decoder\.layers\.\d+\.)mixer\.conv1d_(weight|bias)"), r"\1mixer.conv1d.\2"),
    (re.compile(r"(decoder\.layers\.\d+\.)input_layernorm\.weight"), r"\1self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"(decoder\.layers\.\d+\.)pre_mlp_layernorm\.weight"), r"\1mlp.linear_fc1.layer_norm_weight"),
)


@dataclass(frozen=True)
class Entry:
    """One tensor of Megatron's, whole, and the tensors of the model that make it."""

    megatron: str
    model: tuple[str, ...]


def older_name(name: str) -> str:
    """A name in a file as it is written here."""
    for pattern, replacement in _OLDER:
        name = pattern.sub(replacement, name)
    return name


def entries(config: PreTrainedConfig) -> Iterator[Entry]:
    """Every tensor of a model, in Megatron's order."""
    geometry = geometry_of(config)
    prefix = "model" if config.model_type == "nemotron_h" else "backbone"
    yield Entry(EMBEDDING, (f"{prefix}.embeddings.weight",))
    for number, symbol in enumerate(geometry.pattern):
        theirs, ours = f"decoder.layers.{number}.", f"{prefix}.layers.{number}."
        if symbol == MIXER:
            yield from (Entry(f"{theirs}mixer.{name}", (f"{ours}mixer.{name}",)) for name in _MIXER)
            yield Entry(f"{theirs}norm.weight", (f"{ours}norm.weight",))
        elif symbol == ATTENTION:
            attention = f"{theirs}self_attention."
            names = ("in_proj",) if geometry.fused else ("q_proj", "k_proj", "v_proj")
            yield Entry(
                f"{attention}linear_proj.weight", (f"{ours}mixer.{'out' if geometry.fused else 'o'}_proj.weight",)
            )
            yield Entry(f"{attention}linear_qkv.layer_norm_weight", (f"{ours}norm.weight",))
            yield Entry(f"{attention}linear_qkv.weight", tuple(f"{ours}mixer.{name}.weight" for name in names))
        else:
            names = ("gate_proj", "up_proj") if geometry.gated else ("up_proj",)
            yield Entry(f"{theirs}mlp.linear_fc1.layer_norm_weight", (f"{ours}norm.weight",))
            yield Entry(f"{theirs}mlp.linear_fc1.weight", tuple(f"{ours}mixer.{name}.weight" for name in names))
            yield Entry(f"{theirs}mlp.linear_fc2.weight", (f"{ours}mixer.down_proj.weight",))
    yield Entry(FINAL_NORM, (f"{prefix}.norm_f.weight",))
    yield Entry(HEAD, ("lm_head.weight",))


def to_megatron(tensors: Mapping[str, Outgoing], config: PreTrainedConfig) -> dict[str, Outgoing]:
    """A model's tensors as Megatron has them on one rank. A head that is not among them (it is tied) is left out."""
    geometry, made = geometry_of(config), {}
    for entry in entries(config):
        if entry.megatron == HEAD and entry.model[0] not in tensors:
            continue
        parts = [tensors[name] for name in entry.model]
        if entry.megatron.endswith("linear_qkv.weight"):
            made[entry.megatron] = _interleave(parts, geometry)
        else:
            made[entry.megatron] = parts[0] if len(parts) == 1 else joined(parts)
    return made


def from_megatron(tensors: Mapping[str, StoredTensor], config: PreTrainedConfig) -> dict[str, StoredTensor]:
    """Megatron's tensors, whole, as the model's class has them. A name that has no place keeps it, to be reported."""
    geometry, made = geometry_of(config), {}
    known = {entry.megatron: entry.model for entry in entries(config)}
    for name, tensor in tensors.items():
        model = known.get(name)
        if model is None:
            made[name] = tensor
        elif name.endswith("linear_qkv.weight"):
            made |= dict(zip(model, _part_heads(tensor, geometry), strict=True))
        elif len(model) == 2:
            half = (tensor.shape[0] if tensor.shape else 0) // 2
            made |= {model[0]: assemble([(tensor, 0, half)]), model[1]: assemble([(tensor, half, 2 * half)])}
        else:
            made[model[0]] = tensor
    return made


def _places(geometry: Geometry) -> list[tuple[int, int]]:
    """Rows of q|k|v in Megatron's order: of each group its queries, then its key and its value."""
    per_group = geometry.query_heads // geometry.key_heads
    queries, keys = geometry.query_heads, geometry.key_heads
    size, places = geometry.head_dim, []
    for group in range(keys):
        places.append((group * per_group * size, (group + 1) * per_group * size))
        places += [((first + group) * size, (first + group + 1) * size) for first in (queries, queries + keys)]
    return places


def _interleave(parts: list[Outgoing], geometry: Geometry) -> Outgoing:
    """q, k and v (or the three in one) in Megatron's order (megatron/core/transformer/attention.py, SelfAttention)."""
    return part(parts[0] if len(parts) == 1 else joined(parts), _places(geometry))


def _part_heads(qkv: StoredTensor, geometry: Geometry) -> list[StoredTensor]:
    """The way back: q, k and v, or the three in one."""
    size = geometry.head_dim
    rows = size * (geometry.query_heads + 2 * geometry.key_heads)
    if len(qkv.shape) != 2 or qkv.shape[0] != rows:
        raise RecipeError(
            f"{qkv.file}: {qkv.name} has {qkv.shape[0] if qkv.shape else 1} rows, {rows} by the arguments."
        )
    start, pieces = 0, []
    for first, last in _places(geometry):
        pieces.append((first, (qkv, start, start + last - first)))
        start += last - first
    ordered = sorted(pieces, key=lambda piece: piece[0])
    if geometry.fused:
        return [assemble([piece for _, piece in ordered])]
    borders = (0, geometry.query_heads * size, (geometry.query_heads + geometry.key_heads) * size, rows)
    return [
        assemble([piece for first, piece in ordered if low <= first < high])
        for low, high in itertools.pairwise(borders)
    ]
