"""What state-spaces has beyond Mamba and Mamba-2: attention, MLPs, LayerNorm, Mamba-3; read, run, written back."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layouts import forward_original, original_hybrid
from tiny import carry_state
from transformers import AutoModelForCausalLM

from ssm_tune.architectures.configs import Mamba3Config
from ssm_tune.conversion import convert
from ssm_tune.layouts import open_checkpoint
from ssm_tune.model import load_model
from ssm_tune.recipe import RecipeError

TOKENS = torch.randint(3, 77, (1, 19), generator=torch.Generator().manual_seed(3))
_WIDE = {
    **{"causal": True, "d_conv": 0, "head_dim": 8, "num_heads": 4, "num_heads_kv": 4, "softmax_scale": 0.5},
    **{"rotary_emb_dim": 8, "rotary_emb_interleaved": True, "rotary_emb_base": 100.0, "mlp_dim": 200},
    **{"qkv_proj_bias": True, "out_proj_bias": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "as published": {},
    "with MLPs": {"d_intermediate": 100, "tie_embeddings": False},
    "other switches": {"attn_cfg": _WIDE, "attn_layer_idx": [0, 2], "rms_norm": False, "residual_in_fp32": False},
    "MLPs alone": {"d_intermediate": 128, "attn_layer_idx": [], "attn_cfg": {}, "n_layer": 2},
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_computes_what_the_original_does_and_goes_back(tmp_path: Path, kind: str) -> None:
    config, tensors = original_hybrid(**KINDS[kind])
    folder = write(tmp_path / "o", config, tensors)
    model = load_model(folder, dtype="float32").eval()
    assert model.config.vocab_size == 80
    expected = forward_original(tensors, config["ssm_cfg"], TOKENS[0], config["attn_cfg"])
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits[0]
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()

    convert(folder, tmp_path / "hf", to="hf")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    back = convert(tmp_path / "hf", tmp_path / "back", to="state-spaces")
    written = torch.load(back / "pytorch_model.bin", weights_only=True)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], value) for name, value in tensors.items())
    again = json.loads((back / "config.json").read_text())
    rounded = {"vocab_size": 80, "d_intermediate": 128 if config["d_intermediate"] else 0}
    given = config["attn_cfg"] | ({"mlp_dim": 256} if "mlp_dim" in config["attn_cfg"] else {})
    defaults = {
        "d_conv": 0,
        "rotary_emb_dim": 0,
        "rotary_emb_interleaved": False,
        "num_heads_kv": given.get("num_heads"),
    }
    defaults |= {"qkv_proj_bias": True, "out_proj_bias": True}
    explicit = {key: value for key, value in given.items() if defaults.get(key) != value}
    attention = {key: value for key, value in again["attn_cfg"].items() if defaults.get(key) != value}
    assert attention == explicit
    assert {**again, "attn_cfg": {}} == {**config, **rounded, "attn_cfg": {}}


def test_a_hybrid_that_megatron_can_express_goes_there_and_back(tmp_path: Path) -> None:
    """No convolution of q, k and v, and none of the switches that Megatron lacks."""
    attention = {"causal": True, "head_dim": 8, "num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4}
    attention |= {"qkv_proj_bias": False, "out_proj_bias": False}
    ssm = {"layer": "Mamba2", "d_state": 8, "headdim": 16, "chunk_size": 16, "ngroups": 2}
    config, tensors = original_hybrid(attn_cfg=attention, ssm_cfg=ssm, d_intermediate=128)
    convert(write(tmp_path / "o", config, tensors), tmp_path / "m", to="megatron", tp=2, pp=3)
    back = convert(tmp_path / "m", tmp_path / "back", to="state-spaces")
    written = torch.load(back / "pytorch_model.bin", weights_only=True)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], value) for name, value in tensors.items())
    assert json.loads((back / "config.json").read_text())["ssm_cfg"] == ssm


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("backbone.layers.1.mixer.conv1d.bias", "missing: backbone.layers.1.mixer.conv1d.bias"),
        ("backbone.layers.2.mlp.fc1.weight", "missing: backbone.layers.2.mlp.fc1.weight"),
        ("backbone.layers.0.norm2.weight", "missing: backbone.layers.0.norm2.weight"),
    ],
)
def test_a_missing_tensor_is_called_by_its_name_in_the_file(tmp_path: Path, gone: str, named: str) -> None:
    config, tensors = original_hybrid(d_intermediate=128)
    del tensors[gone]
    with pytest.raises(RecipeError) as caught:
        load_model(write(tmp_path / "o", config, tensors))
    assert named + "." in str(caught.value)


def test_other_tensors_that_do_not_fit(tmp_path: Path) -> None:
    config, tensors = original_hybrid(d_intermediate=128)
    tensors["backbone.layers.0.mlp.fc3.weight"] = torch.zeros(2)
    tensors["backbone.layers.1.mlp.fc2.weight"] = torch.zeros(3, 5)
    with pytest.raises(RecipeError) as caught:
        load_model(write(tmp_path / "o", config, tensors))
    assert "not part of the model: backbone.layers.0.mlp.fc3.weight." in str(caught.value)
    assert "backbone.layers.1.mlp.fc2.weight is 3 x 5 in the file, 32 x 128 by the config" in str(caught.value)
    config, tensors = original_hybrid(d_intermediate=128)
    tensors["backbone.layers.1.mlp.fc1.weight"] = torch.zeros(255, 32)
    with pytest.raises(RecipeError, match=r"backbone.layers.1.mlp.fc1.weight has 255 rows"):
        load_model(write(tmp_path / "odd", config, tensors))


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "MM", "mimo_rank": 2, "A_activation": "heavy_tail"},
        {"pattern": "M-M-", "intermediate_size": 128, "output_norm": True, "norm": "layer", "n_groups": 2},
    ],
)
def test_mamba3_goes_there_and_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    sizes = {"vocab_size": 80, "hidden_size": 32, "state_size": 8, "mamba_head_dim": 16, "chunk_size": 4}
    model = AutoModelForCausalLM.from_config(Mamba3Config(**sizes, **changes))
    carry_state(model)
    model.save_pretrained(tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "o", to="state-spaces")
    config = json.loads((folder / "config.json").read_text())
    assert config["n_layer"] == 2 and config["ssm_cfg"]["layer"] == "Mamba3"
    assert config["ssm_cfg"].get("is_mimo", False) == ("mimo_rank" in changes)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert "backbone.layers.1.mixer.B_bias" in tensors
    loaded = load_model(folder, dtype="float32")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    ours, theirs = loaded.config.to_dict(), model.config.to_dict()
    assert {key for key in theirs if ours[key] != theirs[key]} <= {
        "_name_or_path",
        "architectures",
        "intermediate_size",
    }


def test_mamba3_without_a_word_on_its_decay_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "o"
    folder.mkdir()
    config = {"d_model": 32, "n_layer": 2, "vocab_size": 80, "ssm_cfg": {"layer": "Mamba3", "headdim": 16}}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        read = open_checkpoint(str(folder)).config
    assert read.A_activation == "softplus" and "heavy_tail" in caplog.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pattern": "M-M"}, "pattern is M-M"),
        ({"pattern": "M-", "intermediate_size": 100}, "intermediate_size is 100"),
        ({"pattern": "M-", "intermediate_size": 128, "mlp_gated": False}, "mlp_gated is False"),
        ({"pattern": "M-", "intermediate_size": 128, "hidden_act": "relu"}, "hidden_act is relu"),
        ({"pattern": "M*"}, "pattern is M*"),
        ({"pattern": "MM", "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ],
)
def test_what_the_original_has_no_words_for(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    sizes = {"vocab_size": 80, "hidden_size": 32, "state_size": 8, "mamba_head_dim": 16, "chunk_size": 4}
    AutoModelForCausalLM.from_config(Mamba3Config(**sizes, **changes)).save_pretrained(tmp_path / "hf")
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path / "hf", tmp_path / "o", to="state-spaces")
    assert named in str(caught.value) and not (tmp_path / "o").exists()
