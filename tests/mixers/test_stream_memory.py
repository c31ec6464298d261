"""What blocks keep of the residual stream and its norms, by the interpreted Triton kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import PURE

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
    assert {name: result["left"] for name, result in found.items() if any(result["left"])} == {}
