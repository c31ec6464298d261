"""CUDA graphs of the blocks: when they are recorded and played, and that they compute what the blocks compute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from ssm_tune.mixers import layer_graphs, patch_model
from ssm_tune.mixers.layer_graphs import layer_graphs as graphs

LENGTH = 48


def documents(*lengths: int) -> Tensor:
    """seq_idx of one row (1, LENGTH) with these documents, then padding."""
    row = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([row + [-1] * (LENGTH - len(row))], dtype=torch.int32)


class Recorder:
    """In the place of CUDA graphs: counts what is recorded and played, and computes it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.recorded, self.played = failure, 0, 0

    def __call__(self, blocks: nn.Module, hidden_states: Tensor, seq_idx: Tensor | None) -> Callable[..., Tensor]:
        self.recorded += 1
        if self.failure is not None:
            raise self.failure

        def play(*given: Tensor) -> Tensor:
            self.played += 1
            return blocks(*given)

        return play


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(layer_graphs, "record", found)
    monkeypatch.setattr(layer_graphs, "can_be_recorded", lambda device: True)
    return found


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return patch_model(tiny_model(kind)).train()


def loss_and_gradients(model: nn.Module, seq_idx: Tensor | None, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (1, length), generator=generator).to(model.device)
    borders = {} if seq_idx is None else {"seq_idx": seq_idx.to(model.device)}
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, **borders).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert (found[name] - truth).norm() <= tolerance * truth.norm(), name


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_recorded_at_the_second_batch_of_a_shape_and_played_from_then_on(recorder: Recorder, kind: str) -> None:
    model = model_of(kind)
    batches = [(documents(20, 28), 0), (documents(7, 30), 1), (documents(48), 2)]
    expected = [loss_and_gradients(model, seq_idx, seed=seed) for seq_idx, seed in batches]
    with graphs():
        for (seq_idx, seed), truth in zip(batches, expected, strict=True):
            assert_same(loss_and_gradients(model, seq_idx, seed=seed), truth, 1e-5)
    assert (recorder.recorded, recorder.played) == (1, 2)
    loss_and_gradients(model, batches[0][0])
    assert recorder.played == 2


def test_other_batches_go_the_usual_way(recorder: Recorder) -> None:
    model = model_of("mamba2")
    with graphs():
        for _ in range(2):
            loss_and_gradients(model, documents(48))
        assert recorder.played == 1
        loss_and_gradients(model, None)
        loss_and_gradients(model, documents(48)[:, :20], length=20)
        with torch.no_grad():
            model(input_ids=torch.ones(1, LENGTH, dtype=torch.long), seq_idx=documents(48))
        model.eval()
        model(input_ids=torch.ones(1, LENGTH, dtype=torch.long), seq_idx=documents(48))
        model.train().backbone.layers[0].mixer.out_proj.weight.requires_grad_(False)
        loss_and_gradients(model, documents(48))
    assert (recorder.recorded, recorder.played) == (1, 1)


def test_off_nothing_is_recorded(recorder: Recorder) -> None:
    model = model_of("mamba2")
    for _ in range(3):
        loss_and_gradients(model, documents(48))
    with graphs(False):
        for _ in range(3):
            loss_and_gradients(model, documents(48))
    assert recorder.recorded == 0


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_what_cannot_be_recorded_is_said_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    recorder.failure = kind("operation not permitted when stream is capturing")
    model = model_of("mamba2")
    with graphs():
        for _ in range(4):
            loss_and_gradients(model, documents(48))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert recorder.recorded == 1
    assert len([line for line in said if "operation not permitted" in line]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
def test_on_a_gpu_graphs_compute_what_the_blocks_compute(
    kind: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents and tokens change from batch to batch: what is played must follow them."""
    model = model_of(kind).cuda()
    batches = [(documents(20, 28), 0), (documents(7, 30), 1), (documents(48), 2), (documents(10, 10, 10), 3)]
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = [loss_and_gradients(model, seq_idx, seed=seed) for seq_idx, seed in batches]
        with graphs():
            found = [loss_and_gradients(model, seq_idx, seed=seed) for seq_idx, seed in batches]
            assert layer_graphs._graphs[model.backbone].replay is not None, caplog.text
    for one, truth in zip(found, expected, strict=True):
        assert_same(one, truth, 1e-2 if dtype == torch.float32 else 5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_on_a_gpu_gradients_of_several_batches_add_up(kind: str) -> None:
    """Playing a graph writes over the memory in which it left the gradients of the batch before."""
    model = model_of(kind).cuda()
    batches = [(documents(20, 28), 0), (documents(7, 30), 1), (documents(48), 2)]

    def accumulate() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for borders, seed in batches:
            ids = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(seed)).cuda()
            model(input_ids=ids, labels=ids, seq_idx=borders.cuda()).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = accumulate()
    with graphs():
        for _ in range(3):
            found = accumulate()
        assert layer_graphs._graphs[model.backbone].replay is not None
    assert_same(found, expected, 1e-2)


@pytest.mark.gpu
def test_on_a_gpu_a_loader_that_pins_memory_does_not_break_a_recording_off(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("mamba2").cuda()
    done = threading.Event()

    def pin() -> None:
        kept = []
        while not done.is_set():
            kept.append(torch.empty(2**14 + len(kept) * 2**12, pin_memory=True))

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        with graphs():
            for seed in range(3):
                loss_and_gradients(model, documents(20, 28), seed=seed)
            assert layer_graphs._graphs[model.backbone].replay is not None, caplog.text
    finally:
        done.set()
        thread.join()
