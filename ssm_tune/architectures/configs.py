"""The configs of our own models. Making one registers its models, so that transformers' Auto classes find them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

MIXER, ATTENTION, MLP = "M", "*", "-"  # how layers are written in a pattern, as in Megatron
SYMBOLS = (MIXER, ATTENTION, MLP)


def default_intermediate_size(hidden_size: int, gated: bool) -> int:
    """Four times the hidden size; 8/3 of it, in steps of 64, for the three matrices of a gated MLP (Llama, 2.2)."""
    return math.ceil(hidden_size / 24) * 64 if gated else 4 * hidden_size


def default_heads(hidden_size: int) -> int:
    """As many as have 64 channels each."""
    return max(hidden_size // 64, 1)


@strict
class DecoderConfig(PreTrainedConfig):
    """What all our models have: a stack of pre-norm residual layers, each a state-space mixer, attention or an MLP.

    Args:
        pattern: a symbol for each layer: M for the model's state-space mixer, * for attention, - for an MLP. None:
            the model's own way, for num_hidden_layers layers.
        intermediate_size: of an MLP; None: see `default_intermediate_size`.
        mlp_gated: down(act(gate) * up), else down(act(up)).
        num_attention_heads: None: of 64 channels each. num_key_value_heads: None: as many as attention heads.
        head_dim: of attention; None: hidden_size / num_attention_heads.
        rope_theta: of rotary positions; None: no positions.
        sliding_window: tokens that attention layers see, the newest among them; None: all.
        norm: "rms" or "layer".
    """

    model_type = ""
    mixer: ClassVar[str] = ""  # what M stands for
    repeated: ClassVar[str] = MIXER  # the pattern where none is given

    vocab_size: int = 50280
    hidden_size: int = 768
    num_hidden_layers: int = 24
    pattern: str | None = None
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    mlp_gated: bool = True
    mlp_bias: bool = False
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_theta: float | None = None
    sliding_window: int | None = None
    norm: str = "rms"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.pattern is None:
            self.pattern = (self.repeated * self.num_hidden_layers)[: self.num_hidden_layers]
        self.num_hidden_layers = len(self.pattern)
        if self.intermediate_size is None:
            self.intermediate_size = default_intermediate_size(self.hidden_size, self.mlp_gated)
        if self.num_attention_heads is None:
            self.num_attention_heads = default_heads(self.hidden_size)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        from ssm_tune.architectures.auto import register_models

        register_models(self.model_type)

    @property
    def layer_types(self) -> list[str]:
        """What transformers' caches and masks call each layer.

        Without attention in a model its MLPs count as short convolutions, whose cache stays empty: generate() asks how
        long the attention cache is unless all layers have recurrent ones.
        """
        names = {
            MIXER: "linear_attention",
            ATTENTION: "sliding_attention" if self.sliding_window else "full_attention",
            MLP: "mlp" if self.has_attention else "conv",
        }
        return [names.get(symbol, symbol) for symbol in self.pattern or ""]

    def validate_layer_type(self) -> None:
        """In the place of transformers' own check, which knows no layer that is an MLP alone."""
        unknown = sorted(set(self.pattern or "") - set(SYMBOLS))
        if unknown:
            raise ValueError(f"pattern: {', '.join(unknown)} is no layer; layers are {', '.join(SYMBOLS)}")

    def validate_heads(self) -> None:
        """Attention heads share keys in groups of one size."""
        if self.has_attention and (self.num_attention_heads or 1) % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.has_attention and self.turned_channels % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn channels in pairs")

    @property
    def has_attention(self) -> bool:
        return ATTENTION in (self.pattern or "")

    @property
    def turned_channels(self) -> int:
        """Channels of an attention head that positions turn."""
        return (self.head_dim or 0) if self.rope_theta is not None else 0


@strict
class Mamba3Config(DecoderConfig):
    """Mamba-3 (Lahoti et al., 2026), alone or with attention and MLPs between.

    Args:
        state_size, expand, mamba_head_dim, n_groups: of the mixer, of expand * hidden_size / mamba_head_dim heads.
        rope_fraction: of the state's channels that turn: 0.5 or 1.
        mimo_rank: inputs and outputs of each head; 0: SISO.
        output_norm: a grouped RMS norm before the gate.
        A_activation: what makes a decay rate of a projection: "softplus", as in the paper and mamba_ssm's releases, or
            "heavy_tail" (1 + x, below zero 1 / (1 - x)), as in its sources since June 2026.
        A_floor: the least decay rate. chunk_size: tokens computed at once.
    """

    model_type = "mamba3"
    mixer = "mamba3"

    state_size: int = 128
    expand: int = 2
    mamba_head_dim: int = 64
    n_groups: int = 1
    rope_fraction: float = 0.5
    mimo_rank: int = 0
    output_norm: bool = False
    A_activation: str = "softplus"
    A_floor: float = 1e-4
    chunk_size: int = 64
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4

    def validate_mixer(self) -> None:
        heads, rest = divmod(self.expand * self.hidden_size, self.mamba_head_dim)
        if rest:
            raise ValueError(
                f"expand * hidden_size is {self.expand * self.hidden_size}, not a multiple of mamba_head_dim "
                f"{self.mamba_head_dim}"
            )
        if heads % self.n_groups:
            raise ValueError(f"there are {heads} heads, not a multiple of n_groups {self.n_groups}")
        if self.A_activation not in ("softplus", "heavy_tail"):
            raise ValueError(f"A_activation is {self.A_activation!r}; it is softplus or heavy_tail")
        if self.rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction is {self.rope_fraction}; it is 0.5 or 1")
        if self.rope_angles < 1:
            raise ValueError(f"state_size {self.state_size} is too small for rope_fraction {self.rope_fraction}")

    @property
    def rope_angles(self) -> int:
        """Pairs of the state's channels that turn."""
        return int(self.state_size * self.rope_fraction) // 2


@strict
class Mamba2HybridConfig(DecoderConfig):
    """Mamba-2 with attention and MLPs in any order, each as mamba_ssm's MambaLMHeadModel has it.

    Args:
        state_size, expand, mamba_head_dim, n_groups, ...: of the mixer, as in transformers' Mamba2Config.
        attention_bias: of in_proj, which makes q, k and v. attention_out_bias: of out_proj.
        attention_conv_kernel: tokens that a causal convolution of q, k and v sees, the newest among them; 0: none.
        attention_mlp_size: twice the width of a gated MLP between the same in_proj and out_proj; 0: none.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        rotary_dim: channels of a head that positions turn, the first ones; 0: no positions. rope_interleaved: each
            goes with its neighbour, not with the one half of them further on.
    """

    model_type = "mamba2_hybrid"
    mixer = "mamba2"

    state_size: int = 128
    expand: int = 2
    mamba_head_dim: int = 64
    n_groups: int = 1
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    chunk_size: int = 256
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: list[float] | tuple[float, ...] = (0.0, float("inf"))
    attention_out_bias: bool = False
    attention_conv_kernel: int = 4
    attention_mlp_size: int = 0
    attention_scale: float | None = None
    rope_theta: float | None = 10000.0
    rotary_dim: int = 0
    rope_interleaved: bool = False

    def validate_mixer(self) -> None:
        heads, rest = divmod(self.expand * self.hidden_size, self.mamba_head_dim)
        if rest:
            raise ValueError(
                f"expand * hidden_size is {self.expand * self.hidden_size}, not a multiple of mamba_head_dim "
                f"{self.mamba_head_dim}"
            )
        if heads % self.n_groups:
            raise ValueError(f"there are {heads} heads, not a multiple of n_groups {self.n_groups}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= (self.head_dim or 0):
            raise ValueError(f"rotary_dim is {self.rotary_dim}; an even number up to {self.head_dim} is expected")
        if self.attention_mlp_size % 2:
            raise ValueError(f"attention_mlp_size is {self.attention_mlp_size}; an even number is expected")
        if self.sliding_window is not None:
            raise ValueError("sliding_window is not known here; attention sees all tokens")

    @property
    def turned_channels(self) -> int:
        return self.rotary_dim if self.rope_theta is not None else 0

    @property
    def layer_types(self) -> list[str]:
        """Attention layers that convolve keep a window beside their keys and values."""
        names = {"full_attention": "hybrid"} if self.attention_conv_kernel else {}
        return [names.get(kind, kind) for kind in super().layer_types]


@strict
class HybridConfig(DecoderConfig):
    """Mamba-1 with attention and MLPs, in any order.

    Args:
        state_size, expand, conv_kernel, time_step_rank, ...: as in transformers' MambaConfig.
    """

    model_type = "mamba_hybrid"
    mixer = "mamba"

    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_rank: int | str = "auto"
    time_step_scale: float = 1.0
    time_step_init_scheme: str = "random"
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4

    def __post_init__(self, **kwargs: Any) -> None:
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        super().__post_init__(**kwargs)


@strict
class SambaConfig(HybridConfig):
    """Samba (Ren et al., 2024): Mamba, MLP, sliding-window attention, MLP, again and again.

    num_hidden_layers counts residual layers, twice what the published configs call n_layer.
    """

    model_type = "samba"
    repeated = "M-*-"

    rope_theta: float | None = 10000.0
    sliding_window: int | None = 2048


@strict
class H3Config(DecoderConfig):
    """H3 (Fu et al., 2023): a shift and a diagonal system between projections, then an MLP; attention where given.

    num_hidden_layers counts residual layers, twice what the published configs call n_layer.

    Args:
        state_size: of both systems. ssm_head_dim: channels of keys and values that meet as an outer product.
    """

    model_type = "h3"
    mixer = "h3"
    repeated = "M-"

    vocab_size: int = 50264
    hidden_act: str = "gelu_pytorch_tanh"
    mlp_gated: bool = False
    mlp_bias: bool = True
    attention_bias: bool = True
    norm: str = "layer"
    state_size: int = 64
    ssm_head_dim: int = 1
    time_step_min: float = 0.001
    time_step_max: float = 0.1

    def validate_mixer(self) -> None:
        if self.hidden_size % self.ssm_head_dim:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of ssm_head_dim {self.ssm_head_dim}")
        if self.state_size % 2:
            raise ValueError(f"state_size {self.state_size} is odd; the diagonal system's states come in pairs")


CONFIGS: dict[str, type[DecoderConfig]] = {
    config.model_type: config for config in (Mamba3Config, HybridConfig, Mamba2HybridConfig, SambaConfig, H3Config)
}
