"""Calling stock's RMS norms as one kernel each, or together with the residual stream's addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssm_tune import kernels
from ssm_tune.mixers.watched import is_watched

# Kinds of device where addition and norm are one kernel. (): nowhere, to compare.
DEVICES = ("cuda",)


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)` as one call of PyTorch's, which keeps x for backward; the stock module keeps x normalised as well.

    Serves norms with a weight and Falcon-Mamba's without. One that is wrapped by an adapter that trains it, changed or
    watched by somebody is called as it is.
    """
    kept = vars(norm)
    if "forward" in kept or norm._forward_hooks or norm._forward_pre_hooks:
        return norm(x)
    if "variance_epsilon" in kept:
        return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.variance_epsilon)
    if "eps" in kept and not norm._parameters:
        return F.rms_norm(x, x.shape[-1:], None, norm.eps).to(x.dtype)  # autocast may widen it
    return norm(x)


def normalised_parts(norms: Sequence[nn.Module], x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """`normalised` of each part of x (..., sum of sizes), by the norm in its place; one kernel, where no norm has a
    weight and nobody watches one."""
    eps = {vars(norm).get("eps") for norm in norms}
    plain = all("eps" in vars(norm) and not norm._parameters and not is_watched(norm) for norm in norms)
    if x.device.type in DEVICES and plain and len(eps) == 1:
        return kernels.rms_norm_parts(x, sizes, eps.pop())
    return tuple(normalised(norm, part) for norm, part in zip(norms, x.split(list(sizes), dim=-1), strict=True))


def add_and_normalise(
    norm: nn.Module,
    stream: Tensor,
    added: Tensor | None,
    dtype: torch.dtype,
    otherwise: Callable[[nn.Module, Tensor], Tensor] = normalised,
) -> tuple[Tensor, Tensor]:
    """The residual stream with `added`, and its norm: one kernel, where the norm is an RMS norm that nobody watches.

    Args:
        added: None: nothing. A dtype wider than the stream's widens the stream, as adding does.
        dtype: in which the norm is read: the kernel writes it so. Where there is none, the reader casts.
        otherwise: calls the norm, after an addition of its own.
    """
    if stream.device.type not in DEVICES or not _is_plain(norm):
        stream = stream if added is None else stream + added
        return stream, otherwise(norm, stream)
    if added is not None:
        stream = stream.to(torch.promote_types(stream.dtype, added.dtype))
    normed, stream = kernels.residual_rms_norm(stream, added, norm.weight, norm.variance_epsilon, dtype)
    return stream, normed


def last_norm(norm: nn.Module, stream: Tensor) -> Tensor:
    """`norm(stream)` of a backbone's end, in the same dtype; one kernel where `add_and_normalise` is one."""
    if stream.device.type not in DEVICES or not _is_plain(norm):
        return norm(stream)
    dtype = torch.promote_types(stream.dtype, norm.weight.dtype)
    return kernels.residual_rms_norm(stream, None, norm.weight, norm.variance_epsilon, dtype)[0]


def _is_plain(norm: nn.Module) -> bool:
    """Whether a norm is weight * x / sqrt(mean(x^2) + eps), whole on this device, and need not be called.

    Hooks that only raise it to float32, which the kernel computes in anyway, may be passed by.
    """
    own = vars(norm)
    hooks = (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values())
    return (
        "variance_epsilon" in own
        and type(norm._parameters.get("weight")) is nn.Parameter
        and "forward" not in own
        and all(getattr(hook, "only_float32", False) for hook in hooks)
        and not (own["_backward_hooks"] or own["_backward_pre_hooks"])
    )
