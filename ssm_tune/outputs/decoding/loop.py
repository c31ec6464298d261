"""The loop of decoding: prompts are read in pieces, then every row says a token at a time, the same rows to the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssm_tune.mixers.step import same_step
from ssm_tune.outputs.decoding.choosing import NO_TOKEN
from ssm_tune.outputs.decoding.graphs import Graphed
from ssm_tune.outputs.decoding.states import BatchedStates

_PIECE = 65_536  # tokens of all rows together that are read at once: bounds the memory of long prompts
_SMALLEST = 256  # tokens of a row
_WORTH_A_GRAPH = 16  # tokens: capturing the choice takes as long as some of them
_AHEAD = 2  # steps that a GPU is given before it is asked for what the first of them said


class NoNumbers(ArithmeticError):
    """The model's logits are NaN or infinite."""


@torch.no_grad()
def read_prompts(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Any, Tensor]:
    """The cache after prompts, and the logits (rows, vocabulary) that follow them, float32.

    ids: (rows, length), padded on the left; mask: the same shape, 0 for padding.
    """
    rows, length = ids.shape
    size = max(_SMALLEST, _PIECE // rows)
    cache, padded = None, not bool(mask.all())
    for begin in range(0, length, size):
        piece = slice(begin, min(begin + size, length))
        masked = {"attention_mask": mask[:, piece]} if padded else {}
        output = model(input_ids=ids[:, piece], cache=cache, use_cache=True, logits_to_keep=1, **masked)
        cache = output.cache
    return cache, output.logits[:, -1].float()


class Decoder:
    """Says what a model says; what it decoded with is kept for the next time: the states' places, on a GPU the graph.

    Made anew when the model is another one, its weights lie elsewhere, or its adapters were switched. A second thread
    that comes while it is at work gets places of its own.

    `state_dtype`: see `BatchedStates`.
    """

    def __init__(self, state_dtype: torch.dtype | None = None) -> None:
        self._state_dtype = state_dtype
        self._states: BatchedStates | None = None
        self._made_for: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def decode(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]],
        max_new_tokens: int,
    ) -> Iterator[list[int]]:
        """The next token of every row, again and again; whoever has heard enough closes the iterator.

        On a GPU the device is some steps ahead of what is told, so that it never waits for the host; what it said after
        the end is dropped.

        Args:
            model: one that `can_step`, in evaluation mode. ids, mask: see `read_prompts`. choose: see `Choice`.

        Raises:
            NoNumbers: logits that are NaN or infinite.
        """
        if not self._lock.acquire(blocking=False):
            yield from Decoder(self._state_dtype).decode(model, ids, mask, choose, max_new_tokens)
            return
        try:
            yield from self._decode(model, ids, mask, choose, max_new_tokens)
        finally:
            self._lock.release()

    @torch.no_grad()
    def _decode(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]],
        max_new_tokens: int,
    ) -> Iterator[list[int]]:
        cache, logits = read_prompts(model, ids, mask)
        choose = Graphed(choose, ids.device, "choice of tokens")  # of these rules; the states' graph serves all
        choose.enabled &= max_new_tokens >= _WORTH_A_GRAPH
        outbox = _Outbox(ids.shape[0], ids.device)
        states = self._take_in(model, cache, ids.shape[1]) if max_new_tokens > 1 else None
        del cache
        for number in range(1, max_new_tokens + 1):
            tokens, told = choose(logits)
            outbox.send(told)
            if outbox.waiting > outbox.ahead:
                yield outbox.receive()
            if number < max_new_tokens:
                logits = states.step(tokens)
        while outbox.waiting:
            yield outbox.receive()

    def _take_in(self, model: nn.Module, cache: Any, length: int) -> BatchedStates:
        made_for = same_step(model)
        if self._states is None or self._made_for != made_for:
            self._states, self._made_for = BatchedStates(model, cache, self._state_dtype), made_for
        else:
            self._states.clear()
        self._states.add(cache, length)
        return self._states


class _Outbox:
    """Tokens on their way to the host, oldest first."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.ahead = _AHEAD if self._cuda else 0
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._free = [torch.empty(rows, dtype=torch.long, pin_memory=True) for _ in range(self._cuda * (_AHEAD + 1))]

    @property
    def waiting(self) -> int:
        return len(self._sent)

    def send(self, tokens: Tensor) -> None:
        if not self._cuda:
            self._sent.append((tokens, None))
            return
        room, event = self._free.pop(), torch.cuda.Event()
        room.copy_(tokens, non_blocking=True)
        event.record()
        self._sent.append((room, event))

    def receive(self) -> list[int]:
        tokens, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
            self._free.append(tokens)
        found = tokens.tolist()
        if NO_TOKEN in found:
            raise NoNumbers(f"the model's logits are not numbers (NaN or infinite) in row {found.index(NO_TOKEN)}")
        return found
