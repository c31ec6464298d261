"""After the last step: the last evaluation, the artefacts, the card; then what the recipe wants done with the finished
run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssm_tune import artefacts
from ssm_tune.adapter import is_adapted, save_adapter
from ssm_tune.data import DataReport, PreparedData
from ssm_tune.outputs.finished_run import open_finished_run
from ssm_tune.outputs.model_card import write_card
from ssm_tune.outputs.run import Run, load_finished_model
from ssm_tune.peers import current
from ssm_tune.recipe import Recipe
from ssm_tune.run_folder import COMPLETE, RunFolder
from ssm_tune.sharding import gather_state
from ssm_tune.tokenizer import generation_tokenizer
from ssm_tune.trainer import SSMTrainer


def close_run(trainer: SSMTrainer, folder: RunFolder, recipe: Recipe, task: str, data: PreparedData) -> Run:
    """Turn a trained trainer into a complete run folder and a Run. Every process calls it; rank 0 writes."""
    _evaluate_last(trainer)
    trainer.accelerator.wait_for_everyone()
    _stop_at(trainer, data.end_markers)
    model = _save_model(trainer, folder)
    config = model.config
    metrics = summarise(trainer.state.log_history)
    tokenizer = generation_tokenizer(trainer.processing_class, data.chat_template)
    if trainer.sharding is None:
        run = Run(model=model, tokenizer=tokenizer, metrics=metrics, output_dir=folder.path)
    else:
        run = ShardedRun(tokenizer, metrics, folder.path, trainer.args.device)
    if trainer.accelerator.is_main_process:
        with folder.staging("tokenizer") as scratch:
            tokenizer.save_pretrained(scratch)
        artefacts.draw_metrics(folder)
        _write_card(folder, recipe, task, config.model_type, metrics, data.report)
        folder.write_state(COMPLETE, metrics=metrics, finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        _follow_up(run, recipe)
    peers = current()
    if peers is not None:
        peers.wait()  # however long the evaluations take: the gradients' group would give up after training.ddp_timeout
    return run


class ShardedRun(Run):
    """The Run of sharded training. Its model is read from the folder, whole, on the rank that asks for it first."""

    def __init__(self, tokenizer: Any, metrics: dict[str, Any], output_dir: Path, device: torch.device) -> None:
        self.tokenizer, self.metrics, self.output_dir, self.device = tokenizer, metrics, output_dir, device
        self._model: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            finished = open_finished_run(self.output_dir, only_runs=True)
            self._model = load_finished_model(finished, device=self.device)
        return self._model


def _evaluate_last(trainer: SSMTrainer) -> None:
    """The loss on held-out rows after the last step, unless it was just measured."""
    if trainer.eval_dataset is None or trainer.args.eval_strategy == "no":
        return
    last = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    if not last or last[-1] != trainer.state.global_step:
        trainer.evaluate()


def _stop_at(trainer: SSMTrainer, markers: list[str]) -> None:
    """Let generation end where the assistant's turns were taught to end, beside eos, if that is one token."""
    tokenizer, generation = trainer.processing_class, trainer.model.generation_config
    found = [tokenizer.encode(marker.strip(), add_special_tokens=False) for marker in markers]
    own = generation.eos_token_id
    own = [own] if isinstance(own, int) else list(own or [tokenizer.eos_token_id])
    more = [ids[0] for ids in found if len(ids) == 1 and ids[0] not in own]
    if more:
        generation.eos_token_id = [*own, *more]


def _save_model(trainer: SSMTrainer, folder: RunFolder) -> Any:
    """Write the adapter or the whole model, whole or not at all; returns the model without the trainer's wrappings."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    state_dict = None if trainer.sharding is None else gather_state(model, trained_only=is_adapted(model))
    base = model.get_base_model() if is_adapted(model) else model
    vars(base).pop("forward", None)  # TRL's fused head; plain forward again
    base.config.use_cache = True  # off while training
    model.eval()
    if trainer.accelerator.is_main_process:
        with folder.staging("model") as scratch:
            if is_adapted(model):
                save_adapter(model, scratch, state_dict=state_dict)
            else:
                model.save_pretrained(scratch, state_dict=state_dict)
    return model


def summarise(history: list[dict[str, float]]) -> dict[str, float]:
    """What a reader asks of a run: losses first and last, tokens, speed."""
    metrics: dict[str, float] = {}
    losses = [line for line in history if "loss" in line]
    evaluations = [line["eval_loss"] for line in history if "eval_loss" in line]
    if history:
        metrics["steps"] = max(line["step"] for line in history)
    if losses:
        metrics["first_loss"], metrics["loss"] = losses[0]["loss"], losses[-1]["loss"]
        metrics["num_tokens"] = losses[-1]["num_tokens"]
        rates = sorted(line["tokens_per_second"] for line in losses)
        metrics["tokens_per_second"] = rates[len(rates) // 2]
    if evaluations:
        metrics["first_eval_loss"], metrics["eval_loss"] = evaluations[0], evaluations[-1]
    for line in history:
        if "train_runtime" in line:
            metrics["train_runtime"], metrics["train_loss"] = line["train_runtime"], line["train_loss"]
    return metrics


def _write_card(
    folder: RunFolder, recipe: Recipe, task: str, model_type: str, metrics: dict[str, Any], report: DataReport
) -> None:
    environment = folder.read_json("environment.json")
    write_card(
        folder.path,
        model_type=model_type,
        base_model=recipe.model.name,
        task=task,
        command=environment["command"],
        recipe=recipe.text or recipe.to_yaml(),
        data=report.figures(),
        metrics=metrics,
        versions={"ssm-tune": environment["ssm_tune"], "python": environment["python"], **environment["packages"]},
    )


def _follow_up(run: Run, recipe: Recipe) -> None:
    """The recipe's `evaluation` and `hub` sections: the run is complete whatever becomes of them."""
    if recipe.evaluation.tasks:
        run.evaluate(
            recipe.evaluation.tasks,
            limit=recipe.evaluation.limit,
            allow_code_execution=recipe.evaluation.allow_code_execution,
        )
    if recipe.evaluation.perplexity is not None:
        run.measure_perplexity(recipe.evaluation.perplexity)
    if recipe.hub.push is not None:
        run.push(recipe.hub.repo, private=recipe.hub.private, what=recipe.hub.push)
