"""Calling a projection as a module, so that adapters, quantised and sharded layers all take part.

Stock mixers hand `dt_proj.weight` and others to kernels raw, and adapters on them never train.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssm_tune.mixers.master_weights import keeps_master, master_linear

_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def project(linear: nn.Module, x: Tensor, quantised_dtype: torch.dtype | None = None) -> Tensor:
    """`linear(x)`, with x in the weight's dtype: float32 norms or recurrences meet weights of lower precision here.

    `quantised_dtype`: for x where the weight is stored quantised and does not tell; None leaves x as it is.
    """
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(input_dtype(linear, x, quantised_dtype))
    return master_linear(linear, x) if keeps_master(linear, x) else linear(x)


def input_dtype(linear: nn.Module, x: Tensor, quantised_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype that `project(linear, x)` computes in: what x is cast to, here or by autocast."""
    if torch.is_autocast_enabled(x.device.type):
        return autocast_dtype(x)
    dtype = linear.weight.dtype
    if dtype not in _COMPUTE_DTYPES:
        dtype = quantised_dtype
    return x.dtype if dtype is None else dtype


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives x before a matrix product; x's own outside it, and float64 anywhere."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def project_without_bias(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`linear(x)` without its bias, and the bias.

    dt_proj's bias is about -5 while what it is added to is small: their sum, rounded to bfloat16, changes step sizes
    by one or two per cent. The scan adds the bias in float32 instead. The bias is taken away for the duration of the
    call, rather than subtracted afterwards, so that every kind of layer (quantised, LoRA, DoRA) leaves it out before
    it rounds. Adapters of other kinds may do more to the output than add to it (IA3 scales it, bias and all): with
    them the bias stays where it is.
    """
    if "base_layer" in linear._modules and "lora_A" not in linear._modules:
        return project(linear, x), None
    owner = _bias_owner(linear)
    bias = owner._parameters["bias"]
    if bias is None:
        return project(linear, x), None
    owner._parameters["bias"] = None
    try:
        return project(linear, x), bias
    finally:
        owner._parameters["bias"] = bias


def _bias_owner(linear: nn.Module) -> nn.Module:
    """The layer that holds the bias in use, inside PEFT's wrappers."""
    while "bias" not in linear._parameters:
        if "base_layer" in linear._modules:
            linear = linear.base_layer
        elif "modules_to_save" in linear._modules:
            adapters = [] if linear.disable_adapters else linear.active_adapters
            linear = linear.modules_to_save[adapters[0]] if adapters else linear.original_module
        else:
            raise TypeError(f"{type(linear).__name__} has no bias of its own and wraps no layer that has")
    return linear
