"""Gradients of weights on a second stream: the same to the bit, never read too early, held no longer than needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import Tensor, nn

from ssm_tune.adapter import guard_lifted
from ssm_tune.kernels import recompute, side_stream
from ssm_tune.kernels.side_stream import aside, beside
from ssm_tune.lora_layers import cast_adapters_only
from ssm_tune.mixers import layer_graphs, patch_model
from ssm_tune.mixers.backward_pieces import Pieces
from ssm_tune.mixers.recorded_blocks import RecordedBlocks

TARGETS = ["in_proj", "x_proj", "dt_proj", "out_proj"]
CPU = torch.device("cpu")


class Slowest:
    """A pair of streams, the second of which computes nothing until the first waits for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.left: list[Callable[[], Any]] = []
        self.launched = self.parted = 0
        self.main, self.side = _Main(self), _Side(self)

    def put_off(self, compute: Callable[[Tensor | None], Tensor], into: Tensor) -> Tensor:
        self.left.append(lambda: into.copy_(compute(None)))
        self.launched += 1
        return into.fill_(float("nan"))

    def catch_up(self, number: int) -> None:
        for compute in self.left[:number]:
            compute()
        self.left[:number] = [lambda: None] * number


class _Main:
    def __init__(self, streams: Slowest) -> None:
        self.streams = streams

    def wait_event(self, number: int) -> None:
        self.streams.log.append(f"wait for {number}")
        self.streams.catch_up(number)

    def wait_stream(self, side: _Side) -> None:
        self.streams.log.append("wait for all")
        self.streams.catch_up(len(self.streams.left))


class _Side:
    def __init__(self, streams: Slowest) -> None:
        self.streams = streams

    def wait_stream(self, main: _Main) -> None:
        self.streams.parted += 1

    def record_event(self) -> int:
        return len(self.streams.left)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowest]:
    slowest = Slowest()
    launch = side_stream._Branch.launch

    def launch_later(branch: Any, jobs: Any) -> None:
        launch(branch, [(weight, partial(slowest.put_off, compute)) for weight, compute in jobs])

    monkeypatch.setattr(side_stream, "ON", True)
    monkeypatch.setattr(side_stream._Branch, "launch", launch_later)
    monkeypatch.setattr(side_stream, "recorded_stream", lambda device: slowest.main)
    monkeypatch.setattr(side_stream, "_side_stream", lambda device: slowest.side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    yield slowest
    assert side_stream._branch is None


def product(a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
    return torch.mm(a, b, out=into)


def test_outside_a_recording_all_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, a = nn.Parameter(torch.ones(2, 2)), torch.randn(2, 2)
    monkeypatch.setattr(side_stream, "ON", True)
    with beside([weight], CPU) as left:
        (gradient,) = aside((weight, partial(product, a, a)))
    assert torch.equal(gradient, a @ a) and left == {}


def test_off_all_is_computed_at_once(streams: Slowest, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, a = nn.Parameter(torch.ones(2, 2)), torch.randn(2, 2)
    monkeypatch.setattr(side_stream, "ON", False)
    with beside([weight], CPU) as left:
        (gradient,) = aside((weight, partial(product, a, a)))
    assert torch.equal(gradient, a @ a) and left == {} and streams.parted == 0


@pytest.mark.parametrize(("held", "waits", "left_over"), [(1, [1, 2, 3, 4, 5], 1), (2, [2, 4], 2), (4, [3], 3)])
def test_what_is_read_is_held_until_the_first_stream_has_waited(
    streams: Slowest, held: int, waits: list[int], left_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_stream, "HELD", held)
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(6)]
    read: list[Any] = []
    wanted = []
    with beside(weights, CPU) as left:
        for weight in weights:
            a = torch.randn(2, 2)
            wanted.append(a @ a)
            read.append(weakref.ref(a))
            assert aside((weight, partial(product, a, a))) == [None]
            del a
            done = max([int(line.split()[-1]) for line in streams.log], default=0)
            assert [reference() is not None for reference in read] == [False] * done + [True] * (len(read) - done)
    assert streams.log == [*(f"wait for {n}" for n in waits), "wait for all"]
    assert 6 - waits[-1] == left_over
    gc.collect()
    assert not any(reference() is not None for reference in read)
    assert all(torch.equal(left[weight], gradient) for weight, gradient in zip(weights, wanted, strict=True))


def test_two_gradients_of_one_weight_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Slowest()
    monkeypatch.setattr(side_stream, "recorded_stream", lambda device: streams.main)
    weight, a = nn.Parameter(torch.ones(2, 2)), torch.randn(2, 2)
    branch = side_stream._Branch([weight], streams.main, streams.side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for factor in (a, 2 * a):
        branch.launch([(weight, partial(product, a, factor))])
    branch.join()
    assert torch.equal(branch.gradients[weight], a @ a + a @ (2 * a))


def test_other_weights_and_larger_ones_do_not_go_aside(streams: Slowest, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, other, a = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2)), torch.randn(2, 2)
    with beside([weight], CPU) as left:
        assert aside((other, partial(product, a, a)))[0] is not None
        monkeypatch.setattr(side_stream, "LARGEST", 15)
        assert aside((weight, partial(product, a, a)))[0] is not None
    assert left == {} and streams.parted == 0


def test_another_stream_goes_its_own_way(streams: Slowest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's backward pass."""
    weight, a = nn.Parameter(torch.ones(2, 2)), torch.randn(2, 2)
    with beside([weight], CPU) as left:
        monkeypatch.setattr(side_stream, "recorded_stream", lambda device: None)
        assert aside((weight, partial(product, a, a)))[0] is not None
    assert left == {}


def test_after_an_error_the_streams_are_one_again(streams: Slowest) -> None:
    weight = nn.Parameter(torch.ones(2, 2))

    def fail(into: Tensor | None) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), beside([weight], CPU):
        aside((weight, partial(product, torch.ones(2, 2), torch.ones(2, 2))))
        streams.put_off = lambda compute, into: compute(into)  # type: ignore[method-assign]
        aside((weight, fail))
    assert streams.log == ["wait for all"]


# -- whole models --------------------------------------------------------------------------------------------------


def make_model(kind: str, method: str, **dimensions: Any) -> nn.Module:
    torch.manual_seed(0)
    model = patch_model(tiny_model(kind, **dimensions)).train()
    if method == "full":
        return model
    with guard_lifted():
        adapted = get_peft_model(model.bfloat16(), LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    cast_adapters_only(adapted)
    return model


@pytest.mark.parametrize("starts", [[0], [0, 1, 2]], ids=["whole", "in pieces"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_nobody_reads_a_gradient_before_it_is_there(
    kind: str, method: str, starts: list[int], streams: Slowest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor writes over what it is computed from: the second stream computes at the last moment."""
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    blocks = make_model(kind, method, num_hidden_layers=3).backbone.layers
    hidden_states, slope = torch.randn(2, 2, 20, 32)
    found = []
    for on in (False, True):
        monkeypatch.setattr(side_stream, "ON", on)
        pieces = Pieces(blocks, starts, trained_input=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            output = pieces.forward(hidden_states, None)
            gradients: list[Tensor | None] = [slope.to(output.dtype)]
            by_parameters = []
            for piece in reversed(range(len(starts))):
                some, gradients = pieces.backward(piece, gradients)
                by_parameters += some
        found.append([*by_parameters, *gradients])
    assert streams.launched >= 3 * (2 if kind == "mamba2" else 4)
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted, got)
        assert wanted.any()


# -- on a GPU ------------------------------------------------------------------------------------------------------

STEPS = 10
SIZES = {
    "mamba": {"hidden_size": 512},
    "falcon_mamba": {"hidden_size": 256},
    "mamba2": {"hidden_size": 512, "num_heads": 32, "head_dim": 32},
}


def train(model: nn.Module, on: bool, length: int, patch: pytest.MonkeyPatch) -> tuple[list[dict[str, Tensor]], int]:
    """Losses and gradients of blocks, of steps with the same two micro-batches, by graphs; bytes that were reserved."""
    patch.setattr(side_stream, "ON", on)
    ids = torch.randint(3, 60, (2, 2, length), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    gc.collect()  # of the models before
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with layer_graphs.layer_graphs(), torch.autocast("cuda", torch.bfloat16):
        for step in range(STEPS + 1):
            model.zero_grad(set_to_none=True)
            losses = []
            for batch in ids:
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                losses.append(loss.detach().clone())
            if step:  # in the first, the blocks are recorded
                blocks = model.backbone.layers.named_parameters()
                gradients = {name: p.grad.clone() for name, p in blocks if p.grad is not None}
                found.append({"losses": torch.stack(losses)} | gradients)
        assert layer_graphs._graphs[model.backbone].replay is not None
        torch.cuda.empty_cache()
        memory = torch.cuda.memory_reserved() - before
    return found, memory


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 1000])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_on_a_gpu_the_same_to_the_bit_each_time(
    kind: str, method: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(kind, method, num_hidden_layers=12, **SIZES[kind]).cuda()
    (wanted, *others), memory = train(model, False, length, monkeypatch)
    assert all(torch.equal(truth, other[name]) for other in others for name, truth in wanted.items()), "without, too"
    found, more = train(model, True, length, monkeypatch)
    for number, got in enumerate(found):
        assert got.keys() == wanted.keys()
        assert [name for name, truth in wanted.items() if not torch.equal(truth, got[name])] == [], number
    # Of tensors that are held some, and cuBLAS's workspaces for two more streams, once.
    assert more < memory * 1.1 + 200 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [[0], [0, 2, 3, 6]], ids=["whole", "in pieces"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_on_a_gpu_pieces_are_played_alike(kind: str, starts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_model(kind, "full", num_hidden_layers=8, **SIZES[kind]).cuda().backbone.layers
    hidden_states, slope = torch.randn(2, 2, 512, 512, device="cuda")
    found = []
    for on in (False, True, True):
        monkeypatch.setattr(side_stream, "ON", on)
        with torch.autocast("cuda", torch.bfloat16):
            graph = RecordedBlocks(blocks, starts, hidden_states.requires_grad_(), None)
        for _ in range(3):
            output = graph(hidden_states)
            inputs = [hidden_states, *blocks.parameters()]
            found.append([g.clone() for g in torch.autograd.grad((output * slope).sum(), inputs)])
        del graph, output
    assert all(torch.equal(wanted, got) for one in found[1:] for wanted, got in zip(found[0], one, strict=True))
