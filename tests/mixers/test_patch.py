"""patch_model changes what is computed and nothing else, and can be taken back."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from rows import make_documents, packed, relative_error, run
from tiny import KINDS, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ssm_tune import RecipeError
from ssm_tune.families import family_of
from ssm_tune.mixers import is_patched, patch_model, unpatch_model

EXACT = [kind for kind in KINDS if family_of(tiny_config(kind).model_type).exact]


def classes(model: Any) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return run(model, packed(make_documents())).logits


@pytest.mark.parametrize("kind", EXACT)
def test_names_and_weights_stay(kind: str) -> None:
    stock, model = tiny_model(kind), tiny_model(kind)
    assert not is_patched(model)
    assert patch_model(model) is model and is_patched(model)
    assert classes(model) == classes(stock)
    assert type(model) is not type(stock) and isinstance(model, type(stock))
    assert list(model.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
    patched_class = type(model)
    assert type(patch_model(model)) is patched_class


@pytest.mark.parametrize("kind", EXACT)
def test_unpatching_gives_stock_back(kind: str) -> None:
    stock = tiny_model(kind)
    model = unpatch_model(patch_model(tiny_model(kind)))
    assert not is_patched(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    ids = make_documents()[2][None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    assert unpatch_model(stock) is stock


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("kind", EXACT)
def test_copies_are_patched_models(kind: str, copier: Any) -> None:
    model = patch_model(tiny_model(kind))
    other = copier(model)
    assert type(other) is type(model) and is_patched(other)
    assert torch.equal(logits(other), logits(model))
    assert not is_patched(unpatch_model(other)) and is_patched(model)


@pytest.mark.parametrize("kind", EXACT)
def test_saved_folders_are_stock(kind: str, tmp_path: Path) -> None:
    stock = tiny_model(kind)
    patch_model(tiny_model(kind)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(stock).__name__] and "auto_map" not in config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(stock)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, stock.state_dict()[name]), name


@pytest.mark.parametrize("kind", EXACT)
def test_signatures_name_the_borders(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    for module in (model, model.base_model):
        parameters = inspect.signature(type(module).forward).parameters
        assert {"input_ids", "attention_mask", "seq_idx", "cu_seq_lens_q", "position_ids"} <= set(parameters)


@pytest.mark.parametrize("kind", EXACT)
def test_before_or_after_adapters(kind: str) -> None:
    settings = {"r": 2, "target_modules": ["in_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    before = get_peft_model(patch_model(tiny_model(kind)), LoraConfig(**settings))
    torch.manual_seed(1)
    after = patch_model(get_peft_model(tiny_model(kind), LoraConfig(**settings)))
    assert torch.equal(logits(before), logits(after))
    merged = after.merge_and_unload()
    assert type(merged).__name__ == type(tiny_model(kind)).__name__
    assert relative_error(logits(merged), logits(before)) < 1e-5
    assert not is_patched(unpatch_model(merged))


@pytest.mark.parametrize("kind", EXACT)
def test_portable_adapters_are_right_in_plain_peft(kind: str, tmp_path: Path) -> None:
    """Trained here, loaded by PEFT into the stock model without anything of ours."""
    family = family_of(tiny_config(kind).model_type)
    config = LoraConfig(r=2, target_modules=list(family.portable), init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(patch_model(tiny_model(kind)), config).eval()
    adapted.save_pretrained(tmp_path)
    ids = make_documents()[2][None]
    with torch.no_grad():
        wanted = adapted(input_ids=ids, use_cache=False).logits
        plain = PeftModel.from_pretrained(tiny_model(kind), tmp_path).eval()
        assert not is_patched(plain)
        assert relative_error(plain(input_ids=ids, use_cache=False).logits, wanted) < 1e-5
        assert (
            relative_error(tiny_model(kind)(ids, use_cache=False).logits, wanted) > 1e-3
        )  # the adapter does something


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_models_with_accelerate_hooks(kind: str) -> None:
    """Hooks keep the bound forward of the class that they found (quantised models always have hooks)."""
    wanted = logits(patch_model(tiny_model(kind)))
    model = tiny_model(kind)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert torch.equal(logits(patch_model(model)), wanted)
    unpatch_model(model)
    ids = make_documents()[2][None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model(kind)(ids).logits)


def test_a_replaced_forward_is_refused() -> None:
    model = tiny_model("mamba")
    model.forward = model.forward
    with pytest.raises(ValueError, match="before it goes to a trainer"):
        patch_model(model)
    assert not is_patched(model)


def test_other_activations_are_refused() -> None:
    model = tiny_model("mamba", hidden_act="gelu")
    with pytest.raises(ValueError, match="only know silu"):
        patch_model(model)
    assert not is_patched(model)


def test_other_models_are_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(RecipeError, match="gpt2"):
        patch_model(gpt2)
    with pytest.raises(ValueError, match="no transformers model"):
        patch_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "zamba", "falcon_h1", "lfm2"])
def test_an_adapter_on_a_convolution_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads the weight: such an adapter would be saved as it was born."""
    model = patch_model(tiny_model(kind))
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Conv1d)}
    monkeypatch.setattr(LoraModel, "_check_target_module_compatiblity", lambda *_: None)
    rank = next(iter(convolutions.values())).groups
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=list(convolutions), init_lora_weights=False))
    ids = torch.randint(6, 260, (1, 9))
    for inputs in ({"use_cache": False}, {"use_cache": True}):
        with pytest.raises(ValueError, match="it would never take part"):
            adapted(input_ids=ids, **inputs)
    with adapted.disable_adapter():
        assert relative_error(adapted(input_ids=ids).logits, tiny_model(kind)(input_ids=ids).logits) < 1e-5


def test_an_adapter_on_the_gated_norm_is_refused() -> None:
    adapted = get_peft_model(patch_model(tiny_model("mamba2")), LNTuningConfig(target_modules=["mixer.norm"]))
    with pytest.raises(ValueError, match="it would never take part"):
        adapted(input_ids=torch.randint(6, 260, (1, 9)))


def test_a_compiled_block_computes_the_same() -> None:
    """Graphs are cut round the kernels, some of which no compiler can look into."""
    block = patch_model(tiny_model("mamba")).backbone.layers[0]
    hidden = torch.randn(1, 20, 32, requires_grad=True)
    seq_idx = torch.tensor([[0] * 9 + [1] * 11], dtype=torch.int32)
    wanted = block(hidden, seq_idx=seq_idx)
    gradient = torch.autograd.grad(wanted.square().sum(), hidden)[0]
    got = torch.compile(block, backend="eager")(hidden, seq_idx=seq_idx)
    assert relative_error(got, wanted) < 1e-6
    assert relative_error(torch.autograd.grad(got.square().sum(), hidden)[0], gradient) < 1e-6
