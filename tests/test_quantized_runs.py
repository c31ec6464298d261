"""QLoRA from start to end: stopped and resumed, loaded again by folder, examined, merged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from ssm_tune import load_model, tune
from ssm_tune.callbacks import Recorder
from ssm_tune.doctor import examine
from ssm_tune.run_folder import Stopped

ROWS = [{"question": f"What is {n} and {n}?", "answer": f"{n} and {n} make {2 * n}."} for n in range(24)]
IDS = torch.arange(5, 25)[None]


def losses(run: Path) -> dict[int, float]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in found if "loss" in row}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def test_a_quantised_run_is_resumed_loaded_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    tiny_model("mamba", hidden_size=64).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    settings: dict[str, Any] = {"method": "qlora", "max_steps": 5, "per_device_train_batch_size": 2, "max_length": 64}
    settings |= {"learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "seed": 1, "lora_dropout": 0.1}
    tune(base, ROWS, output_dir=tmp_path / "whole", **settings)
    log = Recorder.on_log

    def stop_in_step_3(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 3:
            monkeypatch.setattr(Recorder, "on_log", log)
            os.kill(os.getpid(), signal.SIGTERM)
        return log(self, args, state, control, **kwargs)

    monkeypatch.setattr(Recorder, "on_log", stop_in_step_3)
    with pytest.raises(Stopped):
        tune(base, ROWS, output_dir=tmp_path / "run", **settings)
    run = tune(base, ROWS, output_dir=tmp_path / "run", resume=True, **settings)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")

    trained = logits_of(run.model)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "checkpoint-5"):
        assert torch.equal(logits_of(load_model(folder)), trained)  # in 4 bits again, without being asked
    assert not torch.equal(logits_of(load_model(tmp_path / "run", load_in_4bit=False)), trained)
    merged = logits_of(load_model(run.merge(dtype="float32")))
    assert (merged - trained).abs().max() < 1e-4 * trained.abs().max()
    assert examine(str(tmp_path / "run")).model.weights == "in 4 bits"
