"""Mamba-3 as models of transformers (Lahoti et al., 2026, "Mamba-3: Improved Sequence Modeling using State Space
Principles"); parameters named and shaped as in mamba_ssm's Mamba3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from ssm_tune import kernels
from ssm_tune.architectures.configs import Mamba3Config
from ssm_tune.architectures.decoder import DecoderForCausalLM, DecoderModel, Mixer
from ssm_tune.architectures.layers import ResidualLinear, RMSNorm
from ssm_tune.architectures.step_size import draw_step_bias
from ssm_tune.kernels.mamba3 import Mamba3Inputs, Mamba3State, MimoFactors, mamba3_scan, mamba3_step
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.states import continued

_NORM_EPS = 1e-5  # of the norms inside the mixer, fixed in the published code


class GatedNorm(RMSNorm):
    """rms_norm(y) * silu(z), the mean over `group_size` channels."""

    def __init__(self, size: int, eps: float, group_size: int) -> None:
        super().__init__(size, eps)
        self.group_size = group_size

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return kernels.gated_rms_norm(y, z, self.weight, self.variance_epsilon, self.group_size, norm_before_gate=True)


class Mamba3Mixer(Mixer):
    """in_proj gives [z, x, B, C, dt, A, trap, angles]; the recurrence of `ssm_tune.kernels.mamba3`; gate; out_proj."""

    def __init__(self, config: Mamba3Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.inner = config.expand * config.hidden_size
        self.num_heads, self.head_dim = self.inner // config.mamba_head_dim, config.mamba_head_dim
        self.rank, self.groups, self.state_size = max(config.mimo_rank, 1), config.n_groups, config.state_size
        grouped = self.groups * self.rank * self.state_size
        heads = self.num_heads
        self.widths = [self.inner, self.inner, grouped, grouped, heads, heads, heads, config.rope_angles]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.B_bias = nn.Parameter(torch.ones(self.num_heads, self.rank, self.state_size))
        self.C_bias = nn.Parameter(torch.ones(self.num_heads, self.rank, self.state_size))
        self.B_norm = RMSNorm(self.state_size, eps=_NORM_EPS)
        self.C_norm = RMSNorm(self.state_size, eps=_NORM_EPS)
        if config.mimo_rank:
            factors = (self.num_heads, self.rank, self.head_dim)
            self.mimo_x = nn.Parameter(torch.ones(factors))
            self.mimo_z = nn.Parameter(torch.ones(factors))
            self.mimo_o = nn.Parameter(torch.ones(factors))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        if config.output_norm:
            self.norm = GatedNorm(self.inner, eps=_NORM_EPS, group_size=self.head_dim)
        self.out_proj = ResidualLinear(self.inner, config.hidden_size, bias=False)

    @torch.no_grad()
    def draw_parameters(self) -> None:
        """As the published module: step sizes log-uniform, biases of B and C and D one, MIMO an average over ranks."""
        draw_step_bias(self.dt_bias, self.config)
        for parameter in (self.B_bias, self.C_bias, self.D):
            init.ones_(parameter)
        if self.config.mimo_rank:
            init.constant_(self.mimo_x, 1 / self.rank)
            init.ones_(self.mimo_z)
            init.constant_(self.mimo_o, 1 / self.rank)

    def forward(self, x: Tensor, cache: Any = None, seq_idx: Tensor | None = None) -> Tensor:
        """x, and the result: (batch, length, hidden). seq_idx: (batch, length) int32, -1 is padding."""
        inputs = self._split(project(self.in_proj, x))
        mimo = self._mimo()
        fused = inputs._replace(z=None) if self.config.output_norm else inputs
        weights = {"B_bias": self.B_bias, "C_bias": self.C_bias, "D": self.D, "mimo": mimo}
        state = _read_state(cache, self.layer_idx, inputs, self.rank)
        if state is not None and x.shape[1] == 1 and seq_idx is None:
            token = Mamba3Inputs(*(None if part is None else part[:, 0] for part in fused))
            y, state = mamba3_step(token, **weights, state=state)
            y = y[:, None]
        else:
            chunk = self.config.chunk_size
            options = {"chunk_size": chunk, "seq_idx": seq_idx, "initial_state": state}
            if cache is None:
                y = mamba3_scan(**fused._asdict(), **weights, **options)
            else:
                y, state = mamba3_scan(**fused._asdict(), **weights, **options, return_final_state=True)
        if cache is not None:
            _write_state(cache, self.layer_idx, state)
        if self.config.output_norm:
            y = self._norm_and_gate(y, inputs.z)
        return project(self.out_proj, y.flatten(-2))

    def _split(self, projected: Tensor) -> Mamba3Inputs:
        z, x, B, C, dt, A, trap, angles = projected.split(self.widths, dim=-1)
        x, z = (part.unflatten(-1, (self.num_heads, self.head_dim)) for part in (x, z))
        B, C = (part.unflatten(-1, (self.rank, self.groups, self.state_size)) for part in (B, C))
        return Mamba3Inputs(
            x=x,
            z=z,
            B=self.B_norm(B),
            C=self.C_norm(C),
            dt=F.softplus(dt.float() + self.dt_bias.float()),
            A=-self._decay_rate(A.float()).clamp(min=self.config.A_floor),
            trap=trap,
            angles=angles,
        )

    def _decay_rate(self, x: Tensor) -> Tensor:
        if self.config.A_activation == "softplus":
            return F.softplus(x)
        return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))

    def _mimo(self) -> MimoFactors | None:
        if not self.config.mimo_rank:
            return None
        return MimoFactors(self.mimo_x, self.mimo_z, None if self.config.output_norm else self.mimo_o)

    def _norm_and_gate(self, y: Tensor, z: Tensor) -> Tensor:
        """y (..., heads, head_dim), with MIMO (..., rank, heads, head_dim): normed, gated, summed over ranks."""
        if self.config.mimo_rank:
            z = (z[..., None, :, :] * self.mimo_z.transpose(0, 1)).to(y.dtype)
        y = self.norm(y.flatten(-2), z.flatten(-2)).unflatten(-1, (self.num_heads, self.head_dim))
        return (y * self.mimo_o.transpose(0, 1)).sum(-3).to(y.dtype) if self.config.mimo_rank else y


# In a cache, what the last token leaves (its angle, k and x) is kept as if it were a convolution's window of one token.


def _read_state(cache: Any, layer: int, inputs: Mamba3Inputs, rank: int) -> Mamba3State | None:
    if cache is None:
        return None
    last, ssm = continued(cache.get_conv_state(layer)), continued(cache.get_recurrent_state(layer))
    if last is None:
        return None
    heads, head_dim = inputs.x.shape[-2:]
    state, angles = inputs.B.shape[-1], inputs.angles.shape[-1]
    angle, k, x = last[..., 0].split([heads * angles, rank * heads * state, heads * head_dim], dim=-1)
    return Mamba3State(
        angle.unflatten(-1, (heads, angles)),
        ssm,
        k.unflatten(-1, (rank, heads, state)),
        x.unflatten(-1, (heads, head_dim)),
    )


def _write_state(cache: Any, layer: int, state: Mamba3State) -> None:
    last = torch.cat([part.flatten(1) for part in (state.angle, state.k, state.x)], dim=-1)
    cache.update_conv_state(last[..., None], layer, conv_kernel_size=1)
    cache.update_recurrent_state(state.ssm, layer)


class Mamba3Model(DecoderModel):
    """The backbone of Mamba-3."""

    config_class = Mamba3Config
    mixer_class = Mamba3Mixer


class Mamba3ForCausalLM(DecoderForCausalLM):
    """Mamba-3 with a language-model head."""

    config_class = Mamba3Config
    backbone_class = Mamba3Model
