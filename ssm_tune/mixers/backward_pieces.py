"""A forward pass through residual blocks whose backward is computed in pieces, from the last blocks to the first.

So gradients of the last blocks are there, and can be sent to other processes, while those of the blocks before are
still computed. What is computed is what one backward through all blocks computes, in the same order.

Parameters are used by aliases that share their memory: nothing that hangs on the parameters themselves, as
DistributedDataParallel's hooks do and the stream on which it was made, has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from ssm_tune.kernels.documents import without_waiting
from ssm_tune.kernels.reference import PADDING
from ssm_tune.mixers.residual_stream import Border, pass_through


class Pieces:
    """Forward passes through `blocks`, each followed by one backward of every piece.

    Args:
        blocks: residual blocks; sharded ones with their weights gathered.
        starts: numbers of the blocks with which pieces begin, ascending, from 0 on. Pieces in which nothing has a
            gradient are joined to the next.
        trained_input: whether the gradient by the blocks' input is wanted.
    """

    def __init__(self, blocks: nn.ModuleList, starts: Sequence[int], *, trained_input: bool) -> None:
        self._starts = [start for start in starts if start == 0 or trained_input or _trained(blocks[:start])]
        self._blocks, self._trained_input = _Blocks(blocks, self._starts), trained_input
        ends = [*self._starts[1:], len(blocks)]
        # Trained parameters of each piece, by their names in `_Blocks`.
        self._parameters = [
            {
                f"blocks.{start + int(number)}.{rest}": parameter
                for name, parameter in _trained(blocks[start:end]).items()
                for number, _, rest in [name.partition(".")]
            }
            for start, end in zip(self._starts, ends, strict=True)
        ]
        self._aliases: list[list[nn.Parameter]] = []
        self._edges: list[tuple[GradientEdge, ...]] = []

    @property
    def count(self) -> int:
        """Number of pieces with a backward."""
        return len(self._starts) if self._trained_input or any(self._parameters) else 0

    def parameters(self, piece: int) -> list[nn.Parameter]:
        """The parameters that `backward` gives gradients for."""
        return list(self._parameters[piece].values())

    def forward(
        self, hidden_states: Tensor, seq_idx: Tensor | None, between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """hidden_states, and the result: (batch, length, hidden). seq_idx: (batch, length) int32, -1 padding. `between`
        is called after each piece but the last."""
        self._aliases = [
            [nn.Parameter(parameter.detach()) for parameter in piece.values()] for piece in self._parameters
        ]
        given = hidden_states.detach().requires_grad_(self._trained_input)
        edges: list[tuple[GradientEdge, ...]] = [(get_gradient_edge(given),) if self._trained_input else ()]

        def before(number: int, stream: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
            if number not in self._starts[1:]:
                return stream, added
            between()
            stream, added, edge = _cut(stream, added)
            edges.append(edge)
            return stream, added

        names = [name for piece in self._parameters for name in piece]
        aliases = dict(zip(names, (alias for piece in self._aliases for alias in piece), strict=True))
        output = functional_call(self._blocks, aliases, (given, seq_idx, before))
        self._edges = [*edges, (get_gradient_edge(output),) if output.requires_grad else ()]
        return output.detach()

    def backward(
        self, piece: int, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients by the piece's parameters (None: it has no part in the output), and those for the piece before it,
        or by the input.

        Args:
            gradients: by what the piece gives: for the last one the gradient by the output, for others what the piece
                after it returned. Each piece once after a forward pass, the last one first.
        """
        aliases, before = self._aliases[piece], self._edges[piece]
        after = [pair for pair in zip(self._edges[piece + 1], gradients, strict=True) if pair[1] is not None]
        found = torch.autograd.grad(
            [edge for edge, _ in after], [*aliases, *before], [gradient for _, gradient in after], allow_unused=True
        )
        if piece == 0:
            self._aliases, self._edges = [], []  # with all that hangs on them
        return list(found[: len(aliases)]), list(found[len(aliases) :])


class _Blocks(nn.Module):
    def __init__(self, blocks: nn.ModuleList, starts: Sequence[int]) -> None:
        super().__init__()
        self.blocks, self.starts = blocks, starts

    def forward(self, hidden_states: Tensor, seq_idx: Tensor | None, before: Border) -> Tensor:
        if seq_idx is not None:
            # Padding becomes a document of its own, to be computed like any other: nobody reads what comes of it, and
            # clearing it in every layer would take passes over whole activations, in each batch, with padding or not.
            # And a tensor of this call's own: what is worked out of it is kept by tensor, and belongs in the graph.
            seq_idx = torch.where(seq_idx == PADDING, PADDING - 1, seq_idx)
        with without_waiting():
            together = {"before": before, "gathered": True, "starts": self.starts}
            return pass_through(self.blocks, hidden_states, **together, seq_idx=seq_idx)


def _trained(blocks: nn.ModuleList) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in blocks.named_parameters() if parameter.requires_grad}


def _cut(stream: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[GradientEdge, ...]]:
    """The same tensors behind a node of their own, and where gradients by them arrive; without holding the tensors."""
    trained = [tensor for tensor in (stream, added) if tensor is not None and tensor.requires_grad]
    passed = _Cut.apply(*trained)
    edges = tuple(map(get_gradient_edge, passed))
    stream, added = (
        next(tensors) if tensor is not None and tensor.requires_grad else tensor
        for tensors in [iter(passed)]
        for tensor in (stream, added)
    )
    return stream, added, edges


class _Cut(torch.autograd.Function):
    """The identity. Backward can stop at it; at nodes that are on the way to each other, as of the stream and what a
    block adds to it, it could not."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
