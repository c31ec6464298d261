"""Mamba-1 with attention and MLPs in any order, for patterns that no model of transformers has."""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init

from ssm_tune.architectures.configs import HybridConfig
from ssm_tune.architectures.decoder import DecoderForCausalLM, DecoderModel, Mixer
from ssm_tune.architectures.layers import ResidualLinear
from ssm_tune.architectures.step_size import draw_step_bias
from ssm_tune.mixers.mamba import MambaMixer as MambaForward


class MambaMixer(MambaForward, Mixer):
    """Mamba-1 (Mamba, section 3.4), with the parameters of transformers' MambaMixer and this package's forward."""

    # Patched classes are made at run time and pickled by their parts; this one is a class like any other.
    __reduce_ex__ = object.__reduce_ex__

    def __init__(self, config: HybridConfig, layer_idx: int) -> None:
        super().__init__()
        inner, rank = config.expand * config.hidden_size, int(config.time_step_rank)
        self.config = config
        self.layer_idx = layer_idx
        self.time_step_rank = rank
        self.ssm_state_size = config.state_size
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            inner, inner, config.conv_kernel, groups=inner, padding=config.conv_kernel - 1, bias=config.use_conv_bias
        )
        self.x_proj = nn.Linear(inner, rank + 2 * config.state_size, bias=False)
        self.dt_proj = nn.Linear(rank, inner, bias=True)
        self.A_log = nn.Parameter(torch.zeros(inner, config.state_size))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = ResidualLinear(inner, config.hidden_size, bias=config.use_bias)

    @torch.no_grad()
    def draw_parameters(self) -> None:
        """S4D-Real and log-uniform step sizes (Mamba, section 3.6)."""
        states = torch.arange(1, self.ssm_state_size + 1, dtype=torch.float32)
        init.copy_(self.A_log, states.log().expand_as(self.A_log))
        init.ones_(self.D)
        bound = self.config.time_step_scale * self.time_step_rank**-0.5
        if self.config.time_step_init_scheme == "constant":
            init.constant_(self.dt_proj.weight, bound)
        else:
            init.uniform_(self.dt_proj.weight, -bound, bound)
        draw_step_bias(self.dt_proj.bias, self.config)


class HybridModel(DecoderModel):
    """The backbone of a Mamba-1 hybrid."""

    config_class = HybridConfig
    mixer_class = MambaMixer


class HybridForCausalLM(DecoderForCausalLM):
    """A Mamba-1 hybrid with a language-model head."""

    config_class = HybridConfig
    backbone_class = HybridModel
