"""Runs on streams: killed and resumed they are unbroken runs; what they write; what they refuse."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_tokenizer

from ssm_tune import RecipeError, Run
from ssm_tune.recipe import load_recipe, recipe_from_dict
from ssm_tune.run_folder import Stopped
from ssm_tune.shards import prepare_shards
from ssm_tune.trainer import SSMTrainer
from ssm_tune.validation import check_recipe
from ssm_tune.workflow import run

STEPS, SAVED = 11, 3  # steps of a run, and of them every so many with a checkpoint


class Killed(BaseException):
    """Stands for the end of the process: nothing of the run's own handling of errors and signals takes part."""


def settings(folder: Path, name: str, **data: Any) -> dict[str, Any]:
    """A recipe on 300 documents: several epochs of a stream in a run."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        lines = (json.dumps({"text": f"{n} is " + "a word and " * (1 + n % 7)}) for n in range(300))
        rows.write_text("\n".join(lines) + "\n")
        tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return {
        "model": {
            "architecture": "mamba2",
            "dimensions": {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 16, "state_size": 8},
        },
        "tokenizer": {"name": str(folder / "tokenizer")},
        "data": {"train": [{"path": str(rows)}], "streaming": True, **data},
        "kernels": {"self_check": False},
        "training": {
            "output_dir": str(folder / name),
            "max_steps": STEPS,
            "max_length": 96,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": SAVED,
            "report_to": [],
        },
    }


def fit(values: dict[str, Any], workers: int = 0, *, resume: bool = False) -> Run:
    values["training"]["dataloader_num_workers"] = workers
    return run(recipe_from_dict(values), "pretrain", resume=resume)


def logged(folder: Path, *names: str) -> dict[int, tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: tuple(line[name] for name in names) for line in lines if "loss" in line}


@pytest.mark.parametrize("isolate", [True, False])
def test_a_run_that_ends_anywhere_resumes_as_an_unbroken_one(isolate: bool, tmp_path: Path, monkeypatch) -> None:
    fit(settings(tmp_path, "whole", isolate=isolate))
    step = random.SystemRandom().randrange(SAVED, STEPS)
    workers = (0, 1) if isolate else (2, 0)
    inner = SSMTrainer.training_step

    def training_step(trainer: SSMTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == step:
            raise Killed
        return inner(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SSMTrainer, "training_step", training_step)
        with pytest.raises(Killed):
            fit(settings(tmp_path, "broken", isolate=isolate), workers[0])
    fit(settings(tmp_path, "broken", isolate=isolate), workers[1], resume=True)
    names = ("loss", "epoch", "num_tokens", "learning_rate", "grad_norm")
    assert logged(tmp_path / "broken", *names) == logged(tmp_path / "whole", *names), f"ended in step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_killed_process_resumes_as_an_unbroken_run(workers: int, tmp_path: Path) -> None:
    fit(settings(tmp_path, "whole"))
    values = settings(tmp_path, "broken")
    values["training"]["dataloader_num_workers"] = workers
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    step = random.SystemRandom().randrange(SAVED, STEPS - 1)
    command = [sys.executable, "-m", "ssm_tune", "pretrain", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < step):
        time.sleep(0.01)
    assert process.poll() is None, "the run was over before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    fit(values, workers, resume=True)
    assert logged(tmp_path / "broken", "loss") == logged(tmp_path / "whole", "loss"), f"killed in step {step}"


def test_prepared_tokens_train_and_resume(tmp_path: Path, monkeypatch) -> None:
    """Without the text: only the folder of tokens is read."""
    prepared = {"prepared": str(tmp_path / "tokens"), "streaming": False, "eval_fraction": 0.05}
    values = settings(tmp_path, "whole", **prepared)
    prepare_shards(recipe_from_dict(values))
    (tmp_path / "rows.jsonl").unlink()
    whole = fit(values)
    assert whole.metrics["eval_loss"] < whole.metrics["first_eval_loss"]
    inner = SSMTrainer.training_step

    def training_step(trainer: SSMTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 7:
            raise Killed
        return inner(trainer, *args, **kwargs)

    values["training"]["output_dir"] = str(tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(SSMTrainer, "training_step", training_step)
        with pytest.raises(Killed):
            fit(values, 1)
    fit(values, resume=True)
    assert logged(tmp_path / "broken", "loss") == logged(tmp_path / "whole", "loss")


def test_a_trained_tokenizer_is_made_once(tmp_path: Path, monkeypatch) -> None:
    values = settings(tmp_path, "run")
    values["tokenizer"] = {"train": "bpe", "vocab_size": 300}
    values["training"]["max_steps"] = 3
    stopped = {**values, "training": {**values["training"], "max_steps": 6}}
    inner = SSMTrainer.training_step

    def training_step(trainer: SSMTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 4:
            raise Killed
        return inner(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SSMTrainer, "training_step", training_step)
        with pytest.raises(Killed):
            fit(stopped)
    monkeypatch.setattr("ssm_tune.shards.stream_texts", None)  # not read again for it
    resumed = fit(stopped, resume=True)
    assert resumed.metrics["steps"] == 6 and len(resumed.tokenizer) == 300


def test_a_row_that_cannot_be_read_stops_a_run_that_can_be_resumed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ssm_tune.data.blocks._BLOCK_TOKENS", 64)
    monkeypatch.setattr("ssm_tune.data.blocks._BLOCK_ROWS", 1)
    values = settings(tmp_path, "run")
    good = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(good + "half a row\n")
    with pytest.raises(
        Stopped, match=r"rows\.jsonl, line 301: not valid JSON.* --resume goes on from checkpoint-"
    ) as end:
        fit(values)
    assert end.value.exit_code == 3
    (tmp_path / "rows.jsonl").write_text(good + json.dumps({"text": "a row"}) + "\n")
    fit(values, resume=True)
    fit({**values, "training": {**values["training"], "output_dir": str(tmp_path / "whole")}})
    assert logged(tmp_path / "run", "loss") == logged(tmp_path / "whole", "loss")


def test_what_a_stream_is_refused_for(tmp_path: Path) -> None:
    values = settings(tmp_path, "run")
    with pytest.raises(RecipeError, match="only ssm-tune pretrain"):
        run(recipe_from_dict(values), "sft")
    del values["training"]["max_steps"]
    with pytest.raises(RecipeError, match=r"training\.max_steps is missing: with data\.streaming"):
        recipe_from_dict(values)
    assert not (tmp_path / "run").exists()


def test_new_models_are_trained_with_the_papers_settings_unless_told(tmp_path: Path) -> None:
    from ssm_tune.training_arguments import build_arguments

    recipe = recipe_from_dict(settings(tmp_path, "run"))
    arguments, said = build_arguments(recipe, "pretrain", tmp_path / "run", has_eval=False)
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.weight_decay) == (0.9, 0.95, 0.1)
    assert (arguments.lr_scheduler_type, arguments.max_grad_norm, arguments.learning_rate) == ("cosine", 1.0, 1e-2)
    assert any(line.startswith("weight_decay: 0.1") for line in said)
    arguments, _ = build_arguments(recipe, "sft", tmp_path / "run", has_eval=False)
    assert (arguments.adam_beta2, arguments.weight_decay) == (0.999, 0.0)


@pytest.mark.slow
def test_the_tiny_recipe_falls_from_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    words = [f"training.output_dir={tmp_path / 'tiny'}", "training.max_steps=40", "training.eval_steps=40"]
    tiny = run(load_recipe("pretrain-tiny", words), "pretrain")
    assert tiny.metrics["first_eval_loss"] == pytest.approx(math.log(2048), rel=0.05)
    assert tiny.metrics["eval_loss"] < 6.5


def test_a_mistake_in_the_model_is_told_with_the_recipe_before_data_are_read(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "# ssm-tune pretrain mine.yaml\n"
        "model: {architecture: mamba2, dimensions: {hidden_size: 65, num_hidden_layers: 1}}\n"
        "tokenizer: {train: true}\ndata: {train: [{path: rows.jsonl}]}\n"
        f"training: {{output_dir: {tmp_path / 'run'}}}\n"
    )
    (tmp_path / "rows.jsonl").write_text("not JSON\n")
    told = f"{recipe}: model.dimensions: expand * hidden_size is 130"
    with pytest.raises(RecipeError) as caught:
        run(load_recipe(recipe), "pretrain")
    assert caught.value.mistakes[0].startswith(told) and len(caught.value.mistakes) == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe))
    assert "line 1: not valid JSON" in caught.value.mistakes[0]
    assert caught.value.mistakes[1].startswith(told)
