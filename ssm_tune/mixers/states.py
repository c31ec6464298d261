"""Reading and writing a mixer's states in transformers' cache, in transformers' own format.

A cache holds, per layer, the last `conv_kernel` inputs of the convolution (batch, dim, conv_kernel), the newest last,
and the recurrent state. Kernels take the last `conv_kernel` - 1 inputs, all that the next output can see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def read_states(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """The convolution's window (batch, dim, conv_kernel - 1) and the recurrent state, both views into the cache; None
    if new.
    """
    if cache is None:
        return None, None
    window, state = cache.get_conv_state(layer), cache.get_recurrent_state(layer)
    return (None if window is None else window[..., 1:]), state


def continued(state: Tensor | None) -> Tensor | None:
    """A state to start a scan from. Autograd may need it after the cache has been overwritten, hence a copy then."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def write_states(cache: Any, layer: int, window: Tensor, state: Tensor | None = None) -> None:
    """Put a window (batch, dim, conv_kernel - 1) and a recurrent state into the cache."""
    cache.update_conv_state(F.pad(window, (1, 0)), layer, conv_kernel_size=window.shape[-1] + 1)
    if state is not None:
        cache.update_recurrent_state(state, layer)
