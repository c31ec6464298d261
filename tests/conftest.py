"""What holds for every test: no network, fixed seeds, GPU tests only where there is a GPU."""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # `from tiny import ...` in every test folder


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: connections beyond this machine raise (a patched `socket.connect` is undone by some imports)."""
    if event != "socket.connect":
        return
    sock, address = arguments
    if sock.family == socket.AF_UNIX:
        return
    host = str(address[0])
    if host != "localhost" and not host.startswith("127.") and host not in ("::1", "::ffff:127.0.0.1"):
        raise RuntimeError(f"a test tried to reach {address}; tests run without a network")


sys.addaudithook(refuse_network)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        from spared_tuning import spare_tuning

        spare_tuning()
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in every test, whatever ran before it (torch is not imported for tests without it)."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
