"""The command line, with a piece of backward for every block, and on a CPU with what stands in the place of graphs.

How many pieces were played is written to `pieces-RANK` in the working folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_graphs import Recorder

from ssm_tune.cli import main
from ssm_tune.mixers import layer_graphs
from ssm_tune.mixers.recorded_blocks import RecordedBlocks

played = 0
play = RecordedBlocks.play_backward


def counted(self: RecordedBlocks, piece: int) -> Any:
    global played
    played += 1
    return play(self, piece)


RecordedBlocks.play_backward = counted
layer_graphs.starts_of_pieces = lambda blocks: list(range(len(blocks)))
if not torch.cuda.is_available():
    Recorder().install(pytest.MonkeyPatch())
code = main()
Path(f"pieces-{os.environ.get('RANK', 0)}").write_text(str(played))
sys.exit(code)
