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


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, Any]]]:
    """By kind of model and by whether it ran under autocast, see `interpreted_stream.py`."""
    pytest.importorskip("triton")
    paths = [str(path) for path in (TESTS, TESTS.parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(TESTS / "mixers" / "interpreted_stream.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", PURE)
def test_norms_are_not_kept_and_come_again_to_the_bit(found: dict[str, Any], kind: str, low: bool) -> None:
    result = found[kind][str(low)]
    assert result["norms"] == (2 if low else 4)  # bytes a number: in the dtype of in_proj
    assert result["differ"] == []
