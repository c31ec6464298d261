"""Gradients of the halves of a projection: without a copy where the kernels write side by side, right in any case.

The CUDA scan is compiled for a CPU; causal_conv1d is a stand-in that writes where it is told.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import stand_ins
import torch
from comparison import draw
from cuda_on_cpu import Compiler
from tiny import tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ssm_tune import kernels
from ssm_tune.kernels import causal_conv1d_cuda, cuda_scan, gradient_halves, recompute, reference
from ssm_tune.kernels.gradient_halves import gradient_of, split_in_two
from ssm_tune.mixers import patch_model

BATCH, LENGTH, DIM, STATES = 2, 20, 16, 4
KINDS = ("mamba", "falcon_mamba")
Operation = Callable[..., Tensor]


class Copies(TorchDispatchMode):
    """Counts the concatenations to the width of the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += function is torch.ops.aten.cat.default and result.shape[-1] == 2 * DIM
        return result


class Asking(torch.autograd.Function):
    """sin, whose backward writes where it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient_of(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(dy, x.cos(), out=ctx.gradient(x))


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_halves, "DEVICES", ("cpu",))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return Compiler(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def operations(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> tuple[Operation, Operation]:
    """The convolution and the scan."""
    for kind in KINDS:  # imported before the stand-ins are there, which stock would be bound to from then on
        MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(kind))]
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda_scan, "compiled", compiler)
    return causal_conv1d_cuda.causal_conv1d, cuda_scan.selective_scan


@functools.cache
def parameters(device: torch.device) -> list[Tensor]:
    """Of the convolution (weight, bias), of the selection, and of the scan (A, D and the bias of dt)."""
    torch.manual_seed(1)
    A = -draw(DIM, STATES).exp()
    drawn = (draw(DIM, 4), draw(DIM), draw(DIM, DIM + 2 * STATES), A, draw(DIM), draw(DIM))
    return [tensor.float().to(device) for tensor in drawn]


def mixer(projected: Tensor, split: Operation, convolve: Operation, scan: Operation, seq_idx: Tensor | None) -> Tensor:
    """What Mamba-1's mixer does between its projections; two layers between convolution and scan are modules there."""
    weight, bias, select, A, D, dt_bias = parameters(projected.device)
    x, z = split(projected)
    with recompute.recomputed(x):
        y = convolve(x, weight, bias, seq_idx=seq_idx)
        given = recompute.reference_to(x)
        recompute.recomputable([y], lambda: [convolve(given(), weight, bias, seq_idx=seq_idx)])
        dt, B, C = (y @ select).split([DIM, STATES, STATES], dim=-1)
        return scan(y, dt, A, B, C, D, z, dt_bias, seq_idx=seq_idx)


def in_chunks(projected: Tensor) -> tuple[Tensor, Tensor]:
    return projected.chunk(2, dim=-1)


def leaf() -> Tensor:
    torch.manual_seed(0)
    return draw(BATCH, LENGTH, 2 * DIM).float().requires_grad_()


def gradient(run: Callable[[Tensor], Tensor], times: int = 1) -> tuple[Tensor, int]:
    """Of the sum of squares by what is projected, of the last of so many backward passes; concatenations in all."""
    projection = leaf()
    loss = run(projection * 1).square().sum()
    with Copies() as copies:
        for i in range(times):
            (found,) = torch.autograd.grad(loss, projection, retain_graph=i + 1 < times)
    return found, copies.count


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recomputing", [False, True])
def test_a_mixer_copies_nothing(
    operations: tuple[Operation, Operation], monkeypatch: pytest.MonkeyPatch, documents: bool, recomputing: bool
) -> None:
    if recomputing:
        monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    seq_idx = torch.tensor([[0] * 7 + [1] * 10 + [-1] * 3, [0] * 20], dtype=torch.int32) if documents else None
    plain, copied = gradient(lambda t: mixer(t, in_chunks, *operations, seq_idx))
    for times in (1, 3):
        found, count = gradient(lambda t: mixer(t, split_in_two, *operations, seq_idx), times)
        assert torch.equal(found, plain)
        assert (count, copied) == (0, 1)


class Reentrant(torch.autograd.Function):
    """A mixer, checkpointed by a backward pass inside the backward pass."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, *operations: Operation) -> Tensor:
        ctx.save_for_backward(projected)
        ctx.operations = operations
        return mixer(projected, split_in_two, *operations, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = mixer(given, split_in_two, *ctx.operations, None)
        return *torch.autograd.grad(y, given, dy), None, None


def checkpointed(projected: Tensor, *operations: Operation) -> Tensor:
    return checkpoint(mixer, projected, split_in_two, *operations, None, use_reentrant=False)


@pytest.mark.parametrize("run", [checkpointed, Reentrant.apply])
def test_checkpointing_copies_nothing(operations: tuple[Operation, Operation], run: Operation) -> None:
    plain, _ = gradient(lambda t: mixer(t, in_chunks, *operations, None))
    found, copied = gradient(lambda t: run(t, *operations))
    assert torch.equal(found, plain)
    assert copied == 0


@pytest.mark.parametrize("ours", [0, 1])
def test_one_that_does_not_ask_is_copied(operations: tuple[Operation, Operation], ours: int) -> None:
    """And the other then makes no tensor for both."""
    theirs = (reference.causal_conv1d, reference.selective_scan)
    mixed = tuple(own if i == ours else other for i, (own, other) in enumerate(zip(operations, theirs, strict=True)))
    plain, _ = gradient(lambda t: mixer(t, in_chunks, *mixed, None))
    found, copied = gradient(lambda t: mixer(t, split_in_two, *mixed, None))
    assert torch.equal(found, plain)
    assert copied == 1
    x, z = split_in_two(leaf() * 1)
    assert gradient_of((x, z)[ours])(x).is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_the_mixers_of_a_model_copy_nothing(
    operations: tuple[Operation, Operation], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "causal_conv1d", operations[0])
    monkeypatch.setattr(kernels, "selective_scan", operations[1])
    model = patch_model(tiny_model(kind, hidden_size=DIM // 2, intermediate_size=DIM, state_size=STATES)).train()
    tokens = torch.arange(LENGTH).expand(BATCH, -1)
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(gradient_halves, "DEVICES", devices)
        with Copies() as copies:
            loss = model(tokens).logits.square().mean()
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        assert copies.count == (0 if devices else model.config.num_hidden_layers)
    for chunked, halved in zip(*found, strict=True):
        assert torch.equal(chunked, halved)


def ask(x: Tensor) -> Tensor:
    return Asking.apply(x)


# How the halves are used, and how often the gradients are copied.
USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "the first half first": (lambda x, z: ask(z) + 2 * ask(x), 0),
    "the second half first": (lambda x, z: 2 * ask(x) + ask(z), 0),
    "the first half twice": (lambda x, z: ask(x) * ask(z) + ask(x), 1),
    "the second half twice": (lambda x, z: ask(x) * ask(z) + ask(z), 1),
    "both twice": (lambda x, z: ask(x) * ask(z) + 3 * ask(z) * ask(x), 1),
    "also by others": (lambda x, z: ask(x) * ask(z) + x.exp(), 1),
    "one half only": (lambda x, z: ask(x) + 0 * ask(z).detach(), 1),
    "views of them": (lambda x, z: ask(x[:, 3:]) * ask(z)[:, 3:], 1),
    "one kept, not used": (lambda x, z: ask(z) + ask(x).detach(), 1),
    "exchanged": (lambda x, z: ask(z).flip(0) * ask(x), 0),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("times", [1, 2])
def test_any_use_of_the_halves_is_right(use: str, times: int) -> None:
    function, expected = USES[use]
    plain, _ = gradient(lambda t: function(*in_chunks(t)))
    found, copied = gradient(lambda t: function(*split_in_two(t)), times)
    assert torch.equal(found, plain)
    assert copied == expected * times


@pytest.mark.parametrize("first", [0, 1])
def test_backward_passes_of_parts_of_the_graph(first: int) -> None:
    """By one half, then by the other, then by both: what was given out stays as it is, and nothing waits for ever."""
    projection = leaf()
    projected = projection * 1
    halves = split_in_two(projected)
    outputs = [ask(half) for half in halves]
    loss = sum((output * output).sum() for output in outputs)
    expected = torch.autograd.grad(sum((h.sin() ** 2).sum() for h in in_chunks(projected)), projected)[0].chunk(2, -1)
    found = [torch.autograd.grad(loss, halves[i], retain_graph=True)[0] for i in (first, 1 - first)]
    (both,) = torch.autograd.grad(loss, projection)
    for i, value in zip((first, 1 - first), found, strict=True):
        torch.testing.assert_close(value, expected[i])
        torch.testing.assert_close(both.chunk(2, dim=-1)[i], expected[i])
    assert not halves[0].grad_fn.halves.waiting


def test_hooks_that_change_a_gradient_are_heeded() -> None:
    def run(projected: Tensor, split: Operation, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        x, z = split(projected)
        z.register_hook(hook)
        return ask(x) * ask(z)

    for hook, expected in ((lambda g: g * 3, 1), (lambda g: g.mul_(3), 0)):
        plain, _ = gradient(lambda t, h=hook: run(t, in_chunks, h))
        found, copied = gradient(lambda t, h=hook: run(t, split_in_two, h))
        assert torch.equal(found, plain)
        assert copied == expected


def test_a_half_that_nobody_took_is_dropped() -> None:
    x, z = split_in_two(leaf() * 1)
    ask(x)
    ask(z).sum().backward()
    assert not x.grad_fn.halves.waiting


@pytest.mark.parametrize("function", [lambda x, z: x.sin() * z, lambda x, z: torch.cat([x, z], dim=-1).sin()])
def test_gradients_of_gradients(function: Operation) -> None:
    """The second function's first gradients lie side by side."""
    projection = leaf()
    found = []
    for split in (in_chunks, split_in_two):
        (once,) = torch.autograd.grad(function(*split(projection * 1)).sum(), projection, create_graph=True)
        found.append(torch.autograd.grad(once.square().sum(), projection)[0])
    assert torch.equal(*found)


def test_a_view_is_not_taken_for_a_half() -> None:
    x, z = split_in_two(leaf() * 1)
    for tensor in (x, z):
        gradient_of(tensor)
    for other in (x[:, 1:], z.clone(), z.detach()):
        assert gradient_of(other)(other).is_contiguous()
    assert gradient_of(z)(z).stride() == x.stride()


def test_halves_that_lie_otherwise_are_copied() -> None:
    """Of two memories, or of one, but exchanged, overlapping, every second token, or in another order."""
    memory = torch.randn(2, 6, 4 * DIM)
    left, right = memory[..., :DIM], memory[..., DIM : 2 * DIM]
    whole = torch.randn(2, 6, 2 * DIM)
    first, second = whole.chunk(2, dim=-1)
    side_by_side = gradient_halves._side_by_side
    assert side_by_side(first, second).data_ptr() == whole.data_ptr()
    assert torch.equal(side_by_side(first, second), whole)
    turned = whole.as_strided(second.shape, (2 * DIM, 4 * DIM, 1), DIM)
    others = ((left, right), (second, first), (first, first), (first, right), (first[:, ::2], second[:, ::2]))
    for pair in (*others, (first, turned), (first, whole.clone()[..., DIM:])):
        assert side_by_side(*pair) is None


def test_without_gradients_it_is_a_chunk() -> None:
    projected = leaf() * 1
    with torch.no_grad():
        for half, expected in zip(split_in_two(projected), in_chunks(projected), strict=True):
            assert half.grad_fn is None
            assert torch.equal(half, expected)
            assert half.data_ptr() == expected.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("convolution", ["cuda_conv", "triton_conv", "causal_conv1d_cuda"])
def test_a_mixer_on_a_gpu_copies_nothing(monkeypatch: pytest.MonkeyPatch, convolution: str) -> None:
    """Also in a CUDA graph, with other numbers than it was captured with."""
    monkeypatch.setattr(gradient_halves, "DEVICES", ("cuda",))
    if convolution == "causal_conv1d_cuda":
        pytest.importorskip("causal_conv1d")
    operations = (importlib.import_module(f"ssm_tune.kernels.{convolution}").causal_conv1d, cuda_scan.selective_scan)
    seq_idx = torch.tensor([[0] * 7 + [1] * 13, [0] * 20], dtype=torch.int32, device="cuda")
    projection = leaf().detach().cuda().requires_grad_()

    def run(split: Operation) -> Tensor:
        loss = mixer(projection * 1, split, *operations, seq_idx).square().sum()
        return torch.autograd.grad(loss, projection)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with Copies() as before:
            plain = run(in_chunks)
        with Copies() as after:
            assert torch.equal(run(split_in_two), plain)
    assert before.count > after.count == 0
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(split_in_two)
    with torch.no_grad():
        projection.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, run(in_chunks))
