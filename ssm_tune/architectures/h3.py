"""H3 as models of transformers (Fu et al., 2023, "Hungry Hungry Hippos: Towards Language Modeling with State Space
Models").

y = output(q * diagonal(shift(k) * v)): the shift system lets a key meet the value of a later token, the diagonal one
remembers what met, and the query reads it (section 3.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ssm_tune.architectures.configs import H3Config
from ssm_tune.architectures.decoder import DecoderForCausalLM, DecoderModel, Mixer
from ssm_tune.kernels.linear_ssm import DiagonalSSM, diagonal_scan, diagonal_step, shift_scan, shift_step
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.states import continued, read_states, write_states


class ShiftSystem(nn.Module):
    """B and C (channels, state) of the shift system."""

    def __init__(self, channels: int, state_size: int) -> None:
        super().__init__()
        self.B = nn.Parameter(torch.zeros(channels, state_size))
        self.C = nn.Parameter(torch.zeros(channels, state_size))


class DiagonalSystem(nn.Module):
    """The diagonal system, of state_size / 2 complex states; see `kernels.linear_ssm.DiagonalSSM`."""

    def __init__(self, channels: int, state_size: int) -> None:
        super().__init__()
        states = state_size // 2
        self.log_dt = nn.Parameter(torch.zeros(channels))
        self.inv_A_real = nn.Parameter(torch.zeros(channels, states))
        self.A_imag = nn.Parameter(torch.zeros(channels, states))
        self.B = nn.Parameter(torch.zeros(channels, states, 2))
        self.C = nn.Parameter(torch.zeros(channels, states, 2))

    def forward(self) -> DiagonalSSM:
        """Its parameters, as the kernels take them."""
        return DiagonalSSM(self.log_dt, self.inv_A_real, self.A_imag, self.B, self.C)


class H3Mixer(Mixer):
    """One H3 layer. With ssm_head_dim d > 1, d keys and d values of a head meet as an outer product (section 3.2)."""

    def __init__(self, config: H3Config, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.ssm_head_dim
        self.heads = size // config.ssm_head_dim
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.shift = ShiftSystem(size, config.state_size)
        self.shift_D = nn.Parameter(torch.zeros(size))
        self.diagonal = DiagonalSystem(self.heads, config.state_size)
        self.D = nn.Parameter(torch.zeros(self.heads))
        self.out_proj = nn.Linear(size, size)  # begins unscaled in the published code, unlike the MLP's

    @torch.no_grad()
    def draw_parameters(self) -> None:
        """As the published code: S4D-Lin (A = -1/2 + i pi n, B one, C normal), a shift that delays, skips normal."""
        states = self.config.state_size // 2
        diagonal, shift = self.diagonal, self.shift
        low, high = math.log(self.config.time_step_min), math.log(self.config.time_step_max)
        init.uniform_(diagonal.log_dt, low, high)
        init.constant_(diagonal.inv_A_real, math.log(0.5))
        init.copy_(diagonal.A_imag, (math.pi * torch.arange(states)).expand_as(diagonal.A_imag))
        init.copy_(diagonal.B, torch.tensor([1.0, 0.0]).expand_as(diagonal.B))
        init.normal_(diagonal.C, std=0.5**0.5)
        bound = self.config.state_size**-0.5
        first = torch.zeros_like(shift.B)
        first[:, 0] = 1
        init.copy_(shift.B, first)
        init.uniform_(shift.C, -bound, bound)
        init.normal_(self.shift_D)
        init.normal_(self.D)

    def forward(self, x: Tensor, cache: Any = None, seq_idx: Tensor | None = None) -> Tensor:
        """x, and the result: (batch, length, hidden). seq_idx: (batch, length) int32, -1 is padding."""
        q, k, v = (project(linear, x) for linear in (self.q_proj, self.k_proj, self.v_proj))
        inputs, state = (continued(part) for part in read_states(cache, self.layer_idx))
        step = state is not None and x.shape[1] == 1 and seq_idx is None
        k, inputs = self._shift(k, inputs, seq_idx, step=step, keep=cache is not None)
        met = self._meet(k, v)
        remembered, state = self._remember(met, state, seq_idx, step=step, keep=cache is not None)
        if cache is not None:
            write_states(cache, self.layer_idx, inputs, state)
        with torch.autocast(x.device.type, enabled=False):
            y = remembered + met * self.D.to(met.dtype)
            # (..., key channel, value channel, heads) times the query of the key channel, summed over key channels
            y = (y.unflatten(-2, (self.head_dim, self.head_dim)) * self._by_head(q)[..., None, :]).sum(-3)
        return project(self.out_proj, y.flatten(-2).to(x.dtype))

    def _shift(
        self, k: Tensor, inputs: Tensor | None, seq_idx: Tensor | None, *, step: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Keys (batch, length, hidden) after the shift system and its skip, in float32, and its last inputs."""
        B, C = self.shift.B, self.shift.C
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        before = None if inputs is None else inputs[:, None]
        if step:
            y, after = shift_step(k, B, C, before)
        else:
            options = {"seq_idx": seq_idx, "initial_state": before, "return_final_state": keep}
            result = shift_scan(wide[:, :, None], B, C, **options)
            y, after = result if keep else (result, None)
            y = y[:, :, 0]
        return y + wide * self.shift_D.to(wide.dtype), None if after is None else after[:, 0]

    def _meet(self, k: Tensor, v: Tensor) -> Tensor:
        """The outer products of the keys and values of a head: (batch, length, head_dim * head_dim, heads), float32."""
        return (self._by_head(k)[..., :, None, :] * self._by_head(v)[..., None, :, :]).flatten(-3, -2)

    def _by_head(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., head_dim, heads), in float32 or wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(-1, -2)

    def _remember(
        self, met: Tensor, state: Tensor | None, seq_idx: Tensor | None, *, step: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        if step:
            y, state = diagonal_step(met[:, 0], self.diagonal(), state)
            return y[:, None], state
        options = {"seq_idx": seq_idx, "initial_state": state, "return_final_state": keep}
        result = diagonal_scan(met, self.diagonal(), **options)
        return result if keep else (result, None)


class H3Model(DecoderModel):
    """The backbone of H3."""

    config_class = H3Config
    mixer_class = H3Mixer
    linear_std = 0.02


class H3ForCausalLM(DecoderForCausalLM):
    """H3 with a language-model head."""

    config_class = H3Config
    backbone_class = H3Model
    linear_std = 0.02
