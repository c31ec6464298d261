"""Parameters that kernels read, rather than call a module: those of the short convolution and the gated norm."""

from __future__ import annotations

from torch import Tensor, nn


def weight_of(module: nn.Module) -> Tensor:
    """A module's weight, for a kernel.

    Raises:
        ValueError: an adapter in use on the module, which nothing would compute and which would never train.
    """
    if "base_layer" in module._modules and not (module.disable_adapters or module.merged):
        base = type(module.base_layer).__name__
        raise ValueError(
            f"There is an adapter ({type(module).__name__}) on a {base} whose weight is read by a kernel: it would "
            "never take part. Leave the module out of the adapter's targets; to train it whole, use PEFT's "
            "modules_to_save (in a recipe adapter.train_also or adapter.modules_to_save)."
        )
    return module.weight


def kernel_of(conv1d: nn.Module) -> Tensor:
    """A depthwise convolution's weight (channels, width), for a kernel: a view whose gradient is one too."""
    return weight_of(conv1d).squeeze(1)
