"""Whether bitsandbytes multiplies by packed weights on a device: called once in 4 and in 8 bits, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssm_tune.doctor.report import PackageReport
from ssm_tune.kernels.backends import KernelTrial

_SIZE = 64
# Rounding to 4 bits is 9 % of a random weight, to 8 bits, of weights and inputs, 2 %.
_TOLERANCE = {"linear_4bit": 0.15, "linear_8bit": 0.05}


def try_packed_weights(packages: list[PackageReport], device: torch.device) -> list[KernelTrial]:
    """One trial for each width; "" for no failure. Without bitsandbytes: that it is not installed, or its error."""
    state = next(package for package in packages if package.name == "bitsandbytes")
    trials = []
    for operation, tolerance in _TOLERANCE.items():
        if state.status == "absent":
            failure = "bitsandbytes is not installed"
        elif state.status == "broken":
            failure = f"does not work here: {state.error}"
        else:
            failure = _try(operation, tolerance, device)
        trials.append(KernelTrial(operation, "bitsandbytes", "installed", "bitsandbytes", device.type, failure))
    return trials


def _try(operation: str, tolerance: float, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    try:
        layer = _LAYERS[operation](weight, device)
        x_here = x.clone().to(device, layer[1]).requires_grad_()
        y = layer[0](x_here)
        (gradient,) = torch.autograd.grad(y, x_here, torch.ones_like(y))
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"does not work here: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    for name, found, expected in (("output", y, x @ weight.T), ("gradient", gradient, weight.sum(0).expand(_SIZE, -1))):
        off = _difference(found, expected)
        if not off <= tolerance:
            return f"does not work here: the {name} differs by {off:.2g}, relative, from that of plain weights"
    return ""


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float().cpu() - expected).norm() / expected.norm())


def _linear_4bit(weight: Tensor, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(_SIZE, _SIZE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.support_avx512bf16_for_cpu = False  # as our models have it, see ssm_tune.quantization
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    return layer.to(device), torch.float32


def _linear_8bit(weight: Tensor, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(_SIZE, _SIZE, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return layer.to(device), torch.bfloat16 if device.type == "cuda" else torch.float32


_LAYERS: dict[str, Callable[[Tensor, torch.device], tuple[Any, torch.dtype]]] = {
    "linear_4bit": _linear_4bit,
    "linear_8bit": _linear_8bit,
}
