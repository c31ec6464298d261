"""The sizes of a model that say how its tensors are split among tensor-parallel ranks, whatever its config class."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from ssm_tune.architectures.configs import ATTENTION, MIXER, MLP

_SYMBOLS = {"linear_attention": MIXER, "full_attention": ATTENTION, "mlp": MLP}


@dataclass(frozen=True)
class Geometry:
    """Layers by symbol, and widths.

    Attributes:
        pattern: M, * or - for each layer.
        inner, heads, groups, state: of the Mamba-2 mixer: channels, heads, groups of B and C, states.
        query_heads, key_heads, head_dim: of attention. fused: one in_proj makes q, k and v.
        gated: whether MLPs have a gate. ffn: their width.
        vocabulary: rows of the embedding.
    """

    pattern: str
    inner: int
    heads: int
    groups: int
    state: int
    vocabulary: int
    query_heads: int = 1
    key_heads: int = 1
    head_dim: int = 1
    fused: bool = False
    ffn: int = 1
    gated: bool = False

    @property
    def layers(self) -> int:
        return len(self.pattern)

    def sections(self, name: str) -> tuple[int, list[int]] | None:
        """How Megatron splits a tensor: the dimension, and the parts along it of which each rank has its share.

        None: every rank has all of it. `name` is Megatron's, and 0 stands for the whole of a dimension.
        """
        if name.endswith(("mixer.norm.weight", "mixer.A_log", "mixer.D", "mixer.dt_bias")):
            return 0, [0]
        if name.endswith("norm.weight") or name.endswith("layer_norm_weight"):
            return None
        grouped = self.groups * self.state
        if name.endswith("mixer.in_proj.weight"):  # z, x, B, C, dt
            return 0, [self.inner, self.inner, grouped, grouped, self.heads]
        if ".mixer.conv1d." in name:  # x, B, C
            return 0, [self.inner, grouped, grouped]
        if name.endswith("mlp.linear_fc1.weight") and self.gated:  # gate, up
            return 0, [self.ffn, self.ffn]
        rows = ("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")
        return (0, [0]) if name.endswith(rows) else (1, [0])


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """Of a config of one of the model types that this layout has: mamba2, nemotron_h, mamba2_hybrid."""
    if config.model_type == "mamba2":
        return Geometry(
            pattern=MIXER * config.num_hidden_layers,
            inner=config.num_heads * config.head_dim,
            heads=config.num_heads,
            groups=config.n_groups,
            state=config.state_size,
            vocabulary=config.vocab_size,
        )
    attention = {
        "query_heads": config.num_attention_heads,
        "key_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "ffn": config.intermediate_size,
        "groups": config.n_groups,
        "vocabulary": config.vocab_size,
    }
    if config.model_type == "nemotron_h":
        return Geometry(
            pattern="".join(_SYMBOLS[kind] for kind in config.layers_block_type),
            inner=config.mamba_num_heads * config.mamba_head_dim,
            heads=config.mamba_num_heads,
            state=config.ssm_state_size,
            **attention,
        )
    inner = config.expand * config.hidden_size
    return Geometry(
        pattern=config.pattern,
        inner=inner,
        heads=inner // config.mamba_head_dim,
        state=config.state_size,
        fused=True,
        gated=config.mlp_gated,
        **attention,
    )
