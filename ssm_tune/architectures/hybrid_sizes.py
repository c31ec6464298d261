"""Architectures of several kinds of layers that can be built from dimensions: what may be set, and the sizes.

Sizes named as their papers name them are the published ones. "130m" is a size for comparing: about 85 to 95 million
parameters outside the embedding at width 768, as in mamba-130m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Blueprint:
    """An architecture with layers of several kinds.

    Attributes:
        model_type: of the config class.
        layered: its layers follow the recipe's pattern, shares or attention_every.
        in_proportion: heads and MLPs that are not given follow from the width.
        renamed: what a dimension is called in the config class, where that has another name.
        hidden: fields of the config class that are not for recipes.
        defaults: values where the config class has others. sizes: as dimensions; `pattern` or the shares may be among
            them. multiple: the vocabulary is rounded up to it.
    """

    model_type: str
    layered: bool = True
    in_proportion: bool = True
    renamed: Mapping[str, str] = field(default_factory=lambda: _NONE)
    hidden: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NONE)
    multiple: int = 16


def _size(
    hidden_size: int, num_hidden_layers: int, heads: int, intermediate_size: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        **others,
    }


# An Empirical Study of Mamba-based Language Models (Waleffe et al., 2024), table 6, and Megatron-LM's
# examples/mamba/train.sh, whose 800M model is the small one.
_MEGATRON = {"attention_ratio": 0.08, "mlp_ratio": 0.5, "num_key_value_heads": 8, "n_groups": 8, "hidden_act": "gelu"}
# H3's own attention layers, as places among its layers of a mixer and an MLP (HazyResearch/H3, examples/README.md).
_H3_ATTENTION = {"125m": (12, (6,)), "355m": (24, (8, 16)), "1.3b": (24, (8, 16)), "2.7b": (32, (8, 16, 24))}


def _h3_pattern(name: str) -> str:
    layers, attention = _H3_ATTENTION[name]
    return "".join(("*-" if index in attention else "M-") for index in range(layers))


# Without routers there is no loss to balance them, which trainers add for a coefficient that is not zero.
_NO_EXPERTS = {"num_experts_per_tok": 1, "router_aux_loss_coef": 0.0}


def _own_order(model_type: str, **defaults: Any) -> Blueprint:
    """A model of transformers whose order of layers, and all else, is said by its config's own fields."""
    return Blueprint(model_type, layered=False, in_proportion=False, defaults=defaults)


_NEMOTRON_NAMES = {
    "state_size": "ssm_state_size",
    "hidden_act": "mlp_hidden_act",
}
_JAMBA_NAMES = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "time_step_rank": "mamba_dt_rank",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}

# What `architecture: hybrid` is built on, by its mixer.
HYBRIDS: dict[str, Blueprint] = {
    "mamba": Blueprint(
        "mamba_hybrid",
        sizes={"130m": _size(768, 24, 12, 1536, attention_ratio=0.08, mlp_ratio=0.5)},
        multiple=8,
    ),
    "mamba2": Blueprint(
        "nemotron_h",
        renamed=_NEMOTRON_NAMES,
        hidden=("mamba_num_heads", "layers_block_type", "expand"),
        defaults={"n_groups": 1, "chunk_size": 256, "hidden_act": "gelu"},
        sizes={
            "130m": _size(768, 24, 12, 2304, attention_ratio=0.08, mlp_ratio=0.5),
            "megatron-800m": _size(1024, 48, 16, 4096, **_MEGATRON),
            "megatron-8b": _size(4096, 56, 32, 16384, **_MEGATRON),
        },
    ),
    "mamba3": Blueprint(
        "mamba3",
        sizes={"130m": _size(768, 24, 12, 1536, attention_ratio=0.08, mlp_ratio=0.5)},
    ),
}
# Jamba without experts, which takes the place of mamba_hybrid where its order of layers can say the pattern.
JAMBA = Blueprint(
    "jamba",
    renamed=_JAMBA_NAMES,
    hidden=("attn_layer_period", "attn_layer_offset", "num_experts", "num_experts_per_tok", "router_aux_loss_coef"),
    defaults={**_NO_EXPERTS, "num_experts": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    multiple=8,
)

# Mamba-2 with MLPs like Nemotron-H's, and no attention.
MAMBA2_ALONE = Blueprint(
    "mamba2_hybrid", renamed={}, hidden=("attention_conv_kernel",), defaults={"mlp_gated": False, "norm": "rms"}
)

BLUEPRINTS: dict[str, Blueprint] = {
    # Mamba-3 (Lahoti et al., 2026), which like Llama alternates mixers and gated MLPs.
    "mamba3": Blueprint("mamba3", sizes={"130m": _size(768, 24, 12, 1536, pattern="M-")}),
    # Samba (Ren et al., 2024) and microsoft/Samba, lit_gpt/config.py.
    "samba": Blueprint(
        "samba",
        sizes={
            "130m": _size(768, 24, 12, 2048),
            "421m": _size(1536, 24, 12, 4096),
            "1.3b": _size(2304, 36, 18, 6144),
        },
        multiple=64,
    ),
    # H3 (Fu et al., 2023), appendix, and HazyResearch/H3. Its 125m is of the class that others here call 130m.
    "h3": Blueprint(
        "h3",
        sizes={
            "130m": _size(768, 24, 12, 3072, pattern=_h3_pattern("125m")),
            "125m": _size(768, 24, 12, 3072, pattern=_h3_pattern("125m")),
            "355m": _size(1024, 48, 16, 4096, pattern=_h3_pattern("355m")),
            "1.3b": _size(2048, 48, 16, 8192, pattern=_h3_pattern("1.3b")),
            "2.7b": _size(2560, 64, 20, 10240, pattern=_h3_pattern("2.7b")),
        },
        multiple=8,
    ),
    # A Transformer to compare with: Llama's layers at the widths of GPT-3 (Mamba, section 4.2, "Transformer++").
    "transformer": Blueprint(
        "llama",
        layered=False,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        sizes={
            "130m": _size(768, 12, 12, 2048),
            "370m": _size(1024, 24, 16, 2816),
            "790m": _size(1536, 24, 16, 4096),
            "1.4b": _size(2048, 24, 16, 5632),
            "2.8b": _size(2560, 32, 32, 6912),
        },
    ),
    # Models of transformers whose order of layers is their own.
    "jamba": _own_order("jamba", **_NO_EXPERTS, num_experts=1, rms_norm_eps=1e-5),
    "nemotron_h": _own_order("nemotron_h"),
    "zamba2": _own_order("zamba2"),
    "bamba": _own_order("bamba"),
    "falcon_h1": _own_order("falcon_h1"),
    "granitemoehybrid": _own_order("granitemoehybrid", **_NO_EXPERTS | {"num_experts_per_tok": 0}, num_local_experts=0),
}
