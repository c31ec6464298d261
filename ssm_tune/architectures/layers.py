"""What stands between the state-space mixers of our own models: norms, attention and MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ssm_tune import kernels
from ssm_tune.architectures.configs import DecoderConfig
from ssm_tune.mixers.projections import project


class RMSNorm(nn.Module):
    """Of the last dimension; the input, a float32 residual stream perhaps, is not rounded before."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)


class LayerNorm(nn.LayerNorm):
    """In float32, for an input of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            normed = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)


class ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream, so that it begins smaller in deeper models."""


def make_norm(config: DecoderConfig) -> nn.Module:
    """The norm of a residual layer."""
    kind = {"rms": RMSNorm, "layer": LayerNorm}[config.norm]
    return kind(config.hidden_size, eps=config.layer_norm_epsilon)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        assert inner is not None
        if config.mlp_gated:
            self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = ResidualLinear(inner, config.hidden_size, bias=bias)
        self.gated = config.mlp_gated
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        up = project(self.up_proj, x)
        inner = self.act(project(self.gate_proj, x)) * up if self.gated else self.act(up)
        return project(self.down_proj, inner)


class Attention(nn.Module):
    """Causal attention with grouped keys, rotary positions or none, over all tokens or the last `sliding_window`."""

    is_causal = True

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim and config.num_attention_heads and config.num_key_value_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.sliding_window = config.sliding_window
        inner, shared = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.attention_bias)
        self.o_proj = ResidualLinear(inner, config.hidden_size, bias=config.attention_bias)

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
        """x, and the result: (batch, length, hidden). rotary: see `rotary_positions`.

        seq_idx is for attention that also convolves; here the mask and the positions say where documents begin.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(linear, x).view(heads).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if rotary is not None:
            q, k = turn(q, *rotary), turn(k, *rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        y, _ = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return project(self.o_proj, y.flatten(2))


def rotary_positions(positions: Tensor, channels: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (batch, 1, length, channels / 2), float32, of positions (batch, length) (RoFormer, eq. 15)."""
    frequencies = theta ** -(torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The first channels of x (batch, heads, length, head_dim) turned in pairs, as many as there are angles for.

    Channel i goes with the one half of the turned channels further on; interleaved: with its neighbour. Computed in
    float32.
    """
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    turned = turned.to(cos.dtype)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def attend_eagerly(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain PyTorch, with transformers' signature: q, k, v (batch, heads, length, head_dim)."""
    k, v = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout, module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def draw_linear(linear: nn.Linear | nn.Conv1d, std: float | None, scale: float = 1.0) -> None:
    """A first value: normal with a standard deviation `std`, or None: PyTorch's own, uniform in 1/sqrt(fan_in).

    Biases are zero, but a convolution's is drawn as its weight is (PyTorch's own rule). `scale`: of the weight.
    """
    bound = linear.weight[0].numel() ** -0.5
    if std is None:
        init.uniform_(linear.weight, -bound * scale, bound * scale)
    else:
        init.normal_(linear.weight, std=std * scale)
    if linear.bias is None:
        return
    if isinstance(linear, nn.Conv1d):
        init.uniform_(linear.bias, -bound, bound)
    else:
        init.zeros_(linear.bias)
