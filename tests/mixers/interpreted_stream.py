"""Models whose residual stream goes through the interpreted Triton kernels, with recomputation and without.

Run by `test_stream_memory.py` in a process of its own, with the cases as JSON: the interpreter is chosen when
Triton is imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from rows import alone, make_documents, run, worst_gradient
from storages import Storages
from tiny import tiny_model
from torch import Tensor

from ssm_tune import kernels
from ssm_tune.kernels import recompute, residual_norm_triton
from ssm_tune.mixers import mamba, norms, patch_model
from ssm_tune.mixers.backward_pieces import Pieces
from ssm_tune.mixers.projected_again import Shares

TOKENS = 5


class Found(NamedTuple):
    kept: int  # bytes that the forward pass leaves for backward
    left: int  # bytes that backward leaves beside those, in a graph that is kept
    gradients: dict[str, Tensor]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return patch_model(tiny_model(kind, num_hidden_layers=3)).train()


def measure(model: Any, low: bool) -> Found:
    layout, parameters = next(alone(make_documents((TOKENS,)))), list(model.parameters())
    model.zero_grad()
    with Storages() as storages:
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            loss = run(model, layout, 100).loss
        kept = storages.alive(loss, *parameters)
        loss.backward(retain_graph=True)
        left = storages.alive(loss, *parameters, *(p.grad for p in parameters if p.grad is not None)) - kept
    loss.backward()  # what is computed again can be computed again
    return Found(kept, left, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def compare(model: Any, low: bool) -> dict[str, Any]:
    """What recomputation saves, in bytes for each number of the stream in a layer, and what it does to gradients."""
    everything = measure(model, low)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_norm_triton, "add_to_sum", lambda *_: None)
        norms_only = measure(model, low)
        patch.setattr(residual_norm_triton, "recomputing", lambda: False)
        nothing = measure(model, low)
    numbers, layers = TOKENS * model.config.hidden_size, len(model.backbone.layers)
    assert all(gradient.any() for gradient in nothing.gradients.values())
    return {
        "norms": (nothing.kept - norms_only.kept) / numbers / layers,
        "differ": [n for n, wanted in nothing.gradients.items() if not torch.equal(wanted, norms_only.gradients[n])],
        "sums": (norms_only.kept - everything.kept) / numbers / (layers - 1),  # the first stays as it is
        "error": worst_gradient(everything.gradients, nothing.gradients),
        "left": [everything.left, norms_only.left],
    }


def in_pieces(model: Any) -> dict[str, Any]:
    """Backward of each block by itself beside one of all: bytes that forward keeps, and gradients that are not the
    same to the bit."""
    blocks, found = model.backbone.layers, []
    hidden_states = torch.randn(1, TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for starts in ([0], list(range(len(blocks)))):
        pieces = Pieces(blocks, starts, trained_input=True)
        with torch.autocast("cpu", torch.bfloat16):
            with Storages() as storages:
                output = pieces.forward(hidden_states, None)
                kept = storages.alive(output, *model.parameters())
            gradients, given = {}, [hidden_states.to(output.dtype)]
            for piece in reversed(range(pieces.count)):
                by_parameters, given = pieces.backward(piece, given)
                gradients |= dict(zip(pieces.parameters(piece), by_parameters, strict=True))
        found.append((kept, {name: gradients[p] for name, p in blocks.named_parameters()} | {"input": given[0]}))
    (kept, one), (of_pieces, several) = found
    return {"more": of_pieces - kept, "differ": [name for name in one if not torch.equal(one[name], several[name])]}


def main() -> None:
    kernels.residual_rms_norm = residual_norm_triton.residual_rms_norm
    norms.DEVICES = recompute.DEVICES = ("cpu",)
    found = {f"{kind} {dtype}": compare(model_of(kind), dtype == "low") for kind, dtype in json.loads(sys.argv[1])}
    found["in pieces"] = {kind: in_pieces(model_of(kind)) for kind in ("mamba", "mamba2")}
    mamba.AGAIN = Shares()  # which asks for norms again
    model = model_of("mamba")
    for block in model.backbone.layers:
        block.mixer.in_proj.requires_grad_(False)
    found["frozen low"] = compare(model, True)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
