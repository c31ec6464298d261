"""Put a fault into one rank, then run the command line."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ssm_tune import workflow
from ssm_tune.cli import main
from ssm_tune.outputs.run import Run
from ssm_tune.recipe import RecipeError
from ssm_tune.trainer import SSMTrainer

mine = os.environ["RANK"] == os.environ.get("FAULTY_RANK", "1")
kind = os.environ["FAULT"]

if kind == "nan" and mine:
    loss = SSMTrainer.compute_loss

    def without_number(self: Any, *arguments: Any, **keys: Any) -> Any:
        if self.state.global_step == 4:
            self._expect_finite(torch.tensor(float("nan")), arguments[1].get("rows"))
        return loss(self, *arguments, **keys)

    SSMTrainer.compute_loss = without_number
elif kind == "disk" and mine:
    save = torch.save

    def full(value: Any, file: Any, *arguments: Any, **keys: Any) -> None:
        if "checkpoint-6" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, file, *arguments, **keys)

    torch.save = full
elif kind == "row" and mine:

    def refuse(*arguments: Any, **keys: Any) -> None:
        raise RecipeError("rows.jsonl, line 7: completion is 3, which is no text")

    workflow.prepare_data = refuse
elif kind == "slow":
    step = SSMTrainer.training_step

    def slow(self: Any, *arguments: Any, **keys: Any) -> Any:
        time.sleep(0.5)
        return step(self, *arguments, **keys)

    SSMTrainer.training_step = slow
elif kind == "long evaluation":

    def evaluate(self: Any, *arguments: Any, **keys: Any) -> None:
        time.sleep(25)
        Path(self.output_dir, "evaluated").write_text(type(self.model).__name__)

    Run.evaluate = evaluate

sys.exit(main())
