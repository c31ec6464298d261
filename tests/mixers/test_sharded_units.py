"""Sharded blocks by graphs, in a group of one process: weights are gathered and gradients reduced as by FSDP2 alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_graphs import Recorder
from tiny import tiny_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ssm_tune.mixers import layer_graphs, patch_model
from ssm_tune.mixers.layer_graphs import layer_graphs as graphs
from ssm_tune.mixers.sharded_units import gather_in_place, units_of

LENGTH = 48


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def sharded(kind: str, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Five blocks, in units of two and three; what belongs to the recurrence is whole."""
    torch.manual_seed(0)
    model = patch_model(tiny_model(kind, num_hidden_layers=5)).train().to(device)
    whole = {p for name, p in model.named_parameters() if name.endswith(("A_log", ".D", "dt_bias", "dt_proj.bias"))}
    common: dict[str, Any] = {"mesh": init_device_mesh(device, (1,)), "ignored_params": whole}
    blocks = list(model.backbone.layers)
    for unit in (blocks[:2], blocks[2:]):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(unit, **common, mp_policy=policy)
    fully_shard(model, **common)
    return model


def loss_and_gradients(model: nn.Module, lengths: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    device = model.device
    ids = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(seed)).to(device)
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    borders = torch.tensor([numbers + [-1] * (LENGTH - len(numbers))], dtype=torch.int32, device=device)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, seq_idx=borders).loss
    loss.backward()
    gradients = {name: getattr(p.grad, "to_local", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | {name: gradient.clone() for name, gradient in gradients.items()}


def check(kind: str, device: str, dtype: torch.dtype | None, tolerance: float) -> None:
    batches = [((20, 28), 0), ((7, 30), 1), ((48,), 2), ((10, 10, 10), 3)]
    with alone(device), torch.autocast(device, torch.bfloat16, enabled=dtype is not None):
        model = sharded(kind, device, dtype)
        expected = [loss_and_gradients(model, *batch) for batch in batches]
        with graphs():
            found = [loss_and_gradients(model, *batch) for batch in batches]
            assert layer_graphs._graphs[model.backbone].replay is not None
    for one, true in zip(found, expected, strict=True):
        for name, truth in true.items():
            assert (one[name] - truth).norm() <= tolerance * truth.norm(), name


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_what_is_played_computes_what_the_blocks_compute(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder().install(monkeypatch)
    check(kind, "cpu", None, 1e-6)
    assert recorder.played == 3
    assert recorder.graphs == 1 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_gpu_what_is_played_computes_what_the_blocks_compute(kind: str, dtype: torch.dtype | None) -> None:
    check(kind, "cuda", dtype, 1e-2 if dtype is None else 5e-2)


def test_weights_are_gathered_into_the_same_memory() -> None:
    with alone("cpu"):
        model = sharded("mamba", "cpu")
        units = units_of(model.backbone.layers)
        assert [len(unit) for unit in units] == [2, 3]
        assert units_of(patch_model(tiny_model("mamba")).backbone.layers) == []
        loss_and_gradients(model, (48,), 0)
        gathered = gather_in_place(units)
        places = {id(parameter): parameter.data_ptr() for parameter in gathered}
        for unit in units:
            unit[0].reshard()
        kept = torch.empty(10**6)  # what was given back would be taken by this and the like
        for unit in units:
            unit[0].unshard()
        assert {
            id(p): p.data_ptr() for unit in units for block in unit for p in block.parameters() if p in gathered
        } == places
        assert min(parameter.untyped_storage().size() for parameter in gathered) > 0
        del kept


def test_sharded_blocks_hand_on_what_is_to_be_added_unless_others_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with alone("cpu"):
        model = sharded("mamba", "cpu")
        block = model.backbone.layers[1]
        mix = type(block).mix
        given: list[bool] = []

        def noted(self: Any, stream: Tensor, added: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor]:
            given.append(added is not None)
            return mix(self, stream, added, **arguments)

        monkeypatch.setattr(type(block), "mix", noted)
        joined = loss_and_gradients(model, (20, 28), 0)
        block.register_forward_hook(lambda module, args, output: seen.append(output))
        apart = loss_and_gradients(model, (20, 28), 0)
    assert given == [False, True, True, True, True] + [False] * 5
    assert isinstance(seen[0], Tensor)
    for name, truth in apart.items():
        assert (joined[name] - truth).norm() <= 1e-6 * truth.norm(), name


def test_blocks_that_are_checkpointed_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder().install(monkeypatch)
    with alone("cpu"):
        model = sharded("mamba", "cpu")
        expected = loss_and_gradients(model, (20, 28), 0)
        model.gradient_checkpointing_enable()
        with graphs():
            found = [loss_and_gradients(model, (20, 28), 0) for _ in range(3)]
    assert recorder.recorded == 0
    assert caplog.text.count("called one by one") == 1
    for name, truth in expected.items():
        assert (found[2][name] - truth).norm() <= 1e-6 * truth.norm(), name
