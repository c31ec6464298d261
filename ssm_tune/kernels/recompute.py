"""Activations that backward computes again instead of keeping: what the fused kernels of stock models do inside one
call, done here across the calls of a mixer, so that its projections can be modules between them.

Inside a scope (`recomputed`), a tensor can be declared `recomputable` together with the function that gives it again.
Whoever then saves it, or any view of it, for backward saves a note instead; the first who asks for it in backward has
it computed, and it is dropped when everybody has had it. Nothing changes outside a scope, without gradients, and
where somebody else decides what is kept (gradient checkpointing, offloading): those compute or move everything
themselves, and a second recomputation would only cost time.

    with recomputed(x):
        y = convolve(x)
        recomputable([y], lambda x=reference_to(x): [convolve(x())])
        z = scan(y)                     # saves y: a note

Where an operation's own backward pass finds its output on the way, whoever needs that can say so beforehand (`expect`)
and wait until then (`ByProduct`): nothing is computed twice.

Functions get their inputs by `reference_to`, which keeps no tensor that is itself recomputable. They run without
gradients, under the autocast of the forward pass, and give the same shapes and strides as they gave there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Kinds of device where memory is scarce and stock has fused calls to be compared with.
DEVICES = ("cuda",)

_local = threading.local()


class _Source:
    """Tensors that are got again together, when one of them is asked for."""

    def __init__(self, function: Callable[[], Sequence[Tensor]], scope: _Scope, random_state: RandomState | None):
        self.function, self.autocast, self.random_state = function, scope.autocast, random_state
        # Weak, since results know their source: a cycle would keep what `function` holds until Python looks for cycles.
        self.results: list[weakref.ref[_Result]] = []

    def compute(self) -> None:
        with torch.no_grad(), _autocast(self.autocast), _random(self.random_state):
            tensors = self.function()
        for result, tensor in zip(self._alive(), tensors, strict=True):
            if result is not None and result.notes:
                result.tensor, result.left, result.expected = result.fitted(tensor), result.notes, 0

    def give(self, tensors: Sequence[Tensor]) -> None:
        for result, tensor in zip(self._alive(), tensors, strict=True):
            if result is not None and result.expected:
                result.tensor, result.left, result.expected = result.fitted(tensor), result.expected, 0

    def is_expected(self) -> bool:
        return any(result is not None and result.expected for result in self._alive())

    def rely_on_gift(self) -> None:
        """Let go of the function, and of what it would use, if all that is still asked for will be given."""
        if all(result is None or result.notes == result.expected for result in self._alive()):
            self.function = _never

    def _alive(self) -> list[_Result | None]:
        return [reference() for reference in self.results]


def _never() -> Sequence[Tensor]:
    raise RuntimeError("asked for again, although all who asked have been given it")


class _Result:
    """One recomputable tensor: how it lies in memory, how many have a note of it, and itself while it is in use."""

    def __init__(self, source: _Source, tensor: Tensor):
        self.source = source
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.tensor: Tensor | None = None
        self.notes = self.left = self.expected = 0

    def let_go(self) -> None:
        """One has had it, or will not ask."""
        self.left -= 1
        if self.left <= 0:
            self.tensor = None

    def fitted(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != self.dtype or tensor.size() != self.size:
            raise RuntimeError(
                f"recomputed {tensor.dtype} {tuple(tensor.size())} where the forward pass had {self.dtype} "
                f"{tuple(self.size)}"
            )
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)


class _Note(NamedTuple):
    """What is saved instead of a tensor: a view of a result."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        result = self.result
        if result.tensor is None:
            result.source.compute()
        tensor = result.tensor
        result.let_go()
        if self.size == result.size and self.stride == result.stride and not self.offset:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class Reference:
    """A tensor as it is."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor

    def expect(self) -> None:
        """Say, in backward, that the tensor will be asked for after the pass of the operation that made it."""


class _Reference(Reference):
    """A note for a function; taken back if the function goes without having used it, since nobody saved its results."""

    def __init__(self, note: _Note):
        self.note, self.used = note, False

    def __call__(self) -> Tensor:
        self.used = True
        return self.note.tensor()

    def expect(self) -> None:
        self.note.result.expected += 1

    def __del__(self) -> None:
        self.note.result.notes -= 1
        if not self.used:
            self.note.result.let_go()


class _Scope:
    def __init__(self, device_type: str):
        enabled = torch.is_autocast_enabled(device_type)
        self.autocast = (device_type, torch.get_autocast_dtype(device_type) if enabled else None)
        # By the address of the storage, which is nobody else's while the tensor in the second place lives.
        self.results: dict[int, tuple[_Result, Tensor]] = {}
        self.seen: list[Tensor] | None = None

    def find(self, tensor: Tensor) -> _Note | None:
        if not self.results or type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
            return None
        found = self.results.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0].dtype != tensor.dtype:
            return None
        result = found[0]
        result.notes += 1
        return _Note(result, tensor.size(), tensor.stride(), tensor.storage_offset() - result.offset)

    def pack(self, tensor: Tensor) -> Tensor | _Note:
        note = self.find(tensor)
        if note is not None:
            return note
        if self.seen is not None:
            self.seen.append(tensor)
        # Not with its history: an output that its own operation saves would keep itself, if backward never comes.
        return tensor if tensor.is_leaf else tensor.detach()


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tensor() if type(kept) is _Note else kept


@contextmanager
def recomputed(like: Tensor) -> Iterator[None]:
    """A scope, for tensors on the device of `like`; of no effect where nothing is to be recomputed (see above).

    Inside another one it is part of that.
    """
    if not _wanted(like):
        yield
        return
    before, scope = _current(), _Scope(like.device.type)
    _local.scope = scope
    try:
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _local.scope = before
        scope.results.clear()


def recomputing() -> bool:
    """Whether a scope is open in this thread."""
    return _current() is not None


def saving_less(like: Tensor) -> bool:
    """Whether a call outside or inside a scope may save less for backward than stock's, for tensors on this device."""
    return recomputing() or _wanted(like)


def graph_is_kept() -> bool:
    """In backward: whether there may be another through the same graph. What hangs on its nodes, other than saved
    tensors, stays until the whole graph goes."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class ByProduct:
    """The tensors of one call of `recomputable`, as what the backward pass of their operation can give."""

    def __init__(self) -> None:
        self.source: _Source | None = None

    def is_expected(self) -> bool:
        """Whether somebody waits for them, in this backward pass; asked once in it."""
        source = self.source
        if source is None or not source.is_expected():
            self._let_go()
            return False
        if not graph_is_kept():
            source.rely_on_gift()
        return True

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Hand them over, as `recomputable` would have them from its function."""
        if self.source is not None:
            self.source.give(tensors)
        self._let_go()

    def _let_go(self) -> None:
        """Of the function, which holds what was kept for it: as autograd lets go of saved tensors."""
        if not graph_is_kept():
            self.source = None


def is_ours_alone(tensor: Tensor) -> bool:
    """Of a tensor that was unpacked in a backward pass: whether nobody but the caller has it or its memory, so that it
    may be written over."""
    holders = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the call's own
    return holders == 1 and tensor._use_count() == 1 and type(tensor) is Tensor


def recomputable(
    tensors: Sequence[Tensor],
    function: Callable[[], Sequence[Tensor]],
    random_state: RandomState | None = None,
    by_product: ByProduct | None = None,
) -> None:
    """From here to the end of the scope, save notes of `tensors` instead of them; `function` gives all of them again.

    Args:
        tensors: each alone in its storage. One whose storage is recomputable already is left as it is.
        function: gives as many tensors, equal in shape, dtype and values. Must keep none of `tensors`.
        random_state: the state of the generators before the tensors were computed, if they depend on it.
        by_product: by which the operation's backward pass can give them.
    """
    scope = _current()
    if scope is None:
        return
    source = _Source(function, scope, random_state)
    if by_product is not None:
        by_product.source = source
    for tensor in tensors:
        result = _Result(source, tensor)
        source.results.append(weakref.ref(result))
        scope.results.setdefault(tensor.untyped_storage().data_ptr(), (result, tensor))


def reference_to(tensor: Tensor) -> Reference:
    """Gives the tensor, detached, in backward; without keeping it, if it is recomputable."""
    scope = _current()
    note = None if scope is None else scope.find(tensor)
    return Reference(tensor.detach()) if note is None else _Reference(note)


@contextmanager
def kept_tensors() -> Iterator[list[Tensor]]:
    """The tensors that are saved inside it, other than those that only leave a note."""
    scope = _current()
    seen: list[Tensor] = []
    if scope is None:
        yield seen
        return
    before, scope.seen = scope.seen, seen
    try:
        yield seen
    finally:
        scope.seen = before


class RandomState(NamedTuple):
    """The states of the generators of the CPU and of a device."""

    device: torch.device
    cpu: Tensor
    other: Tensor | None


def random_state_for(module: nn.Module, like: Tensor) -> RandomState | None:
    """The generators' states, if a scope is open and calling `module` would draw from them (dropout)."""
    if _current() is None or type(module) is nn.Linear or not any(map(_draws, module.modules())):
        return None
    device = like.device
    other = None if device.type == "cpu" else getattr(torch, device.type).get_rng_state(device)
    return RandomState(device, torch.get_rng_state(), other)


def _draws(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def _current() -> _Scope | None:
    return getattr(_local, "scope", None)


def _wanted(like: Tensor) -> bool:
    autograd = torch._C._autograd
    return (
        torch.is_grad_enabled()
        and like.device.type in DEVICES
        and not torch.compiler.is_compiling()
        and autograd._saved_tensors_hooks_is_enabled()
        and autograd._top_saved_tensors_default_hooks(True) is None
    )


def _autocast(setting: tuple[str, torch.dtype | None]) -> Any:
    """Autocast as in the forward pass: to this dtype, or not at all."""
    device_type, dtype = setting
    if dtype is None:
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
    # Without autocast's cache: weights that were cast here, without gradients, must not be met by a later forward.
    return torch.autocast(device_type, dtype, cache_enabled=False)


@contextmanager
def _random(state: RandomState | None) -> Iterator[None]:
    if state is None:
        yield
        return
    devices = [] if state.other is None else [state.device]
    with torch.random.fork_rng(devices, device_type=state.device.type if devices else "cuda"):
        torch.set_rng_state(state.cpu)
        if state.other is not None:
            getattr(torch, state.device.type).set_rng_state(state.other, state.device)
        yield
