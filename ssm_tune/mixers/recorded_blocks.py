"""Blocks recorded as CUDA graphs, one forward and one for each piece of backward, and played as autograd's functions.

Where the weights of a piece are gathered before it is computed, forward is a graph for each piece too.

Each piece is a function of its own, so that autograd hands out the gradients of its parameters before it plays the
next: DistributedDataParallel or FSDP2 send them meanwhile. All graphs share one memory; a piece is played after the
ones after it, as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ssm_tune.kernels.devices import recorded_launches
from ssm_tune.mixers.backward_pieces import Pieces

Result = TypeVar("Result")
# Passes before recording, in which kernels are compiled and libraries make their handles.
WARM_UP = 3
Around = Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]


def _nothing() -> None:
    pass


def _call(piece: int, play: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    return play(given)


class RecordedBlocks:
    """Computes `blocks` as they are at the shapes of the samples, by playing graphs.

    Args:
        starts: numbers of the blocks with which the pieces of backward begin, ascending, from 0 on.
        hidden_states: (batch, length, hidden), a sample.
        seq_idx: (batch, length) int32, -1 padding, a sample; None: none is given later either.
        around: calls what plays a piece forward, of the piece's number. None: forward is played as a whole.
        outlives: whether a parameter's gradient is to be a copy, since it is read after the next piece was played.

    Raises:
        RuntimeError: something cannot be recorded, or memory is short.
    """

    def __init__(
        self,
        blocks: nn.ModuleList,
        starts: Sequence[int],
        hidden_states: Tensor,
        seq_idx: Tensor | None,
        around: Around | None = None,
        outlives: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        self.hidden_states = hidden_states.detach().clone()
        self.seq_idx = None if seq_idx is None else seq_idx.clone()
        self._turn = 0
        self._around = around or _call
        self._pieces = Pieces(blocks, starts, trained_input=hidden_states.requires_grad)
        if self._pieces.count != len(starts) and around is not None:
            raise RuntimeError("the first blocks have nothing to train")
        self._copied = [list(map(outlives, self._pieces.parameters(piece))) for piece in range(self._pieces.count)]
        kind = hidden_states.device.type
        enabled = torch.is_autocast_enabled(kind)
        # Weights are cast in the graph: what autocast keeps of one forward would be freed after it.
        cast = torch.autocast(kind, torch.get_autocast_dtype(kind) if enabled else None, enabled, cache_enabled=False)
        # Recording computes the blocks several times. A resumed run, which records anew, has to draw what an unbroken
        # one does.
        devices = [] if kind == "cpu" else [hidden_states.device]
        fork = torch.random.fork_rng(devices, device_type=kind if devices else "cuda")
        with cast, fork, recorded_launches():
            warm_up(self._pass_once)
            self._record(by_pieces=around is not None)

    def _pass_once(self) -> None:
        output = self._pieces.forward(self.hidden_states, self.seq_idx)
        gradients: list[Tensor | None] = [torch.zeros_like(output)]
        for piece in reversed(range(self._pieces.count)):
            gradients = self._pieces.backward(piece, gradients)[1]

    def _record(self, by_pieces: bool) -> None:
        memory, pieces = OneMemory(), self._pieces

        def forward(between: Callable[[], None]) -> Tensor:
            return pieces.forward(self.hidden_states, self.seq_idx, between if by_pieces else _nothing)

        self.output, plays = memory.capture_parts(forward)
        let_workspaces_go()
        self._forward = [*[_nothing] * (self._pieces.count - len(plays)), *plays]
        self.gradient = torch.empty_like(self.output)
        self._backward: list[tuple[list[Tensor | None], list[Tensor | None], Callable[[], None]]] = []
        gradients: list[Tensor | None] = [self.gradient]
        for piece in reversed(range(pieces.count)):
            (found, gradients), play = memory.capture(partial(pieces.backward, piece, gradients))
            # Only those by the input are handed out; the others' memory is another's as soon as they were read.
            self._backward.insert(0, (found, [] if piece else gradients, play))
        let_workspaces_go()

    # -- playing --------------------------------------------------------------------------------------------------

    def __call__(self, hidden_states: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        if self.seq_idx is not None:
            self.seq_idx.copy_(seq_idx)
        passed = hidden_states
        for piece in range(self._pieces.count):
            passed = self._around(piece, partial(self._apply, piece), passed)
        if self._pieces.count:
            return passed
        self.take(hidden_states)
        return self.play_forward(0)

    def _apply(self, piece: int, passed: Tensor) -> Tensor:
        return _Piece.apply(self, piece, passed, *self._pieces.parameters(piece))

    def take(self, hidden_states: Tensor) -> None:
        self._turn += 1
        self.hidden_states.copy_(hidden_states)

    def play_forward(self, piece: int) -> Tensor:
        self._forward[piece]()
        return self.output.detach()

    @property
    def turn(self) -> int:
        """Number of forward passes so far."""
        return self._turn

    @property
    def last(self) -> int:
        return self._pieces.count - 1

    def play_backward(self, piece: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients by the piece's parameters, and by the blocks' input if it is the first; the graph's own memory,
        but for those that are to be copies."""
        found, by_input, play = self._backward[piece]
        play()
        pairs = zip(found, self._copied[piece], strict=True)
        return [tensor.clone() if copied and tensor is not None else tensor for tensor, copied in pairs], by_input


def warm_up(compute: Callable[[], None]) -> None:
    """Compute what is to be recorded, as it will be: on a stream beside."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARM_UP):
            compute()
    torch.cuda.synchronize()


class OneMemory:
    """Records what functions launch, in graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """What `compute` gives, and what computes that again in its place."""
        result, (play,) = self.capture_parts(lambda between: compute())
        return result, play

    def capture_parts(self, compute: Callable[[Callable[[], None]], Result]) -> tuple[Result, list[Callable[[], None]]]:
        """As `capture`, in several parts: `compute` is given a function to call between them."""
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as recording:

            def begin() -> None:
                recording.close()
                graphs.append(torch.cuda.CUDAGraph())
                # CUDA breaks a recording off when any thread allocates memory, as a loader's does that pins batches,
                # or asks for an event, as NCCL's does, unless it is told that only this thread counts.
                graph = torch.cuda.graph(graphs[-1], pool=self._pool, capture_error_mode="thread_local")
                recording.enter_context(graph)

            begin()
            result = compute(begin)
        return result, [graph.replay for graph in graphs]


def let_workspaces_go() -> None:
    """Of cuBLAS, which keeps one for every thread and stream: that of a recorded forward pass lies in the graphs'
    memory, where backward can use it, as that of backward does, which nobody else may use."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


class _Piece(torch.autograd.Function):
    """The last of them gives what forward does; what goes between them is empty, and shows backward the way."""

    @staticmethod
    def forward(ctx: Any, recorded: RecordedBlocks, piece: int, given: Tensor, *parameters: Tensor) -> Tensor:
        if piece == 0:
            recorded.take(given)
        ctx.recorded, ctx.piece, ctx.turn = recorded, piece, recorded.turn
        output = recorded.play_forward(piece)
        return output if piece == recorded.last else given.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        recorded, piece = ctx.recorded, ctx.piece
        if ctx.turn != recorded.turn:
            raise RuntimeError("backward of blocks that computed another batch since: a CUDA graph keeps the last only")
        if piece == recorded.last:
            recorded.gradient.copy_(gradient)
        found, by_input = recorded.play_backward(piece)
        before = [gradient.new_empty(0)] if piece else by_input or [None]
        return None, None, *(None if tensor is None else tensor.detach() for tensor in (*before, *found))
