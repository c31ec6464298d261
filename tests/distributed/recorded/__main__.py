"""The command line, with a piece of backward for every block (a unit, if they are sharded), and on a CPU with what
stands in the place of graphs.

How many pieces were played is written to `pieces-RANK` in the working folder.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_graphs import Recorder

from ssm_tune.cli import main
from ssm_tune.mixers import layer_graphs
from ssm_tune.mixers.recorded_blocks import RecordedBlocks
from ssm_tune.sharding import Sharding

played = 0
play = RecordedBlocks.play_backward


def counted(self: RecordedBlocks, piece: int) -> Any:
    global played
    played += 1
    return play(self, piece)


RecordedBlocks.play_backward = counted


def every_block() -> Sharding | None:
    sharding = from_environment()
    return None if sharding is None else replace(sharding, unit_bytes=1)


from_environment = Sharding.from_environment
Sharding.from_environment = every_block
layer_graphs.starts_of_pieces = lambda blocks: list(range(len(blocks)))
if not torch.cuda.is_available():
    Recorder().install(pytest.MonkeyPatch())
code = main()
Path(f"pieces-{os.environ.get('RANK', 0)}").write_text(str(played))
sys.exit(code)
