"""Calling stock's RMS norms as one kernel each."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


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
