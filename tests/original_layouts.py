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


def original_hybrid(*, seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and state dict of a small mamba2attn, as mamba_ssm would write them; `changes` are config keys.

    Names and shapes: mamba_ssm's Mamba2, MHA (modules/mha.py) and GatedMLP (modules/mlp.py).
    """
    config: dict[str, Any] = {
        "d_model": 32,
        "d_intermediate": 0,
        "n_layer": 3,
        "vocab_size": 77,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "chunk_size": 16},
        "attn_layer_idx": [1],
        "attn_cfg": {
            **{"causal": True, "d_conv": 4, "head_dim": 8, "num_heads": 6, "num_heads_kv": 2, "rotary_emb_dim": 4},
            **{"out_proj_bias": False, "qkv_proj_bias": False},
        },
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, low: float | None = None, high: float = 0.0) -> Tensor:
        if low is not None:
            return torch.empty(shape).uniform_(low, high, generator=generator)
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    def norm(name: str, size: int) -> dict[str, Tensor]:
        weights = {f"{name}.weight": draw(size, low=0.7, high=1.3)}
        return weights if config["rms_norm"] else weights | {f"{name}.bias": draw(size, low=-0.2, high=0.2)}

    width, ssm, attention = config["d_model"], config["ssm_cfg"], config["attn_cfg"]
    inner, state, groups = 2 * width, ssm["d_state"], ssm.get("ngroups", 1)
    heads, mixed = inner // ssm["headdim"], inner + 2 * groups * state
    tensors = {"backbone.embedding.weight": draw(80, width)}
    for layer in range(config["n_layer"]):
        prefix = f"backbone.layers.{layer}."
        tensors |= norm(f"{prefix}norm", width)
        own: dict[str, Tensor] = {}
        if layer in config["attn_layer_idx"]:
            queries = attention["head_dim"] * attention["num_heads"]
            qkv = queries + 2 * attention["head_dim"] * attention["num_heads_kv"]
            beside = math.ceil(attention.get("mlp_dim", 0) / 256) * 256
            own["in_proj.weight"] = draw(qkv + beside, width)
            own |= {"in_proj.bias": draw(qkv + beside)} if attention["qkv_proj_bias"] else {}
            own |= {"conv1d.weight": draw(qkv, 1, 4), "conv1d.bias": draw(qkv)} if attention.get("d_conv") else {}
            own["out_proj.weight"] = draw(width, queries + beside // 2)
            own |= {"out_proj.bias": draw(width)} if attention["out_proj_bias"] else {}
        else:
            own = {
                "dt_bias": draw(heads, low=-5.8, high=-3.5),
                "A_log": draw(heads, low=0.0, high=2.0),
                "D": draw(heads, low=0.5, high=1.5),
                "in_proj.weight": draw(inner + mixed + heads, width),
                "conv1d.weight": draw(mixed, 1, 4),
                "conv1d.bias": draw(mixed),
                "norm.weight": draw(inner, low=0.7, high=1.3),
                "out_proj.weight": draw(width, inner),
            }
        tensors |= {f"{prefix}mixer.{name}": value for name, value in own.items()}
        if config["d_intermediate"]:
            hidden = math.ceil(config["d_intermediate"] / 128) * 128
            tensors |= norm(f"{prefix}norm2", width)
            tensors[f"{prefix}mlp.fc1.weight"] = draw(2 * hidden, width)
            tensors[f"{prefix}mlp.fc2.weight"] = draw(width, hidden)
    tensors |= norm("backbone.norm_f", width)
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"] if config["tie_embeddings"] else draw(80, width)
    return config, tensors


def forward_original(
    tensors: dict[str, Tensor], ssm: dict[str, Any], tokens: Tensor, attention: dict[str, Any] | None = None
) -> Tensor:
    """Logits (length, vocabulary) of an original checkpoint for tokens (length,), step by step, in float64.

    Mamba: Gu and Dao, 2023, equation 2 with the discretisation of section 3.3 (exp(dt A), dt B) and figure 3's block.
    Mamba-2: Dao and Gu, 2024, equation 1 with one A a head, and figure 6's block with its norm after the gate.
    `attention`: attn_cfg, for layers without a recurrence.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    residual = weights["backbone.embedding.weight"][tokens]
    mixer = _mamba2 if ssm.get("layer") == "Mamba2" else _mamba
    number = 0
    while f"backbone.layers.{number}.norm.weight" in weights:
        prefix = f"backbone.layers.{number}."
        names = [name for name in weights if name.startswith(prefix)]
        own = {name.removeprefix(prefix + "mixer."): weights[name] for name in names}
        normed = _norm(residual, weights, f"{prefix}norm")
        residual = residual + (mixer(normed, own, ssm) if "A_log" in own else _attention(normed, own, attention or {}))
        if f"{prefix}norm2.weight" in weights:
            up, gate = (_norm(residual, weights, f"{prefix}norm2") @ weights[f"{prefix}mlp.fc1.weight"].T).chunk(2, -1)
            residual = residual + (up * silu(gate)) @ weights[f"{prefix}mlp.fc2.weight"].T
        number += 1
    hidden = _norm(residual, weights, "backbone.norm_f")
    return hidden @ weights.get("lm_head.weight", weights["backbone.embedding.weight"]).T


def _norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """RMSNorm, or LayerNorm where there is a bias."""
    bias = weights.get(f"{name}.bias")
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]
    return normed if bias is None else normed + bias


def _attention(u: Tensor, own: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Every token of every head on its own: a convolution of q, k and v, their rotation, softmax over what came."""
    size, heads, shared = config["head_dim"], config["num_heads"], config["num_heads_kv"]
    qkv = u @ own["in_proj.weight"].T + own.get("in_proj.bias", 0.0)
    qkv, beside = qkv[:, : size * (heads + 2 * shared)], qkv[:, size * (heads + 2 * shared) :]
    if "conv1d.weight" in own:
        qkv = _causal_conv(qkv, own, activate=False)
    q, k, v = qkv.unflatten(-1, (-1, size)).split([heads, shared, shared], dim=1)
    turned = config.get("rotary_emb_dim", 0)
    for t in range(len(u)):
        for pair in range(turned // 2):
            angle = t * config.get("rotary_emb_base", 10000.0) ** (-2 * pair / turned)
            one, other = (
                (2 * pair, 2 * pair + 1) if config.get("rotary_emb_interleaved") else (pair, pair + turned // 2)
            )
            for x in (q, k):
                a, b = x[t, :, one].clone(), x[t, :, other].clone()
                x[t, :, one] = a * math.cos(angle) - b * math.sin(angle)
                x[t, :, other] = b * math.cos(angle) + a * math.sin(angle)
    outputs = torch.zeros_like(q)
    for t in range(len(u)):
        for head in range(heads):
            group = head // (heads // shared)
            scores = k[: t + 1, group] @ q[t, head] * (config.get("softmax_scale") or size**-0.5)
            outputs[t, head] = scores.softmax(0) @ v[: t + 1, group]
    y = outputs.flatten(1)
    if beside.shape[1]:
        up, gate = beside.chunk(2, dim=-1)
        y = torch.cat([y, up * silu(gate)], dim=-1)
    return y @ own["out_proj.weight"].T + own.get("out_proj.bias", 0.0)


def _causal_conv(x: Tensor, own: dict[str, Tensor], *, activate: bool = True) -> Tensor:
    width = own["conv1d.weight"].shape[-1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    windows = torch.stack([padded[t : t + width].T for t in range(len(x))])  # (length, channel, width)
    y = (windows * own["conv1d.weight"][:, 0]).sum(-1) + own["conv1d.bias"]
    return silu(y) if activate else y


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
