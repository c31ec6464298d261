"""`from tiny_models import ...`: our own architectures' tiny models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "architectures"))
