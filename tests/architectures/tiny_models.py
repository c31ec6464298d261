"""Tiny models of our own architectures, with weights that carry state."""

from __future__ import annotations

from typing import Any

import torch
from tiny import carry_state
from transformers import AutoModelForCausalLM

from ssm_tune.architectures.configs import H3Config, HybridConfig, Mamba2HybridConfig, Mamba3Config, SambaConfig

IDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA3: dict[str, Any] = {"state_size": 8, "mamba_head_dim": 16, "chunk_size": 4}

MAMBA2: dict[str, Any] = {"state_size": 8, "mamba_head_dim": 16, "chunk_size": 4}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "mamba3": (Mamba3Config, {**MAMBA3, "num_hidden_layers": 2, "n_groups": 2}),
    "mamba3_mimo": (
        Mamba3Config,
        {**MAMBA3, "pattern": "M-", "mimo_rank": 2, "rope_fraction": 1.0, "A_activation": "heavy_tail"},
    ),
    "mamba3_normed": (Mamba3Config, {**MAMBA3, "pattern": "MM", "output_norm": True}),
    "mamba3_mimo_normed": (Mamba3Config, {**MAMBA3, "pattern": "MM", "output_norm": True, "mimo_rank": 2}),
    "mamba3_hybrid": (Mamba3Config, {**MAMBA3, "pattern": "M*-M"}),
    "mamba_hybrid": (HybridConfig, {"state_size": 4, "pattern": "M*M-", "tie_word_embeddings": False}),
    "mamba2_hybrid": (Mamba2HybridConfig, {**MAMBA2, "pattern": "M*M", "rotary_dim": 4}),
    "mamba2_mlps": (
        Mamba2HybridConfig,
        {
            **MAMBA2,
            **{"pattern": "M-*-", "n_groups": 2, "rotary_dim": 8, "rope_interleaved": True, "norm": "layer"},
            **{"attention_mlp_size": 8, "attention_bias": True, "attention_out_bias": True, "attention_scale": 0.5},
        },
    ),
    "samba": (SambaConfig, {"state_size": 4, "num_hidden_layers": 6, "sliding_window": 5}),
    "h3": (H3Config, {"state_size": 8, "num_hidden_layers": 4}),
    "h3_hybrid": (H3Config, {"state_size": 8, "pattern": "M-*-M-", "ssm_head_dim": 2}),
}


def make_config(kind: str, **changes: Any) -> Any:
    cls, dimensions = CONFIGS[kind]
    return cls(**{**IDS, **SIZES, **dimensions, **changes})


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """In eval mode, float32; the same weights for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(kind, **changes))
        carry_state(model)
    return model.eval()
