"""The states of rows that decode together: rows come and go between steps, each step is one call of the model.

A state-space layer's state has one size whatever was read, so the rows' states lie in tensors with one place a row: a
row that comes is copied into a place, a step works on the first places, and where a row leaves, the last one takes its
place. Nothing is allocated from token to token, and nothing grows with the length of an answer: on a GPU a step is one
CUDA graph. Attention layers of hybrids keep what they have read; their rows are padded on the left to the longest, as
`generate` pads a batch, and their steps are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ssm_tune.mixers.step import DecodeStep, can_step
from ssm_tune.outputs.decoding.graphs import Graphed, say_once

logger = logging.getLogger(__name__)

_RECURRENT = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
_ATTENTION = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


class States(Protocol):
    """What the engine needs of rows that decode together."""

    def add(self, cache: Any, length: int) -> None:
        """Take in a row, as the last one: the cache of its `length` tokens."""

    def remove(self, row: int) -> None:
        """Let a row go; the last one takes its place."""

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Give every row its next token; returns logits (rows, vocabulary) in float32, which the next step may
        overwrite.
        """


def make_states(model: nn.Module, cache: Any) -> States:
    """Room for rows whose caches are like this one."""
    if type(cache) is DynamicCache and all(
        type(layer) in (*_RECURRENT, DynamicLayer, DummyLayer) for layer in cache.layers
    ):
        return BatchedStates(model, cache)
    logger.warning(
        "decoding: the cache of %s is of a kind whose rows cannot be joined. Requests are answered side by side but "
        "each by calls of its own, so that more of them at once are no faster.",
        type(model).__name__,
    )
    return SingleStates(model)


class BatchedStates:
    """Rows in one cache; see the module.

    Args:
        like: a cache of such rows.
        state_dtype: of the recurrent states; None: as in `like`, float32. In 16 bits a step reads and writes half as
            much, which counts for many rows, and every token rounds the state: what a token adds to a long memory may
            then be lost.
    """

    def __init__(self, model: nn.Module, like: DynamicCache, state_dtype: torch.dtype | None = None) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._cache = DynamicCache(config=model.config)
        self._lengths: list[int] = []
        self._pools: list[_Pool] = []
        self._attention: list[DynamicLayer] = []
        for layer, source in zip(self._cache.layers, like.layers, strict=True):
            if isinstance(layer, _RECURRENT):
                layer.device, layer.dtype = source.device, source.dtype
                layer.conv_kernel_size = dict(source.conv_kernel_size)
                layer.has_previous_state = dict(source.has_previous_state)
                for states, ready in (
                    ("conv_states", "is_conv_states_initialized"),
                    ("recurrent_states", "is_recurrent_states_initialized"),
                ):
                    setattr(layer, ready, dict(getattr(source, ready)))
                    for index, state in getattr(source, states).items():
                        if state is not None:
                            dtype = state_dtype if states == "recurrent_states" else None
                            self._pools.append(_Pool(getattr(layer, states), index, state, dtype))
            # A hybrid's layer may keep keys only in some layers (zamba's shared attention).
            if isinstance(layer, _ATTENTION) and source.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
                self._attention.append(layer)
        self._shown = 0
        self._run: Graphed | None = None
        if can_step(model) and not self._attention:
            self._step = DecodeStep(model)
            self._run = Graphed(lambda ids: self._step(ids, self._cache), self._device)
        elif self._device.type == "cuda":
            reason = "has attention layers, whose caches grow" if self._attention else "is not one that can be captured"
            say_once(
                "decoding: %s %s, so that a step is no CUDA graph: its kernels are launched one by one from Python, "
                "which for few rows takes several times as long as the GPU needs.",
                type(model).__name__,
                reason,
            )

    def add(self, cache: DynamicCache, length: int) -> None:
        """A cache may hold several rows, where there is no attention or where all have `length` tokens."""
        count = len(self._lengths)
        sources = [
            state
            for layer in cache.layers
            if isinstance(layer, _RECURRENT)
            for states in (layer.conv_states, layer.recurrent_states)
            for state in states.values()
            if state is not None
        ]
        moved = [pool.put(count, state) for pool, state in zip(self._pools, sources, strict=True)]
        if any(moved) and self._run is not None:
            self._run.forget()
        kept = [layer for layer in cache.layers if isinstance(layer, _ATTENTION) and layer.is_initialized]
        longest = max([*self._lengths, length])
        for layer, source in zip(self._attention, kept, strict=True):
            row = [_pad_left(part, longest) for part in (source.keys, source.values)]
            if count:
                row = [
                    torch.cat([_pad_left(part, longest), added])
                    for part, added in zip((layer.keys, layer.values), row, strict=True)
                ]
            layer.keys, layer.values = row
        self._lengths += [length] * (sources[0] if sources else kept[0].keys).shape[0]
        self._show(len(self._lengths))

    def clear(self) -> None:
        """Let all rows go; weights may have changed in place. For models without attention."""
        self._lengths = []
        self._step.refresh()

    def remove(self, row: int) -> None:
        last = len(self._lengths) - 1
        for pool in self._pools:
            pool.move(last, row)
        self._lengths[row] = self._lengths[last]
        self._lengths.pop()
        order = list(range(last))
        if row < last:
            order[row] = last
        longest = max(self._lengths, default=1)
        for layer in self._attention:  # the longest row may be the one that went
            layer.keys, layer.values = (part[order][..., -longest:, :] for part in (layer.keys, layer.values))
        self._show(last)

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        rows = len(self._lengths)
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, device=self._device)
        self._lengths = [length + 1 for length in self._lengths]
        if self._run is not None:
            together = self._graph_size(rows) if self._run.enabled else rows
            self._show(together)
            if together > rows:
                ids = nn.functional.pad(ids, (0, together - rows))
            return self._run(ids)[:rows]
        arguments: dict[str, Any] = {}
        if self._attention:
            lengths = torch.tensor(self._lengths, device=self._device)[:, None] - 1
            width = max(self._lengths) - 1
            places = torch.arange(width + 1, device=self._device)
            arguments = {"attention_mask": (places >= width - lengths).long(), "position_ids": lengths}
        output = self._model(input_ids=ids[:, None], cache=self._cache, use_cache=True, **arguments)
        return output.logits[:, -1].float()

    def _graph_size(self, rows: int) -> int:
        """How many places a step works on: a graph has one size, so a few sizes serve all numbers of rows."""
        size = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
        return min(size, self._pools[0].room)

    def _show(self, count: int) -> None:
        if count == self._shown:
            return
        self._shown = count
        for pool in self._pools:
            pool.show(count)


class _Pool:
    """One state of all rows: (places, ...). `holder[index]` is the view of the first places that the model works on."""

    def __init__(
        self, holder: dict[int, Tensor | None], index: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        self._holder, self._index = holder, index
        self._rows = like.new_zeros((0, *like.shape[1:]), dtype=dtype)

    @property
    def room(self) -> int:
        return self._rows.shape[0]

    def put(self, place: int, state: Tensor) -> bool:
        """state: (rows, ...), to this place and the next ones. Returns whether all had to move.

        There is twice the room whenever there is too little, and never less again.
        """
        after = place + state.shape[0]
        moved = after > self.room
        if moved:
            more = self._rows.new_zeros((max(after, 2 * self.room), *self._rows.shape[1:]))
            more[: self.room].copy_(self._rows)
            self._rows = more
        self._rows[place:after].copy_(state)
        return moved

    def move(self, source: int, target: int) -> None:
        if source != target:
            self._rows[target].copy_(self._rows[source])

    def show(self, count: int) -> None:
        self._holder[self._index] = self._rows[:count]


def _pad_left(part: Tensor, length: int) -> Tensor:
    """Keys or values (rows, heads, tokens, size), with zeros in front up to so many tokens; a mask hides them."""
    return nn.functional.pad(part, (0, 0, length - part.shape[-2], 0))


class SingleStates:
    """Rows that each keep a cache of their own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._caches: list[Any] = []

    def add(self, cache: Any, length: int) -> None:
        self._caches.append(cache)

    def remove(self, row: int) -> None:
        self._caches[row] = self._caches[-1]
        self._caches.pop()

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        device = self._model.get_input_embeddings().weight.device
        logits = []
        for token, cache in zip(tokens, self._caches, strict=True):
            output = self._model(input_ids=torch.tensor([[token]], device=device), cache=cache, use_cache=True)
            logits.append(output.logits[:, -1].float())
        return torch.cat(logits)
