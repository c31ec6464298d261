"""Before training: what is trained is what is evaluated, and a packed row gives what its documents give alone.

Checked on a short random row, on the very path that training takes (device, kernels, adapter, precision), since there
today's stack fails in silence: fused training kernels that compute another function, and document borders that are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ssm_tune.recipe import RecipeError

DOCUMENTS = (45, 1, 82)  # tokens of the row's documents: one is a single token, borders lie off chunk borders
# Largest accepted difference, in relative norm. Leaks and wrong functions measured in stock models start at 2e-2 and
# are mostly above 1e-1; TF32 products give up to 2e-3, bfloat16 models of many layers up to about 3e-2.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 6e-2}
# Layers in 8 bits round their inputs by the largest of a row, on a CPU in evaluation only: up to 6e-2.
TOLERANCE_IN_8_BITS = 1.2e-1
# Deep models of few bits round more than that. Nothing can leak into a row's first document, so what it differs by is
# rounding alone; a document behind it may differ by so many times as much.
TIMES_THE_FIRST = 3.0
MOST = 0.5  # of the logits' norm: beyond it nothing is known


def check_model(
    model: nn.Module, compute: Callable[[], AbstractContextManager[Any]], *, isolate: bool
) -> dict[str, float]:
    """Compare logits in training mode with those in evaluation mode, and of a packed row with its documents' alone.

    Args:
        model: on its device, with its adapter; left in training mode.
        compute: the context that training computes in (autocast).
        isolate: whether packed documents are to be kept apart: False leaves that comparison out.

    Returns:
        The relative differences, by name.

    Raises:
        RecipeError: a difference is larger than rounding explains.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    # Tokens near the start of the vocabulary are special ones; from the middle they are ordinary.
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary // 4, vocabulary, (1, sum(DOCUMENTS)), generator=generator).to(device)

    # Kernels that keep something for backward are others; but a sharded model is not to wait for a backward pass.
    keeps = not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def logits(row: Tensor, **borders: Tensor) -> Tensor:
        with torch.set_grad_enabled(keeps and model.training), compute():
            return model(input_ids=row, use_cache=False, **borders).logits.detach().float()

    model.eval()
    alone = [logits(document) for document in tokens.split(DOCUMENTS, dim=1)]
    whole = logits(tokens)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # random on purpose
    found = {"training against evaluation": _difference(logits(tokens), whole)}
    rounding = 0.0
    if isolate:
        lengths = torch.tensor(DOCUMENTS, device=device)
        index = torch.repeat_interleave(torch.arange(len(DOCUMENTS), device=device), lengths)[None].to(torch.int32)
        positions = torch.cat([torch.arange(length, device=device) for length in DOCUMENTS])[None]
        packed = logits(tokens, seq_idx=index, position_ids=positions)
        found["packed against alone"] = _difference(packed, torch.cat(alone, dim=1))
        rounding = _difference(packed[:, : DOCUMENTS[0]], alone[0])
    model.train()
    in_8_bits = any(hasattr(parameter, "CB") for parameter in model.parameters())
    dtype = torch.bfloat16 if _computes_in_bf16(model, compute) else torch.float32
    tolerance = TOLERANCE_IN_8_BITS if in_8_bits else TOLERANCE[dtype]
    _judge(found, {"packed against alone": max(tolerance, min(rounding * TIMES_THE_FIRST, MOST))}, tolerance)
    return found


def _difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-12))


def _computes_in_bf16(model: nn.Module, compute: Callable[[], AbstractContextManager[Any]]) -> bool:
    device = next(model.parameters()).device.type
    with compute():
        return torch.is_autocast_enabled(device) or model.get_input_embeddings().weight.dtype != torch.float32


def _judge(found: dict[str, float], wider: dict[str, float], usual: float) -> None:
    for name, difference in found.items():
        tolerance = wider.get(name, usual)
        if not difference <= tolerance:  # also when it is not a number
            raise RecipeError(
                f"self-check: {name}, the logits of a random row differ by {difference:.1%} (up to "
                f"{tolerance:.0%} is rounding). Training would not give what is evaluated. Choose other kernels "
                "(kernels.order: [reference] is the plain path), or switch the check off: kernels.self_check=false."
            )
