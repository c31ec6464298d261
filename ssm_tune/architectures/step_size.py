"""The first value of a step size's bias (Mamba, section 3.6)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init


@torch.no_grad()
def draw_step_bias(bias: Tensor, config: Any) -> None:
    """softplus(bias) log-uniform in [time_step_min, time_step_max]."""
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    step = torch.empty_like(bias, dtype=torch.float32).uniform_(low, high).exp().clamp(min=config.time_step_floor)
    init.copy_(bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
