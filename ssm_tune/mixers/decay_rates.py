"""A = -exp(A_log), the rates at which states decay (Mamba, section 3.6), with as few kernels as there can be.

Left to autograd it takes four, of a few microseconds each in every layer: exp, its negation, and the gradients of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def decay_rates(A_log: Tensor) -> Tensor:
    """A of any shape, in float32."""
    return _Rates.apply(A_log.float())


class _Rates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A_log: Tensor) -> Tensor:
        A = torch.exp(A_log).neg_()
        ctx.save_for_backward(A)
        return A

    @staticmethod
    def backward(ctx: Any, dA: Tensor) -> Tensor:
        (A,) = ctx.saved_tensors
        return dA * A
