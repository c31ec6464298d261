"""What backward computes again, on the path of a GPU: stand-ins for its kernels save what the real ones save.

Gradients are those of the same path that keeps everything, and what a mixer keeps is no more than what stock's fused
call would (counted from mamba-ssm 2.3: `MambaInnerFn` keeps its input, the scan's output and the small projection;
`MambaSplitConv1dScanCombinedFn` its input and the scan's output).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from operations import stand_ins
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraModel
from rows import LAYOUTS, Layout, make_documents, run, worst_gradient
from storages import Storages
from tiny import EIGHT_HEADS, tiny_config, tiny_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ssm_tune.families import family_of
from ssm_tune.kernels import backends, fused_ssd_block, recompute
from ssm_tune.mixers import patch_model
from ssm_tune.mixers.projected_again import Shares

WIDTHS: dict[str, dict[str, Any]] = {
    **EIGHT_HEADS,
    "codestral": {},
    "falcon_h1": {**EIGHT_HEADS["falcon_h1"], "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "nemotron_h": {**EIGHT_HEADS["nemotron_h"], "n_groups": 2},
}
SCAN = "_mamba_chunk_scan_combined_fwd"
KINDS = ["mamba", "falcon_mamba", "jamba", "zamba", *WIDTHS]


def make_model(kind: str) -> Any:
    return patch_model(tiny_model(kind, **WIDTHS.get(kind, {}))).train()


@pytest.fixture(autouse=True)
def path_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in KINDS:  # imported before the stand-ins are there, which stock would be bound to from then on
        MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(kind))]
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    devices = {("cuda",): ("cpu",), ("cpu",): ("none",)}
    table = [dataclasses.replace(b, devices=devices.get(b.devices, b.devices)) for b in backends.BACKENDS]
    monkeypatch.setattr(backends, "BACKENDS", tuple(b for b in table if "triton" not in b.name))
    monkeypatch.setattr(backends, "_settings", backends._Settings())
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    stand_ins.CALLS.clear()
    yield


@pytest.fixture
def keep_everything(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(recompute, "DEVICES", ())


def gradients(model: Any, layout: Layout, *, times: int = 1, context: Any = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with context or nullcontext():
        loss = run(model, layout, 100).loss
    for last in reversed(range(times)):
        loss.backward(retain_graph=bool(last))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert [name for name, gradient in wanted.items() if not gradient.any()] == []
    error, name = worst_gradient(got, wanted)
    assert error < tolerance, name


@pytest.mark.parametrize("name", ["packed rows, left", "right pads"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_what_is_kept(kind: str, name: str, keep_everything: Callable[[], None]) -> None:
    model, layout = make_model(kind), LAYOUTS[name](make_documents())
    got = gradients(model, layout)
    keep_everything()
    assert_same(got, gradients(model, layout))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_h1"])
def test_a_graph_that_is_kept_gives_them_twice(kind: str, keep_everything: Callable[[], None]) -> None:
    model, layout = make_model(kind), LAYOUTS["packed"](make_documents())
    got = gradients(model, layout, times=2)
    keep_everything()
    assert_same(got, {name: 2 * gradient for name, gradient in gradients(model, layout).items()})


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_autocast_holds_in_backward(kind: str, keep_everything: Callable[[], None]) -> None:
    model, layout = make_model(kind), LAYOUTS["packed"](make_documents())
    got = gradients(model, layout, context=torch.autocast("cpu", torch.bfloat16))
    keep_everything()
    # The gate is rounded once more when it is computed again.
    assert_same(got, gradients(model, layout, context=torch.autocast("cpu", torch.bfloat16)), 1e-2)


def test_the_block_gives_out_proj_its_input_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose weight's gradient waits for it: nothing is normalised and gated a second time."""
    model, layout = make_model("mamba2"), LAYOUTS["packed"](make_documents())
    wanted = gradients(model, layout, context=torch.autocast("cpu", torch.bfloat16))
    again: list[int] = []
    monkeypatch.setattr(fused_ssd_block.ssd_block_parts, "gated", lambda *_, **__: again.append(1))
    got = gradients(model, layout, context=torch.autocast("cpu", torch.bfloat16))
    assert again == []
    assert_same(got, wanted)
    monkeypatch.setattr("ssm_tune.mixers.mamba2.later_gradient", lambda *_: None)
    with pytest.raises(AttributeError, match="NoneType"):
        gradients(model, layout, context=torch.autocast("cpu", torch.bfloat16))
    assert again == [1]


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "zamba2"])
def test_a_scan_that_is_quick_is_computed_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is not kept, nor computed twice; with a norm and without."""
    model, layout = make_model(kind), LAYOUTS["packed rows"](make_documents())
    wanted, hidden = gradients(model, layout), model.config.hidden_size
    kept, scans = kept_bytes(model, layout, hidden), stand_ins.CALLS.count(SCAN)
    gradients(model, layout)
    once = stand_ins.CALLS.count(SCAN) - scans

    def scan_again(functions: fused_ssd_block.Functions, *given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        *vectors, marks, settings = given
        return functions.scan(*vectors, None, marks, settings)[1], {}

    missing: list[int] = []

    def scan_backward(functions: fused_ssd_block.Functions, slope: torch.Tensor, *given: Any, **more: Any) -> Any:
        """The stand-ins want the output, which with a norm nobody else does."""
        *vectors, gate, kept, marks, settings, into = given
        if kept is None:
            missing.append(1)
            kept = functions.scan(*vectors, None, marks, settings)[1]
        return functions[3](slope, *vectors, gate, kept, marks, settings, into, **more)

    monkeypatch.setattr(fused_ssd_block.Functions, "scan_again", scan_again)
    monkeypatch.setattr(fused_ssd_block.Functions, "scan_backward", scan_backward)
    scans = stand_ins.CALLS.count(SCAN)
    assert_same(gradients(model, layout, times=2), {name: 2 * gradient for name, gradient in wanted.items()})
    # Of the stand-ins backward computes the scan too: 2 calls a layer, and for two backward passes 1 + 2 * (1 + 1).
    assert 2 * (stand_ins.CALLS.count(SCAN) - scans - len(missing)) == 5 * once > 0
    mixer = next(m for m in model.modules() if "conv1d" in m._modules)
    assert kept_bytes(model, layout, hidden) <= kept - 4 * layout.labels.numel() * mixer.out_proj.in_features


def test_autocast_of_backward_alone_changes_no_recomputation(keep_everything: Callable[[], None]) -> None:
    model, layout, found = make_model("mamba"), LAYOUTS["packed"](make_documents()), []
    for _ in range(2):
        model.zero_grad()
        loss = run(model, layout, 100).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        keep_everything()
    assert_same(*found)


@pytest.mark.parametrize("kind", ["mamba", "jamba", "mamba2"])
def test_adapters_with_dropout_draw_the_same_numbers_again(
    kind: str, keep_everything: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraModel, "_check_target_module_compatiblity", lambda *_: None)
    family = family_of(tiny_config(kind).model_type)
    settings = LoraConfig(r=4, target_modules=list(family.projections), lora_dropout=0.5)
    model, layout = get_peft_model(make_model(kind), settings), LAYOUTS["packed"](make_documents())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.manual_seed(1)
    got = gradients(model, layout)
    after = torch.rand(1)
    torch.manual_seed(1)
    keep_everything()
    assert_same(got, gradients(model, layout))
    assert torch.equal(after, torch.rand(1))  # backward draws nothing that a later step would miss


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_in_proj_of_some_layers_is_computed_again(
    kind: str, dropout: float, keep_everything: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters: its output is not kept, by as many bytes as it has, and the gradients are the same."""
    monkeypatch.setattr(LoraModel, "_check_target_module_compatiblity", lambda *_: None)
    settings = LoraConfig(r=4, target_modules=["in_proj", "out_proj"], lora_dropout=dropout)
    model, layout = get_peft_model(make_model(kind), settings), LAYOUTS["packed rows"](make_documents())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    layers, found = model.base_model.model.backbone.layers, {}
    for share in (0.0, 0.5):
        monkeypatch.setattr("ssm_tune.mixers.mamba.AGAIN", Shares(frozen=share, narrow=1.0))
        monkeypatch.setattr("ssm_tune.mixers.mamba2.AGAIN", Shares(frozen=share, narrow=1.0))
        calls = [0] * len(layers)
        for number, layer in enumerate(layers):
            forward = type(layer.mixer.in_proj).forward
            monkeypatch.setattr(layer.mixer.in_proj, "forward", counted(forward, layer.mixer.in_proj, calls, number))
        torch.manual_seed(1)
        with Storages() as storages:
            loss = run(model, layout, 100).loss
            kept = storages.alive(*model.parameters())
        model.zero_grad()
        loss.backward()
        found[share] = kept, {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        assert calls == [1 + (share > 0 and number % 2 == 0) for number in range(len(layers))]
    if not dropout:  # the generator's state and what dropout was given are kept in its place
        given_up = -(-len(layers) // 2) * layers[0].mixer.in_proj.out_features
        assert found[0.0][0] - found[0.5][0] >= 4 * layout.labels.numel() * given_up
    assert_same(found[0.5][1], found[0.0][1])


def counted(forward: Callable[..., Any], layer: Any, calls: list[int], number: int) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[number] += 1
        return forward(layer, *args, **kwargs)

    return counting


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_trained_in_proj_is_computed_again_if_it_is_narrow(
    kind: str, narrow: bool, keep_everything: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = make_model(kind), LAYOUTS["packed rows"](make_documents())
    monkeypatch.setattr(f"ssm_tune.mixers.{kind}.AGAIN", Shares(frozen=1.0, narrow=0.5))
    monkeypatch.setattr("ssm_tune.mixers.projected_again._NARROW", model.config.hidden_size - (not narrow))
    layers = model.backbone.layers
    calls = [0] * len(layers)
    for number, layer in enumerate(layers):
        in_proj = layer.mixer.in_proj
        monkeypatch.setattr(in_proj, "forward", counted(type(in_proj).forward, in_proj, calls, number))
    got = gradients(model, layout)
    assert calls == [1 + (narrow and number % 2 == 0) for number in range(len(layers))]
    keep_everything()
    assert_same(got, gradients(model, layout))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_gradient_checkpointing_is_left_alone(kind: str, keep_everything: Callable[[], None]) -> None:
    model, layout = make_model(kind), LAYOUTS["packed"](make_documents())
    gradients(model, layout)  # calls for the trials of the kernels
    stand_ins.CALLS.clear()
    model.gradient_checkpointing_enable()
    got, calls = gradients(model, layout), len(stand_ins.CALLS)
    stand_ins.CALLS.clear()
    keep_everything()
    assert_same(got, gradients(model, layout))
    assert len(stand_ins.CALLS) == calls


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "one unit"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_sharded_blocks_are_whole_when_they_compute_again(
    kind: str, together: bool, autocast: bool, keep_everything: Callable[[], None]
) -> None:
    """One process: what counts is that parameters are gathered for a block's backward, and gone after its forward."""
    layout, found = LAYOUTS["packed"](make_documents()), []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for _ in range(2):
            model = make_model(kind)
            blocks = list(model.backbone.layers)
            for unit in [blocks] if together else [[block] for block in blocks]:
                fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
            context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
            got = gradients(model, layout, context=context)
            found.append({name: gradient.full_tensor() for name, gradient in got.items()})
            keep_everything()
        assert_same(*found, 1e-2 if autocast else 1e-6)
    finally:
        distributed.destroy_process_group()


def kept_bytes(model: Any, layout: Layout, hidden: int) -> int:
    """What a forward of one mixer of the model leaves for backward, its input and output not counted."""
    mixer = next(m for m in model.modules() if "conv1d" in m._modules)
    rows, length = layout.labels.shape
    x = torch.randn(rows, length, hidden, requires_grad=True)
    index = layout.inputs.get("seq_idx")
    with Storages() as storages:
        y = mixer(x, seq_idx=index)
        assert y.requires_grad
        return storages.alive(x, y, *model.parameters())


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_nothing_stays_where_backward_never_comes(kind: str) -> None:
    model, layout = make_model(kind), LAYOUTS["packed"](make_documents())
    run(model, layout, 100)  # what is worked out once
    with Storages() as storages:
        assert run(model, layout, 100).loss.requires_grad
        assert storages.alive(*model.parameters()) < 64 * layout.labels.numel()  # what is known of documents


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "codestral", "bamba", "nemotron_h", "falcon_h1"])
def test_a_mixer_keeps_no_more_than_the_fused_call_of_stock(kind: str, keep_everything: Callable[[], None]) -> None:
    model, layout = make_model(kind), LAYOUTS["packed rows"](make_documents())
    config, tokens = model.config, layout.labels.numel()
    kept = kept_bytes(model, layout, config.hidden_size)
    mixer = next(m for m in model.modules() if "conv1d" in m._modules)
    parameters = sum(p.numel() for p in (*mixer.conv1d.parameters(), mixer.A_log, mixer.D)) + mixer.intermediate_size
    dim = mixer.intermediate_size
    if kind == "mamba":
        states, rank = mixer.ssm_state_size, mixer.time_step_rank
        # Input and its two halves, the scan's output; x_proj's, B and C again; states at the ends of pieces.
        numbers = tokens * (2 * dim + dim + rank + 2 * states + 2 * states) + 2 * len(layout.labels) * dim * states
        numbers += mixer.A_log.numel()
    else:
        numbers = tokens * (mixer.in_proj.out_features + dim + mixer.n_groups)
        numbers += tokens * config.hidden_size * (kind == "falcon_h1")  # its input, scaled
    small = 8 * parameters + 64 * tokens  # copies of parameters in float32, and what is known of documents
    assert kept <= 4 * numbers + small
    keep_everything()
    assert kept_bytes(model, layout, config.hidden_size) > 4 * numbers + small  # and it matters


def test_frozen_projections_keep_no_input_and_get_no_gradient() -> None:
    """Only what gradients of activations need is kept where a mixer's projections are frozen."""
    model, layout = make_model("mamba"), LAYOUTS["packed"](make_documents())
    mixer = model.backbone.layers[0].mixer
    full = kept_bytes(model, layout, model.config.hidden_size)
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        getattr(mixer, name).requires_grad_(False)
    frozen = kept_bytes(model, layout, model.config.hidden_size)
    assert full - frozen >= 4 * layout.labels.numel() * mixer.time_step_rank  # dt_proj's input
    gradients(model, layout)
    assert all(getattr(mixer, name).weight.grad is None for name in ("in_proj", "x_proj", "dt_proj", "out_proj"))
