"""How new models begin: the initialisation of the Mamba papers' reference code, which is not that of transformers.

transformers' own start (every Linear and the embedding with a standard deviation of 0.1, Mamba-2's A counting up with
the heads) costs about four nats of loss at the first step and lets A of the last heads forget within a token.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedConfig

_A_RANGE = (1.0, 16.0)  # Mamba-2's A_init_range
# Root mean square of what all blocks together add to the residual at the start, at every width and depth (measured);
# Mamba-2 norms the input of its out_proj, the others do not.
_RESIDUAL_RMS = {"mamba": 0.042, "falcon_mamba": 0.042, "mamba2": 0.58}


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Give every parameter of a Mamba, Falcon-Mamba or Mamba-2 model its first value, in place.

    Linear layers are uniform within 1/sqrt(fan_in), the embedding normal (see `_embedding_std`), a mixer's out_proj
    divided by the root of the number of layers (GPT-2's rule for what adds to the residual); norms and D are one; A is
    1..state_size in each channel (Mamba, section 3.6, "S4D-Real") or uniform in [1, 16] for each head (Mamba-2); the
    step size softplus(bias) is log-uniform in [time_step_min, time_step_max] (Mamba, section 3.6).

    Args:
        model: on the CPU; its values do not matter. A tied head is left tied.
        seed: of every number drawn.

    Raises:
        NotImplementedError: the model has a parameter or buffer that no rule here covers.
    """
    generator = torch.Generator().manual_seed(seed)
    covered: set[int] = set()
    for module in model.modules():  # the embedding comes before a head that is tied to it
        weight = getattr(module, "weight", None)
        if weight is None or id(weight) in covered:
            continue
        if isinstance(module, nn.Embedding):
            weight.normal_(std=_embedding_std(model), generator=generator)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            _initialize_linear(module, generator)
        elif "RMSNorm" in type(module).__name__:
            weight.fill_(1.0)
        else:
            continue
        covered.update(map(id, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    for module in model.modules():
        if hasattr(module, "A_log"):
            _initialize_mixer(module, model.config, generator)
            covered.update(map(id, module.parameters(recurse=False)))
    tensors = (*model.named_parameters(), *model.named_buffers())
    missed = [name for name, tensor in tensors if id(tensor) not in covered]
    if missed:
        raise NotImplementedError(f"no rule of initialisation covers {', '.join(missed)}")


def _embedding_std(model: nn.Module) -> float:
    """The reference's 0.02 (the config's initializer_range), or less where a tied head would then start far above ln V.

    With a tied head every token first predicts itself: the embedding is still in the residual, so its own logit is
    hidden_size * std^2 / rms, whose exponential must stay well below the vocabulary; and logits of variance
    hidden_size * std^2 cost half of that. With 0.02 a Mamba of width 2560 starts at 21.9 where ln V is 10.8.
    """
    config = model.config
    std: float = config.initializer_range
    if not config.tie_word_embeddings:
        return std
    nats = math.log(config.vocab_size)
    own_logit = _RESIDUAL_RMS[config.model_type] * max(nats - 3.0, 0.5)
    return min(std, math.sqrt(min(own_logit, 0.08 * nats) / config.hidden_size))


def _initialize_linear(module: nn.Linear | nn.Conv1d, generator: torch.Generator) -> None:
    """PyTorch's own rule (kaiming uniform, a = sqrt 5): within 1/sqrt(fan_in), a convolution's bias as well."""
    bound = module.weight[0].numel() ** -0.5
    module.weight.uniform_(-bound, bound, generator=generator)
    if module.bias is None:
        return
    if isinstance(module, nn.Conv1d):
        module.bias.uniform_(-bound, bound, generator=generator)
    else:
        module.bias.zero_()


def _initialize_mixer(mixer: nn.Module, config: PreTrainedConfig, generator: torch.Generator) -> None:
    """The recurrence of one mixer, and its out_proj scaled down; its linear layers have been drawn before."""
    mixer.D.fill_(1.0)
    if hasattr(mixer, "dt_bias"):  # Mamba-2: one A and one step size a head
        mixer.A_log.uniform_(*_A_RANGE, generator=generator).log_()
        step_bias = mixer.dt_bias
    else:
        states = torch.arange(1, mixer.A_log.shape[1] + 1, dtype=torch.float32)
        mixer.A_log.copy_(states.log().expand_as(mixer.A_log))
        bound = config.time_step_scale * mixer.dt_proj.in_features**-0.5
        if config.time_step_init_scheme == "constant":
            mixer.dt_proj.weight.fill_(bound)
        else:
            mixer.dt_proj.weight.uniform_(-bound, bound, generator=generator)
        step_bias = mixer.dt_proj.bias
    step_bias.uniform_(math.log(config.time_step_min), math.log(config.time_step_max), generator=generator)
    step = step_bias.exp().clamp(min=config.time_step_floor)
    step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    mixer.out_proj.weight.div_(math.sqrt(config.num_hidden_layers))
