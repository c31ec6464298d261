"""Casts of weights on a stream beside: the same numbers, never read too early, of the weights that come next."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from ssm_tune.kernels import recompute
from ssm_tune.mixers import casts_ahead, layer_graphs, patch_model
from ssm_tune.mixers.backward_pieces import Pieces
from ssm_tune.mixers.casts_ahead import Use, cast

CPU = torch.device("cpu")
LOW = torch.bfloat16


class Second:
    """Casts nothing until the first stream waits for it."""

    def __init__(self) -> None:
        self.left: list[tuple[Tensor, Tensor]] = []

    def wait_stream(self, first: Slowest) -> None:
        """There is nothing to wait for."""

    def record_event(self) -> int:
        return len(self.left)


class Slowest:
    """The first stream, and how far the second is behind."""

    def __init__(self) -> None:
        self.recording, self.second = True, Second()
        self.launched: list[int] = []
        self.joined = 0

    def wait_event(self, number: int) -> None:
        for copy, weight in self.second.left[:number]:
            copy.copy_(weight)

    def wait_stream(self, second: Second) -> None:
        self.joined += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Slowest:
    slowest = Slowest()
    launch = casts_ahead._Ahead._launch

    def launch_later(ahead: Any, number: int) -> None:
        slowest.launched.append(number)
        slowest.second.left.append(None)  # the event is behind it
        launch(ahead, number)
        copy, weight = ahead._ready[number][0], ahead._known[ahead._uses[number].address]
        slowest.second.left[-1] = (copy.fill_(float("nan")), weight)

    monkeypatch.setattr(casts_ahead, "ON", True)
    monkeypatch.setattr(casts_ahead, "SMALLEST", 1)
    monkeypatch.setattr(casts_ahead._Ahead, "_launch", launch_later)
    monkeypatch.setattr(casts_ahead, "recorded_stream", lambda device: slowest if slowest.recording else None)
    monkeypatch.setattr(casts_ahead, "_cast_stream", lambda device: slowest.second)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return slowest


def learnt(streams: Slowest, order: list[Tensor]) -> list[Use]:
    uses: list[Use] = []
    streams.recording = False
    for _ in range(2):
        with casts_ahead.casts_ahead(uses, order, CPU):
            assert all(torch.equal(cast(weight, LOW), weight.to(LOW)) for weight in order)
    streams.recording = True
    return uses


def test_the_next_are_cast_while_one_is_used(streams: Slowest) -> None:
    weights = [torch.randn(2, 3) for _ in range(5)]
    uses = learnt(streams, weights)
    assert uses == [Use(weight.data_ptr(), LOW) for weight in weights]
    with casts_ahead.casts_ahead(uses, weights, CPU):
        for number, weight in enumerate(weights):
            assert torch.equal(cast(weight, LOW), weight.to(LOW))
            assert streams.launched == list(range(1, min(number + 3, 5)))
    assert streams.joined == 1


def test_what_was_not_expected_is_cast_at_once(streams: Slowest, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(2, 3) for _ in range(3)]
    uses = learnt(streams, weights)
    with casts_ahead.casts_ahead(uses, weights, CPU):
        assert torch.equal(cast(weights[2], LOW), weights[2].to(LOW))
        assert torch.equal(cast(weights[0], torch.float16), weights[0].to(torch.float16))
        assert streams.launched == []
        monkeypatch.setattr(casts_ahead, "recorded_stream", lambda device: None)  # another thread's
        assert torch.equal(cast(weights[0], LOW), weights[0].to(LOW))
    assert streams.launched == [] and streams.joined == 0


@pytest.mark.parametrize("change", [{"ON": False}, {"SMALLEST": 7}])
def test_off_or_small_nothing_is_cast_ahead(
    streams: Slowest, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(casts_ahead, name, value)
    weights = [torch.randn(2, 3) for _ in range(3)]
    uses = learnt(streams, weights)
    with casts_ahead.casts_ahead(uses, weights, CPU):
        assert all(torch.equal(cast(weight, LOW), weight.to(LOW)) for weight in weights)
    assert uses == [] and streams.launched == []


@pytest.mark.parametrize("starts", [[0], [0, 1, 2]], ids=["whole", "in pieces"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_blocks_compute_the_same(
    kind: str, starts: list[int], streams: Slowest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    blocks = patch_model(tiny_model(kind, num_hidden_layers=3)).train().backbone.layers
    hidden_states, slope = torch.randn(2, 2, 20, 32)
    pieces = Pieces(blocks, starts, trained_input=True)

    def compute() -> list[Tensor | None]:
        with torch.autocast("cpu", LOW, cache_enabled=False):
            found = [pieces.forward(hidden_states, None)]
            gradients: list[Tensor | None] = [slope.to(found[0].dtype)]
            for piece in reversed(range(len(starts))):
                some, gradients = pieces.backward(piece, gradients)
                found += [*some, *gradients]
        return found

    streams.recording = False
    wanted = compute()
    assert streams.launched == []
    streams.recording = True
    got = compute()
    casts = 3 * (2 if kind == "mamba2" else 4)  # of which the first of each piece has nobody to announce it
    assert len(streams.launched) == 2 * (casts - len(starts))
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_on_a_gpu_the_same_to_the_bit_while_weights_change(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts_ahead, "SMALLEST", 1)
    ids = torch.randint(3, 60, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for on in (False, True, True):
        monkeypatch.setattr(casts_ahead, "ON", on)
        torch.manual_seed(0)
        sizes = {"num_heads": 32, "head_dim": 32} if kind == "mamba2" else {}
        model: nn.Module = patch_model(tiny_model(kind, num_hidden_layers=8, hidden_size=512, **sizes)).train().cuda()
        trained = list(model.backbone.layers.parameters())
        with layer_graphs.layer_graphs(), torch.autocast("cuda", LOW):
            for _ in range(8):
                model.zero_grad(set_to_none=True)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                with torch.no_grad():
                    for parameter in trained:
                        parameter.sub_(0.01 * parameter.grad.sign())
            assert layer_graphs._graphs[model.backbone].replay is not None
        found.append([loss.detach(), *(parameter.detach() for parameter in trained)])
        del model, trained
    for got in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], got, strict=True))
