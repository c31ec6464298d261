"""LoRA's linear layers without copies of whole activations.

PEFT keeps adapters in float32 and casts what comes in to that: under autocast two casts of whole activations for every
adapter, of which the second result is kept for backward, and the product with the scale and the sum with the base's
output are passes over the output of their own. Here the small A and B are cast instead (they stay float32 masters),
what comes in is kept once, whoever else keeps it, and scale and sum are part of the matrix product. Nothing is kept for
the frozen weight, and no gradient of it is computed.

    y = x W' + bias + scale (x A') B'          dx = dy W + scale (dy B) A

The gradients of A and B come out of the matrix product in the masters' precision.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from ssm_tune import kernels
from ssm_tune.kernels.products import narrow_gradient, narrow_linear, scaled_product
from ssm_tune.mixers.cast_together import CastLayer, in_dtype
from ssm_tune.mixers.later_gradients import LaterGradient, LaterLayer
from ssm_tune.mixers.watched import is_watched

# How many times the memory traffic of copies has to be saved by them.
_COPIES_SAVE = 4
# Numbers of 2 bytes in a row of a matrix that a GPU's fast products take: a multiple of this.
_ALIGNED = 8


def cast_adapters_only(model: nn.Module) -> nn.Module:
    """Let LoRA on plain linear layers compute as above; in place. Names, parameters and files stay as they are."""
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = DirectLinear
    return model


class DirectLinear(lora.Linear, LaterLayer, CastLayer):
    """PEFT's layer in all but `forward`, which falls back to PEFT's wherever there is more to do than one plain
    adapter on a frozen `nn.Linear` in the dtype of the computation."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., in), and the result: (..., out), in the dtype of the frozen weight."""
        adapter = None if args or kwargs else self._only_adapter()
        if adapter is None or not self._is_plain(adapter, x):
            return super().forward(x, *args, **kwargs)
        base, dtype = self.base_layer, self.base_layer.weight.dtype
        A, B = (half[adapter].weight for half in (self.lora_A, self.lora_B))
        x = x.to(dtype)
        if not self._drops(adapter):
            return _LoraLinear.apply(x, base.weight, base.bias, A, B, self.scaling[adapter], None)
        # Two inputs then: what the adapter gets is not what the base gets.
        A, B, dropout = A.to(dtype), B.to(dtype), self.lora_dropout[adapter]
        delta = F.linear(F.linear(dropout(x), A).mul(self.scaling[adapter]), B)
        y = torch.addmm(delta.flatten(0, -2), x.flatten(0, -2), base.weight.t()).view(delta.shape)
        return y if base.bias is None else y + base.bias

    def later_factor(self, like: Tensor) -> Tensor | None:
        """A, where `forward` would do the plain thing and nobody has to see it."""
        adapter = self._only_adapter()
        if adapter is None or not self._is_plain(adapter, like) or self._drops(adapter) or is_watched(self):
            return None
        return self.lora_A[adapter].weight

    def forward_later(self, x: Tensor, later: LaterGradient) -> Tensor:
        adapter, base = self._only_adapter(), self.base_layer
        x, A, B = x.to(base.weight.dtype), later.factor.detach(), self.lora_B[adapter].weight
        return _LoraLinear.apply(x, base.weight, base.bias, A, B, self.scaling[adapter], later)

    def weights_to_cast(self, like: Tensor) -> tuple[list[Tensor], torch.dtype] | None:
        adapter = self._only_adapter()
        if adapter is None or not self._is_plain(adapter, like) or self._drops(adapter):
            return None
        return [half[adapter].weight for half in (self.lora_A, self.lora_B)], self.base_layer.weight.dtype

    def _drops(self, adapter: str) -> bool:
        return self.training and not isinstance(self.lora_dropout[adapter], nn.Identity)

    def _only_adapter(self) -> str | None:
        """The adapter in use, if it is the only one and is not merged."""
        if self.disable_adapters or self.merged:
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        return active[0] if len(active) == 1 else None

    def _is_plain(self, adapter: str, x: Tensor) -> bool:
        base, halves = self.base_layer, (self.lora_A[adapter], self.lora_B[adapter])
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.weight.dtype
        frozen = not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
        return (
            type(base) is nn.Linear
            and frozen
            and base.weight.dtype == dtype
            and adapter not in self.lora_variant
            and all(type(half) is nn.Linear and half.bias is None for half in halves)
            and not any(is_watched(layer) for layer in (base, *halves))
        )


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scale: float,
        later: LaterGradient | None,
    ) -> Tensor:
        low_A, low_B = in_dtype(A, x.dtype), in_dtype(B, x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.flatten(0, -2)
            if _is_narrow(rows, weight.shape[0], len(A)):
                h, y = narrow_linear(rows, weight, low_A, low_B, scale)
            else:
                # The adapter's part first, and the base's product added to it before anything is rounded: the other
                # way round, a part that is smaller than a rounding of the base's output is lost in it, for every token
                # alike.
                h, y = kernels.low_rank_product(rows, low_A, low_B, scale)
                y.addmm_(rows, weight.t())
            y = y.view(*x.shape[:-1], weight.shape[0])
            if bias is not None:
                y.add_(bias)
        need_A, need_B = ctx.needs_input_grad[3:5]
        ctx.save_for_backward(x if need_A else None, weight, low_A, low_B, h if need_B else None)
        ctx.scale, ctx.dtypes, ctx.later = scale, (A.dtype, B.dtype), later
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, A, B, h = ctx.saved_tensors
        A_dtype, B_dtype = ctx.dtypes
        dA = None
        with torch.autocast(dy.device.type, enabled=False):
            flat = dy.flatten(0, -2)
            needed = A if ctx.needs_input_grad[0] else None
            dh, dB, dx = _gradients(flat, weight, needed, B, h, ctx.scale, B_dtype)
            dx = None if dx is None else dx.view(*dy.shape[:-1], weight.shape[1])
            if x is not None:
                dA = kernels.narrow_weight_gradient(dh, x.flatten(0, -2), A_dtype)
        if ctx.later is not None:
            ctx.later.set_slope(dh)
        return dx, None, None, dA, dB, None, None


def _gradients(
    dy: Tensor, weight: Tensor, A: Tensor | None, B: Tensor, h: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dh (tokens, r) = scale dy B; dB (out, r) in `dtype`, None where h is None, since B is not trained; and dx
    (tokens, in), None where A is None, since nobody wants it."""
    narrow = A is not None and _is_narrow(dy, weight.shape[1], len(A))
    part = dB = None
    if h is None:
        dh = scaled_product(dy, B, scale)
    else:
        dh, dB, part = kernels.low_rank_gradients(dy, B, h, scale, dtype, None if narrow else A)
    if A is None:
        return dh, dB, None
    if narrow:
        return dh, dB, narrow_gradient(dy, weight, dh, A)
    return dh, dB, (torch.mm(dh, A) if part is None else part).addmm_(dy, weight)


def _is_narrow(rows: Tensor, wide: int, rank: int) -> bool:
    """Whether rows (tokens, n), of a product with `wide` columns, are better copied, beside what the adapter makes of
    them, than that product written and read once more."""
    tokens, narrow = rows.shape
    return _COPIES_SAVE * narrow * (tokens + wide) <= tokens * wide and not (narrow + rank) % _ALIGNED
