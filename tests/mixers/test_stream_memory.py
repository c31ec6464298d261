"""What blocks keep of the residual stream and its norms, by the interpreted Triton kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import make_documents, packed, run, worst_gradient
from tiny import PURE, tiny_model

from ssm_tune.kernels import recompute, recompute_sums
from ssm_tune.mixers import patch_model

TESTS = Path(__file__).parents[1]
CASES = [(kind, "low") for kind in PURE] + [("mamba", "wide"), ("mamba2", "wide")]  # low: under autocast
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """By kind of model and by dtype, see `interpreted_stream.py`."""
    pytest.importorskip("triton")
    paths = [str(path) for path in (TESTS, TESTS.parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(TESTS / "mixers" / "interpreted_stream.py"), json.dumps(CASES)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_norms_are_not_kept_and_come_again_to_the_bit(found: Found, kind: str, dtype: str) -> None:
    result = found[f"{kind} {dtype}"]
    assert result["norms"] == (2 if dtype == "low" else 4)  # bytes a number: in the dtype of in_proj
    assert result["differ"] == []


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_what_is_added_is_kept_in_the_place_of_sums(found: Found, kind: str, dtype: str) -> None:
    """Where it is narrower: 2 bytes a number instead of 4."""
    result = found[f"{kind} {dtype}"]
    assert result["sums"] == (2 if dtype == "low" else 0)
    error, name = result["error"]
    assert error < (1e-4 if dtype == "low" else 1e-12), name


def test_norms_that_nobody_keeps_cost_nothing(found: Found) -> None:
    result = found["frozen low"]
    assert result["norms"] == 0 and result["sums"] == 2 and result["error"][0] < 1e-4


def test_backward_lets_go_of_what_it_computed_again(found: Found) -> None:
    assert {name: result["left"] for name, result in found.items() if any(result.get("left", ()))} == {}


def test_in_pieces_sums_go_from_piece_to_piece(found: Found) -> None:
    assert found["in pieces"] == {kind: {"more": 0, "differ": []} for kind in ("mamba", "mamba2")}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [37, 768, 2048, 4096, 16384])
def test_norms_come_again_to_the_bit_on_a_gpu(dim: int, dtype: torch.dtype) -> None:
    from ssm_tune.kernels.residual_norm_triton import residual_rms_norm

    stream = torch.randn(2, 300, dim, device="cuda", requires_grad=True)
    x, weight = torch.randn(2, 300, dim, device="cuda", dtype=torch.bfloat16), torch.rand(dim, device="cuda")
    for added in (x, None):
        with recompute.recomputed(stream):
            y, _ = residual_rms_norm(stream, added, weight, 1e-5, dtype)
            address, product = y.data_ptr(), y * y
        again = product.grad_fn._saved_self
        assert again.data_ptr() != address and torch.equal(again, y)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PURE)
def test_gradients_by_sums_from_their_end_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the stream kept, within what bfloat16 rounds."""
    model, given, found = patch_model(tiny_model(kind, num_hidden_layers=4)).cuda().train(), make_documents(), []
    for keep in (lambda: None, lambda: monkeypatch.setattr(recompute_sums.RunningSum, "follow", lambda *_: None)):
        keep()
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(model, packed(given).to("cuda"), 100).loss
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    error, name = worst_gradient(*found)
    assert error < 1e-2, name
