"""Mamba-2 with attention and MLPs, as mamba_ssm's MambaLMHeadModel builds them (Dao and Gu, 2024, "Transformers are
SSMs"; state-spaces/mamba2attn-2.7b); the parameters of mixers and attention are named and shaped as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ssm_tune.architectures.configs import Mamba2HybridConfig
from ssm_tune.architectures.decoder import DecoderForCausalLM, DecoderModel, Mixer
from ssm_tune.architectures.layers import ResidualLinear, RMSNorm, attend_eagerly, turn
from ssm_tune.architectures.step_size import draw_step_bias
from ssm_tune.mixers.convolution import convolve_row, convolve_token
from ssm_tune.mixers.mamba2 import Mamba2Mixer as Mamba2Forward
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.states import read_states, write_states

_A_RANGE = (1.0, 16.0)  # mamba_ssm's A_init_range


class GroupedNorm(RMSNorm):
    """The weight of the norm after the gate; channels of a group share one mean."""

    def __init__(self, size: int, eps: float, group_size: int) -> None:
        super().__init__(size, eps)
        self.group_size = group_size


class Mamba2Mixer(Mamba2Forward, Mixer):
    """Mamba-2 (Dao and Gu, 2024, figure 6), with the parameters of transformers' mixer and this package's forward."""

    # Patched classes are made at run time and pickled by their parts; this one is a class like any other.
    __reduce_ex__ = object.__reduce_ex__

    def __init__(self, config: Mamba2HybridConfig, layer_idx: int) -> None:
        super().__init__()
        inner = config.expand * config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.intermediate_size = inner
        self.num_heads, self.head_dim = inner // config.mamba_head_dim, config.mamba_head_dim
        self.n_groups, self.ssm_state_size = config.n_groups, config.state_size
        self.conv_dim = inner + 2 * config.n_groups * config.state_size
        self.chunk_size, self.time_step_limit = config.chunk_size, config.time_step_limit
        self.in_proj = nn.Linear(config.hidden_size, inner + self.conv_dim + self.num_heads, bias=config.use_bias)
        kernel = config.conv_kernel
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, kernel, groups=self.conv_dim, padding=kernel - 1, bias=config.use_conv_bias
        )
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.norm = GroupedNorm(inner, eps=config.layer_norm_epsilon, group_size=inner // config.n_groups)
        self.out_proj = ResidualLinear(inner, config.hidden_size, bias=config.use_bias)

    @torch.no_grad()
    def draw_parameters(self) -> None:
        """A uniform in [1, 16], D one, step sizes log-uniform, as mamba_ssm's Mamba2."""
        init.copy_(self.A_log, torch.empty_like(self.A_log, dtype=torch.float32).uniform_(*_A_RANGE).log())
        init.ones_(self.D)
        draw_step_bias(self.dt_bias, self.config)


class ConvolvedAttention(nn.Module):
    """Causal attention whose q, k and v, of one projection, see the last few tokens through a convolution first."""

    is_causal = True

    def __init__(self, config: Mamba2HybridConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim and config.num_attention_heads and config.num_key_value_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_dropout = config.attention_dropout
        inner, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.widths = [inner, shared, shared]
        dim, kernel = sum(self.widths), config.attention_conv_kernel
        self.mlp_size = config.attention_mlp_size
        self.in_proj = nn.Linear(config.hidden_size, dim + self.mlp_size, bias=config.attention_bias)
        self.conv1d = nn.Conv1d(dim, dim, kernel, groups=dim, padding=kernel - 1) if kernel else None
        self.out_proj = ResidualLinear(inner + self.mlp_size // 2, config.hidden_size, bias=config.attention_out_bias)

    def forward(
        self,
        x: Tensor,
        *,
        cache: Any = None,
        attention_mask: Any = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """x, and the result: (batch, length, hidden). seq_idx: (batch, length) int32, -1 is padding."""
        qkv, beside = project(self.in_proj, x).split([sum(self.widths), self.mlp_size], dim=-1)
        parts = self._convolve(qkv, cache, seq_idx).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if rotary is not None:
            interleaved = self.config.rope_interleaved
            q, k = (turn(part, *rotary, interleaved=interleaved) for part in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        dropout = self.attention_dropout if self.training else 0.0
        y, _ = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        y = y.flatten(2)
        if self.mlp_size:
            up, gate = beside.chunk(2, dim=-1)
            y = torch.cat([y, up * F.silu(gate)], dim=-1)
        return project(self.out_proj, y)

    def _convolve(self, qkv: Tensor, cache: Any, seq_idx: Tensor | None) -> Tensor:
        if self.conv1d is None:
            return qkv
        window, _ = read_states(cache, self.layer_idx)
        if window is not None and qkv.shape[1] == 1 and seq_idx is None:
            return convolve_token(self.conv1d, qkv[:, 0], window, activation=None)[:, None]
        keep = cache is not None
        qkv, window = convolve_row(self.conv1d, qkv, window, seq_idx, keep_window=keep, activation=None)
        if keep:
            write_states(cache, self.layer_idx, window)
        return qkv


class Mamba2HybridModel(DecoderModel):
    """The backbone of a Mamba-2 hybrid."""

    config_class = Mamba2HybridConfig
    mixer_class = Mamba2Mixer
    attention_class = ConvolvedAttention


class Mamba2HybridForCausalLM(DecoderForCausalLM):
    """A Mamba-2 hybrid with a language-model head."""

    config_class = Mamba2HybridConfig
    backbone_class = Mamba2HybridModel
