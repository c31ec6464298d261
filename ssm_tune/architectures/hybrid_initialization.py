"""How new models with several kinds of layers begin: transformers' own start, corrected where it is not the papers'.

transformers starts A of a Mamba-2 block counting up with the heads, gives bamba, falcon_h1, granitemoehybrid and jamba
a step size near one that forgets within a token, draws short convolutions at 0.02, and scales little of what adds to
the residual stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ssm_tune.architectures.decoder import DecoderPreTrainedModel, head_std

_A_RANGE = (1.0, 16.0)  # Mamba-2's A_init_range
_STEP = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}  # Mamba, section 3.6
_INTO_RESIDUAL = ("out_proj", "o_proj", "down_proj", "output_linear")
# Root mean square of what all layers add to the residual stream at birth, at least (0.1 to 0.6 at width 768).
_RESIDUAL_RMS = 0.05


@torch.no_grad()
def initialize_hybrid(model: Any, seed: int) -> None:
    """Give every parameter and buffer of a model its first value, in place.

    Linear layers are normal with the config's initializer_range, those that add to the residual stream divided by the
    root of their number (GPT-2's rule); norms and D are one; A is 1..state_size in each channel (Mamba) or uniform in
    [1, 16] for each head (Mamba-2); step sizes are log-uniform (Mamba, section 3.6); convolutions as PyTorch's own.
    Our own models draw as their papers' code does (`_init_weights`).

    Args:
        model: on the CPU; its values do not matter. A tied head is left tied.
        seed: of every number drawn; torch's own random state is left as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
        if isinstance(model, DecoderPreTrainedModel):
            return
        _scale_residual(model)
        for module in model.modules():
            if "A_log" in module._parameters:
                _draw_mixer(module, model.config)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        std = head_std(model.config, _RESIDUAL_RMS)
        head.normal_(std=std)
        if head is not embedding:
            embedding.normal_(std=model.config.initializer_range)


def _scale_residual(model: nn.Module) -> None:
    found = [weight for name, weight in model.named_parameters() if _adds_to_residual(name)]
    std = model.config.initializer_range
    for weight in found:
        weight.normal_(std=std / math.sqrt(len(found)))


def _adds_to_residual(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in _INTO_RESIDUAL


def _draw_mixer(mixer: nn.Module, config: Any) -> None:
    """A, D, step size and convolution of one state-space mixer of transformers."""
    parameters = mixer._parameters
    A_log = parameters["A_log"]
    if A_log.dim() == 1:  # Mamba-2: one A a head
        A_log.uniform_(*_A_RANGE).log_()
    else:
        A_log.copy_(torch.arange(1, A_log.shape[-1] + 1, dtype=torch.float32).log().expand_as(A_log))
    parameters["D"].fill_(1.0)
    if "dt_bias" in parameters:
        step_bias = parameters["dt_bias"]
    elif "dt_proj" in mixer._modules:
        step_bias = mixer.dt_proj.bias
        bound = mixer.dt_proj.in_features**-0.5
        mixer.dt_proj.weight.uniform_(-bound, bound)
    else:
        step_bias = parameters["dt_proj_bias"]  # zamba: (heads, channels), with dt_proj_weight (heads, channels, rank)
        bound = parameters["dt_proj_weight"].shape[-1] ** -0.5
        parameters["dt_proj_weight"].uniform_(-bound, bound)
    steps = _STEP | {name: value for name, value in vars(config).items() if name in _STEP}
    low, high, floor = (steps[name] for name in _STEP)
    step = torch.empty_like(step_bias).uniform_(math.log(low), math.log(high)).exp().clamp(min=floor)
    step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    bound = mixer.conv1d.weight[0].numel() ** -0.5
    mixer.conv1d.weight.uniform_(-bound, bound)
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.uniform_(-bound, bound)
