"""LoRA's weights of a mixer cast together: the same numbers, and no cast of one by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows import LAYOUTS, make_documents, run
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_tune.adapter import guard_lifted
from ssm_tune.kernels import recompute
from ssm_tune.lora_layers import cast_adapters_only
from ssm_tune.mixers import cast_together, patch_model

TARGETS = {
    "mamba": ["in_proj", "x_proj", "dt_proj", "out_proj"],
    "falcon_mamba": ["in_proj", "dt_proj"],
    "mamba2": ["in_proj", "out_proj"],
}
RANK = 5  # no other dimension


class Casts(TorchDispatchMode):
    """Counts casts of single weights to bfloat16, and of several at once."""

    def __init__(self) -> None:
        super().__init__()
        self.single = self.together = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.single += args[0].dim() == 2 and RANK in args[0].shape
        self.together += function is torch.ops.aten._foreach_copy_.default
        return function(*args, **kwargs)


def make_model(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = patch_model(tiny_model(kind)).bfloat16()
    config = LoraConfig(target_modules=TARGETS[kind], r=RANK, init_lora_weights=False, **settings)
    with guard_lifted():
        return cast_adapters_only(get_peft_model(model, config)).train()


def step(model: Any) -> tuple[dict[str, torch.Tensor], Casts]:
    model.zero_grad()
    with Casts() as casts:
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(model, LAYOUTS["packed"](make_documents()), 100).loss
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, casts


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    monkeypatch.setattr(cast_together, "DEVICES", ("cpu",))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", list(TARGETS))
def test_the_same_gradients(kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> None:
    model = make_model(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    found, casts = step(model)
    layers = model.config.num_hidden_layers
    assert (casts.single, casts.together) == (0, layers * (2 if checkpointing else 1))
    monkeypatch.setattr(cast_together, "DEVICES", ())
    expected, casts = step(model)
    # dt_proj is computed again in backward, and with it its casts.
    assert casts.together == 0 and casts.single >= 2 * (len(TARGETS[kind]) + (kind != "mamba2")) * layers
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_were_cast_before_are_not_cast_again(as_on_a_gpu: None) -> None:
    model = make_model("mamba")
    expected, _ = step(model)
    weights = [p for name, p in model.named_parameters() if "lora_" in name]
    for before, left in ((weights[:3], model.config.num_hidden_layers), (weights, 0)):
        with cast_together.cast_at_once(before, torch.bfloat16):
            found, casts = step(model)
        assert (casts.single, casts.together) == (0, left)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_copies_are_never_older_than_the_weights(as_on_a_gpu: None) -> None:
    model = make_model("mamba")
    before, _ = step(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    after, _ = step(model)
    of_A = [name for name in after if "lora_A" in name]
    assert of_A and not any(after[name].any() for name in of_A) and any(before[name].any() for name in of_A)


def test_a_layer_that_computes_otherwise_casts_for_itself(as_on_a_gpu: None) -> None:
    assert step(make_model("mamba", lora_dropout=0.5))[1].together == 0
    assert step(make_model("mamba", use_dora=True))[1].together == 0
