"""Models whose residual stream goes through the interpreted Triton kernels, with recomputation and without.

Run by `test_stream_memory.py` in a process of its own: the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rows import alone, make_documents, run
from storages import Storages
from tiny import PURE, tiny_model

from ssm_tune import kernels
from ssm_tune.kernels import recompute, residual_norm_triton
from ssm_tune.mixers import norms, patch_model

TOKENS = 9


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return patch_model(tiny_model(kind, num_hidden_layers=3)).train()


def measure(model: Any, low: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that the forward pass leaves for backward, and the gradients."""
    layout = next(alone(make_documents((TOKENS,))))
    model.zero_grad()
    with Storages() as storages, torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
        loss = run(model, layout, 100).loss
        kept = storages.alive(loss, *model.parameters())
    loss.backward()
    return kept, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(kind: str, low: bool) -> dict[str, Any]:
    """What the norms' recomputation saves, in bytes for each number of the stream in a layer; and whether it matters
    to a gradient."""
    model = model_of(kind)
    few, got = measure(model, low)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_norm_triton, "recomputing", lambda: False)
        many, wanted = measure(model, low)
    numbers = TOKENS * model.config.hidden_size * len(model.backbone.layers)
    assert all(gradient.any() for gradient in wanted.values())
    return {
        "norms": (many - few) / numbers,
        "differ": [name for name, gradient in wanted.items() if not torch.equal(gradient, got[name])],
    }


def main() -> None:
    kernels.residual_rms_norm = residual_norm_triton.residual_rms_norm
    norms.DEVICES = recompute.DEVICES = ("cpu",)
    json.dump({kind: {str(low): compare(kind, low) for low in (False, True)} for kind in PURE}, sys.stdout)


if __name__ == "__main__":
    main()
