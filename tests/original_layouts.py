"""Checkpoints as their publishers lay them, written by hand, and the original models' forwards from the papers.

Nothing here uses `ssm_tune.layouts`: this is what its readers are compared with.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu, softplus

_SHARED = ("A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "out_proj.weight")
_MIXER = {
    "mamba": (*_SHARED, "x_proj.weight", "dt_proj.weight", "dt_proj.bias"),
    "mamba2": (*_SHARED, "dt_bias", "norm.weight"),
}


def original_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict that the mamba_ssm package would have for a transformers Mamba or Mamba-2."""
    tensors = {"backbone.embedding.weight": model.backbone.embeddings.weight}
    for number, block in enumerate(model.backbone.layers):
        tensors[f"backbone.layers.{number}.norm.weight"] = block.norm.weight
        for leaf in _MIXER[model.config.model_type]:
            tensors[f"backbone.layers.{number}.mixer.{leaf}"] = block.mixer.get_parameter(leaf)
    tensors["backbone.norm_f.weight"] = model.backbone.norm_f.weight
    tensors["lm_head.weight"] = model.lm_head.weight
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def original_config(model: Any, **changes: Any) -> dict[str, Any]:
    """config.json of a state-spaces folder; the vocabulary is said as 3 less, which padding to 8 or 16 makes up for."""
    config = model.config
    ssm: dict[str, Any] = {"d_state": config.state_size}
    if config.model_type == "mamba2":
        ssm |= {"layer": "Mamba2", "headdim": config.head_dim, "chunk_size": config.chunk_size}
        if config.n_groups != 1:
            ssm["ngroups"] = config.n_groups
    values: dict[str, Any] = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size - 3,
        "ssm_cfg": ssm,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8 if config.model_type == "mamba" else 16,
    }
    if config.model_type == "mamba2":  # the newer files have these as well
        values |= {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}
        values |= {"tie_embeddings": config.tie_word_embeddings}
    return {**values, **changes}


def write_state_spaces(folder: Path, model: Any, *, safetensors: bool = False, **changes: Any) -> dict[str, Tensor]:
    """An original folder; `changes` are config keys. Returns the tensors in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(original_config(model, **changes)))
    tensors = original_tensors(model)
    if safetensors:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


def write_mistral(folder: Path, model: Any, **changes: Any) -> dict[str, Tensor]:
    """A folder as Mistral published Codestral; `changes` are keys of params.json. Returns the tensors in it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "n_groups": config.n_groups,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": False,
        "model_type": "mamba",
    }
    (folder / "params.json").write_text(json.dumps({**params, **changes}))
    tensors = {f"model.{name}": tensor for name, tensor in original_tensors(model).items()}
    save_file(tensors, folder / "consolidated.safetensors")
    return tensors


def forward_original(tensors: dict[str, Tensor], ssm: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits (length, vocabulary) of an original checkpoint for tokens (length,), step by step, in float64.

    Mamba: Gu and Dao, 2023, equation 2 with the discretisation of section 3.3 (exp(dt A), dt B) and figure 3's block.
    Mamba-2: Dao and Gu, 2024, equation 1 with one A a head, and figure 6's block with its norm after the gate.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    residual = weights["backbone.embedding.weight"][tokens]
    mixer = _mamba2 if ssm.get("layer") == "Mamba2" else _mamba
    number = 0
    while f"backbone.layers.{number}.norm.weight" in weights:
        prefix = f"backbone.layers.{number}."
        names = [name for name in weights if name.startswith(prefix)]
        own = {name.removeprefix(prefix + "mixer."): weights[name] for name in names}
        residual = residual + mixer(_rms_norm(residual, weights[prefix + "norm.weight"]), own, ssm)
        number += 1
    hidden = _rms_norm(residual, weights["backbone.norm_f.weight"])
    return hidden @ weights.get("lm_head.weight", weights["backbone.embedding.weight"]).T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _causal_conv(x: Tensor, own: dict[str, Tensor]) -> Tensor:
    width = own["conv1d.weight"].shape[-1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    windows = torch.stack([padded[t : t + width].T for t in range(len(x))])  # (length, channel, width)
    return silu((windows * own["conv1d.weight"][:, 0]).sum(-1) + own["conv1d.bias"])


def _mamba(u: Tensor, own: dict[str, Tensor], ssm: dict[str, Any]) -> Tensor:
    x, z = (u @ own["in_proj.weight"].T).chunk(2, dim=-1)
    x = _causal_conv(x, own)
    states = own["A_log"].shape[1]
    rank = math.ceil(u.shape[1] / 16)
    low, B, C = (x @ own["x_proj.weight"].T).split([rank, states, states], dim=-1)
    dt = softplus(low @ own["dt_proj.weight"].T + own["dt_proj.bias"])
    A = -own["A_log"].exp()
    h, outputs = x.new_zeros(A.shape), []
    for t in range(len(x)):
        h = (dt[t, :, None] * A).exp() * h + dt[t, :, None] * B[t] * x[t, :, None]
        outputs.append(h @ C[t] + own["D"] * x[t])
    return (torch.stack(outputs) * silu(z)) @ own["out_proj.weight"].T


def _mamba2(u: Tensor, own: dict[str, Tensor], ssm: dict[str, Any]) -> Tensor:
    states, groups, size = ssm["d_state"], ssm.get("ngroups", 1), ssm["headdim"]
    heads = len(own["A_log"])
    inner = heads * size
    z, xBC, dt = (u @ own["in_proj.weight"].T).split([inner, inner + 2 * groups * states, heads], dim=-1)
    x, B, C = _causal_conv(xBC, own).split([inner, groups * states, groups * states], dim=-1)
    x = x.unflatten(-1, (heads, size))
    B, C = (m.unflatten(-1, (groups, states)).repeat_interleave(heads // groups, dim=1) for m in (B, C))
    dt = softplus(dt + own["dt_bias"])
    A = -own["A_log"].exp()
    h, outputs = x.new_zeros(heads, size, states), []
    for t in range(len(x)):
        h = (dt[t] * A).exp()[:, None, None] * h + (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
        outputs.append(torch.einsum("hps,hs->hp", h, C[t]) + own["D"][:, None] * x[t])
    gated = (torch.stack(outputs).flatten(1) * silu(z)).unflatten(-1, (groups, inner // groups))
    normed = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    return (normed.flatten(1) * own["norm.weight"]) @ own["out_proj.weight"].T
