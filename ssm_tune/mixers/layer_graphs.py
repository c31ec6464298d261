"""The blocks of a backbone as CUDA graphs, forward and backward: for training on rows of one fixed shape.

A Mamba-2 block is some thirty launches forward and as many backward, which Python gives to the GPU more slowly than a
small model computes them. Packed rows all have one shape, so that the launches can be recorded once and played again.
Only the blocks are recorded: embeddings, head, loss, optimizer and the trainer stay as they are, and a batch of another
shape, evaluation and decoding go the usual way.

What is recorded cannot look at values. Documents are therefore found on the GPU, in the graph itself, from the batch's
own `seq_idx` (`kernels.documents.without_waiting`); a kernel that has to wait for where documents start is passed over.
A graph keeps the memory of its activations for itself.

Backward is one graph in a process by itself. Where processes exchange gradients it is several, of a few blocks each, so
that gradients travel while those of the blocks before are computed. Every process records when it has seen its shape;
one that cannot goes on without, and what it exchanges with the others stays the same. Of sharded blocks the weights are
gathered into the same memory each time, which is not given back; forward is a graph for each unit, so that the next
one's are gathered while it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ssm_tune.mixers.recorded_blocks import RecordedBlocks
from ssm_tune.mixers.residual_stream import can_be_joined
from ssm_tune.mixers.sharded_units import Unit, call_unit, gather_in_place, units_of

logger = logging.getLogger(__name__)

# Of backward, where gradients are exchanged: bytes of gradients in a piece, and number of pieces. The more, the shorter
# is what is waited for in the end: the exchange of the last one.
SMALLEST_PIECE = 64 * 2**20
LARGEST_COUNT = 8

_on = False
_graphs: WeakKeyDictionary[nn.Module, _Graph] = WeakKeyDictionary()


@contextmanager
def layer_graphs(on: bool = True) -> Iterator[None]:
    """Within, backbones in training record their blocks, from the second batch of one shape on, if `on`."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before
        _graphs.clear()  # and with them the memory that they keep


def run_blocks(backbone: nn.Module, hidden_states: Tensor, seq_idx: Tensor | None) -> Tensor | None:
    """What the blocks of a backbone make of hidden_states (batch, length, hidden), by its graph; None: not by a graph.

    The batch must have no padding inside a document.
    """
    if not (_on and backbone.training and torch.is_grad_enabled() and can_be_recorded(hidden_states.device)):
        return None
    graph = _graphs.get(backbone)
    if graph is None:
        graph = _graphs[backbone] = _Graph()
    return graph.run(backbone, hidden_states, seq_idx)


def can_be_recorded(device: torch.device) -> bool:
    """Whether there are CUDA graphs on a device, and none is being recorded already."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class _Graph:
    """The graph of one backbone, for the first shape that comes twice in a row."""

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] | None = None
        self.recorded: tuple[Any, ...] | None = None
        self.replay: Callable[..., Tensor] | None = None
        self.failed = False
        self.accumulating = False

    def run(self, backbone: nn.Module, hidden_states: Tensor, seq_idx: Tensor | None) -> Tensor | None:
        key = _key(backbone, hidden_states, seq_idx)
        if self.replay is not None and key == self.recorded:
            if not units_of(backbone.layers):
                self._save_gradients(backbone)
            return self.replay(hidden_states) if seq_idx is None else self.replay(hidden_states, seq_idx)
        twice, self.seen = key == self.seen, key
        if self.failed or self.replay is not None or not twice:
            return None
        try:
            self.replay = record(backbone.layers, hidden_states, seq_idx)
        except (RuntimeError, ValueError, TypeError) as error:
            # A lack of memory too: a graph needs its own beside what a step has outside it.
            self.failed = True
            logger.warning(
                "kernels.graphs: the blocks cannot be recorded in a CUDA graph (%s). Every kernel is launched by "
                "itself instead, which takes longer where the model is small.",
                " ".join(str(error).split())[:300],
            )
            return None
        self.recorded = key
        return self.run(backbone, hidden_states, seq_idx)

    def _save_gradients(self, backbone: nn.Module) -> None:
        """Gradients are the graph's own memory, which playing it again writes over: one that is to be added to, since
        another micro-batch comes before the optimizer's step, is copied out of it."""
        trained = [parameter for parameter in backbone.layers.parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in trained):
            self.accumulating = False
        elif not self.accumulating:
            self.accumulating = True
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


def _key(backbone: nn.Module, hidden_states: Tensor, seq_idx: Tensor | None) -> tuple[Any, ...]:
    """What a graph is good for: shapes, dtypes, autocast, and which parameters are where and trained."""
    kind = hidden_states.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    sharded = isinstance(backbone.layers[0], FSDPModule)  # whose weights are gathered at one place
    parameters = tuple((sharded or p.data_ptr(), p.requires_grad) for p in backbone.layers.parameters())
    return (
        tuple(hidden_states.shape),
        hidden_states.dtype,
        hidden_states.requires_grad,
        None if seq_idx is None else seq_idx.dtype,
        autocast,
        parameters,
    )


def record(blocks: nn.ModuleList, hidden_states: Tensor, seq_idx: Tensor | None) -> Callable[..., Tensor]:
    """A function that computes the blocks by playing graphs, which autograd differentiates by playing others."""
    units = units_of(blocks)
    if units:
        recorded = _record_sharded(blocks, units, hidden_states, seq_idx)
    else:
        recorded = RecordedBlocks(blocks, starts_of_pieces(blocks), hidden_states, seq_idx)
    torch.cuda.empty_cache()  # of the batches before: a graph does not share its memory with them
    return recorded


def _record_sharded(
    blocks: nn.ModuleList, units: list[Unit], hidden_states: Tensor, seq_idx: Tensor | None
) -> RecordedBlocks:
    """A piece for each unit."""
    if not all(map(can_be_joined, blocks)):
        raise RuntimeError("blocks are called one by one, for checkpointing or hooks")
    gathered = gather_in_place(units)
    ends = list(accumulate(map(len, units)))
    return RecordedBlocks(
        blocks,
        [0, *ends[:-1]],
        hidden_states,
        seq_idx,
        lambda piece, play, given: call_unit(units[piece], play, given),
        lambda parameter: parameter not in gathered,
    )


def starts_of_pieces(blocks: nn.ModuleList) -> list[int]:
    """Numbers of the blocks with which the pieces of backward begin: pieces of as many blocks each."""
    count = 1
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sent = sum(p.numel() * p.element_size() for p in blocks.parameters() if p.requires_grad)
        count = max(1, min(sent // SMALLEST_PIECE, LARGEST_COUNT, len(blocks)))
    return [number * len(blocks) // count for number in range(count)]
