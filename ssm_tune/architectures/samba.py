"""Samba (Ren et al., 2024, "Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language
Modeling"): Mamba, MLP, sliding-window attention with rotary positions, MLP; each a pre-norm residual layer.
"""

from __future__ import annotations

from ssm_tune.architectures.configs import SambaConfig
from ssm_tune.architectures.decoder import DecoderForCausalLM, DecoderModel
from ssm_tune.architectures.hybrid import MambaMixer


class SambaModel(DecoderModel):
    """The backbone of Samba."""

    config_class = SambaConfig
    mixer_class = MambaMixer


class SambaForCausalLM(DecoderForCausalLM):
    """Samba with a language-model head."""

    config_class = SambaConfig
    backbone_class = SambaModel
