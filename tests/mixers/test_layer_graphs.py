"""CUDA graphs of the blocks: when they are recorded and played, and that they compute what the blocks compute."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from cpu_graphs import Recorder
from tiny import tiny_model
from torch import Tensor, nn

from ssm_tune.kernels.devices import launches_are_recorded
from ssm_tune.mixers import layer_graphs, patch_model, recorded_blocks
from ssm_tune.mixers.layer_graphs import layer_graphs as graphs

LENGTH = 48


def documents(*lengths: int) -> Tensor:
    """seq_idx of one row (1, LENGTH) with these documents, then padding."""
    row = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([row + [-1] * (LENGTH - len(row))], dtype=torch.int32)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder().install(monkeypatch)


def model_of(kind: str, **dimensions: Any) -> nn.Module:
    torch.manual_seed(0)
    return patch_model(tiny_model(kind, **dimensions)).train()


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


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of every block is a piece, as where processes exchange gradients."""
    monkeypatch.setattr(layer_graphs, "starts_of_pieces", lambda blocks: list(range(len(blocks))))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("frozen", ["", "first blocks", "input", "a middle block", "last block"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_backward_in_pieces_is_backward_of_all(recorder: Recorder, kind: str, frozen: str) -> None:
    model = model_of(kind, num_hidden_layers=4)
    blocks = model.backbone.layers
    for module in {
        "": [],
        "first blocks": [model.backbone.embeddings, *blocks[:2]],
        "input": [model.backbone.embeddings],
        "a middle block": [blocks[1]],
        "last block": [blocks[3]],
    }[frozen]:
        module.requires_grad_(False)
    expected = [loss_and_gradients(model, documents(20, 28), seed=seed) for seed in range(3)]
    with graphs():
        found = [loss_and_gradients(model, documents(20, 28), seed=seed) for seed in range(3)]
    assert (recorder.recorded, recorder.played, recorder.graphs) == (1, 2, 3 if frozen == "first blocks" else 5)
    for one, truth in zip(found, expected, strict=True):
        assert_same(one, truth)


@pytest.mark.usefixtures("in_pieces")
def test_gradients_of_a_piece_are_there_before_the_next_is_played(recorder: Recorder) -> None:
    model = model_of("mamba2", num_hidden_layers=3)
    with graphs():
        loss_and_gradients(model, documents(48))
        seen: list[str] = []
        for number, block in enumerate(model.backbone.layers):
            block.mixer.out_proj.weight.register_post_accumulate_grad_hook(lambda _, n=number: seen.append(f"got {n}"))
        graph = layer_graphs.record(
            model.backbone.layers, torch.randn(1, LENGTH, 32, requires_grad=True), documents(48)
        )
        backward = graph.play_backward
        graph.play_backward = lambda piece: [seen.append(f"play {piece}"), backward(piece)][1]
        graph(torch.randn(1, LENGTH, 32), documents(48)).sum().backward()
    assert seen == ["play 2", "got 2", "play 1", "got 1", "play 0", "got 0"]


def test_backward_after_another_batch_is_an_error(recorder: Recorder) -> None:
    sample = torch.randn(1, LENGTH, 32, requires_grad=True)
    graph = layer_graphs.record(model_of("mamba2").backbone.layers, sample, documents(48))
    first, _ = (graph(sample, documents(48)).sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="another batch"):
        first.backward()


def test_with_nothing_trained_only_forward_is_recorded(recorder: Recorder) -> None:
    model = model_of("mamba2")
    model.backbone.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    expected = loss_and_gradients(model, documents(48))
    with graphs():
        for _ in range(3):
            found = loss_and_gradients(model, documents(48))
    assert recorder.graphs == 1
    assert_same(found, expected)


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


def test_kernels_know_that_their_launches_are_recorded(recorder: Recorder) -> None:
    """Forward and backward: while they are tried and recorded, not before, nor after (where the stand-in plays)."""
    model, known = model_of("mamba2"), []
    projection = model.backbone.layers[0].mixer.in_proj
    projection.register_forward_hook(lambda *_: known.append(launches_are_recorded()))
    projection.register_full_backward_hook(lambda *_: known.append(launches_are_recorded()))
    with graphs():
        for _ in range(2):
            loss_and_gradients(model, documents(48))
    assert known == [False] * 2 + [True] * 5 + [False] * 2


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
@pytest.mark.parametrize("pieces", [1, 3])
def test_on_a_gpu_graphs_compute_what_the_blocks_compute(
    kind: str, dtype: torch.dtype, pieces: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents and tokens change from batch to batch: what is played must follow them."""
    monkeypatch.setattr(layer_graphs, "starts_of_pieces", lambda blocks: list(range(pieces)))
    model = model_of(kind, num_hidden_layers=3).cuda()
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
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_on_a_gpu_pieces_compute_the_same_in_the_same_memory(kind: str) -> None:
    """The stream's sums, which backward gets from the last one on, go from piece to piece."""
    sizes = {"mamba": {}, "mamba2": {"num_heads": 32, "head_dim": 32}}[kind]
    blocks = model_of(kind, hidden_size=512, num_hidden_layers=6, **sizes).cuda().backbone.layers
    hidden_states, weight = torch.randn(2, 2, 1024, 512, device="cuda")
    borders = torch.arange(1024, device="cuda", dtype=torch.int32).div(400, rounding_mode="floor").expand(2, -1)
    found = []
    for starts in ([0], [0, 2, 3, 4]):
        recorded_blocks.let_workspaces_go()  # which recording does too
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.autocast("cuda", torch.bfloat16):
            graph = recorded_blocks.RecordedBlocks(blocks, starts, hidden_states.requires_grad_(), borders)
        torch.cuda.empty_cache()
        memory = torch.cuda.memory_reserved() - before
        output = graph(hidden_states, borders)
        inputs = [hidden_states, *blocks.parameters()]
        gradients = [g.clone() for g in torch.autograd.grad((output * weight).sum(), inputs)]
        found.append((memory, [output.detach().clone(), *gradients]))
        del graph, output
    (memory, one), (of_pieces, several) = found
    assert of_pieces < memory * 1.05 + 2**23
    for wanted, got in zip(one, several, strict=True):
        assert (wanted - got).norm() <= 1e-3 * wanted.norm()


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
