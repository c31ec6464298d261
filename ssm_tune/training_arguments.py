"""From a recipe's `training` section to TRL's SFTConfig: which defaults differ here, and what is said about it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl import SFTConfig

from ssm_tune.data.loading import WORKERS
from ssm_tune.data.stream_data import is_streamed
from ssm_tune.recipe import Recipe, RecipeError
from ssm_tune.recipe_combinations import default_eval_strategy
from ssm_tune.sharding import Sharding

logger = logging.getLogger(__name__)

# In a checkpoint: what the trainer had summed up since its last log, and how many rows a step took.
WINDOW = "window.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of compute and of frozen weights: as the recipe says, else float32 on a CPU and bfloat16 on a GPU."""
    if recipe.model.dtype is not None:
        return DTYPES[recipe.model.dtype]
    return torch.bfloat16 if torch.cuda.is_available() and not on_cpu(recipe.training) else torch.float32


def on_cpu(training: Mapping[str, Any]) -> bool:
    """Whether a recipe, an accelerate config (`use_cpu`) or the want of anything else puts training on the CPU."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    return asked or training.get("use_cpu", False) or not torch.accelerator.is_available()


def world_size() -> int:
    """Number of processes that a launcher started (1 without one)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


# What GPT-3 and the Mamba papers train new models with; SFTConfig's own defaults are for models that are trained.
FROM_SCRATCH = {
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,  # a share of all steps
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
}


def rows_per_step(arguments: SFTConfig) -> int:
    """Rows (packed ones where rows are packed) that an optimizer step takes, on all processes together."""
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world_size()


def build_arguments(
    recipe: Recipe,
    task: str,
    folder: Path,
    *,
    has_eval: bool,
    checkpoint: Path | None = None,
    sharding: Sharding | None = None,
) -> tuple[SFTConfig, list[str]]:
    """SFTConfig for this run, and one sentence for each of its defaults that is not SFTConfig's.

    Args:
        checkpoint: what a resumed run goes on from. On another number of processes its steps keep their rows.

    Raises:
        RecipeError: SFTConfig refuses the values (its message is kept), or they cannot be honoured here.
    """
    given, resuming = recipe.training, checkpoint is not None
    where = f"{recipe.source or 'training settings'}: training"
    chosen: dict[str, Any] = {}
    said: list[str] = []

    def default(key: str, value: Any, why: str) -> None:
        if key not in given:
            chosen[key] = value
            said.append(f"{key}: {value} ({why})")

    if given.get("fp16"):
        raise RecipeError(
            f"{where}.fp16: half precision overflows in the state-space recurrence. Use bf16, or float32."
        )
    given = dict(given)
    for old, new in (
        ("gradient_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    ):
        if old in given:  # the name of older versions, and of most recipes
            given.setdefault(new, given.pop(old))
    default("bf16", compute_dtype(recipe) == torch.bfloat16, "follows model.dtype")
    if sharding is None or not sharding.checkpointing:
        default("activation_checkpointing", False, "also called gradient_checkpointing; set it to save memory for time")
    default("report_to", ["tensorboard"], "written to the run folder")
    if task == "pretrain" and recipe.model.architecture is not None:
        for key, value in FROM_SCRATCH.items():
            default(key, value, "as models are trained from random weights")
    if has_eval:
        why = "eval_steps is given" if "eval_steps" in given else "there is evaluation data"
        default("eval_strategy", default_eval_strategy(given), why)
        if given.get("eval_strategy", chosen.get("eval_strategy")) != "no" and not resuming:
            default("eval_on_start", True, "so that there is a loss to compare with")
    elif given.get("eval_strategy", "no") != "no":
        raise RecipeError(f"{where}.eval_strategy: there is no evaluation data. Give data.eval or data.eval_fraction.")
    if resuming and given.get("eval_on_start"):
        chosen["eval_on_start"] = False  # it was done when the run began
    if is_streamed(recipe.data) and not on_cpu(given):
        default("dataloader_num_workers", WORKERS, "processes that read and tokenise ahead of the GPU")
    chosen |= _for_this_machine(given)
    accumulation = _accumulation(recipe, where)
    if accumulation is not None:
        chosen["gradient_accumulation_steps"] = accumulation
        said.append(f"gradient_accumulation_steps: {accumulation} (from data.batch_tokens)")

    if checkpoint is not None:
        kept = _kept_batch(checkpoint, {**given, **chosen}, where)
        chosen |= kept
        said += [
            f"{key}: {value} (as many rows a step as before, on another number of processes)"
            for key, value in kept.items()
        ]
    if sharding is not None and sharding.checkpointing:
        default("activation_checkpointing", True, "the accelerate config asks for it")

    # Packing is done by the data section (False here keeps TRL from doing it again); tqdm's bar is replaced by ours.
    values = {**given, **chosen, "output_dir": str(folder / "checkpoints"), "packing": False, "disable_tqdm": True}
    try:
        return SFTConfig(**values), said
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _kept_batch(checkpoint: Path, values: dict[str, Any], where: str) -> dict[str, int]:
    """What gives a step of a resumed run the rows that it had, where the number of processes has changed."""
    window = json.loads((checkpoint / WINDOW).read_text(encoding="utf-8"))
    rows, before = window.get("rows_per_step"), window.get("processes")
    if rows is None or before == world_size():
        return {}
    batch, key = values.get("per_device_train_batch_size", 8), "per_device_train_batch_size"
    fitting = [size for size in range(batch, 0, -1) if rows % (size * world_size()) == 0]
    if not fitting:
        raise RecipeError(
            f"{where}: {checkpoint.name} was trained with {rows} rows a step on {before} processes; {world_size()} "
            "processes cannot have equal parts of that. Use a number that divides it."
        )
    kept = {"gradient_accumulation_steps": rows // (fitting[0] * world_size())}
    return kept if fitting[0] == batch else {key: fitting[0], **kept}


def _for_this_machine(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that follow from the devices and processes, as far as the recipe leaves them open."""
    chosen: dict[str, Any] = {}
    if not torch.cuda.is_available():
        chosen["dataloader_pin_memory"] = given.get("dataloader_pin_memory", False)
    elif given.get("dataloader_pin_memory", True):
        chosen["accelerator_config"] = {"non_blocking": True}  # a copy to the GPU that waits lets its work run out
    if on_cpu(given):
        chosen["use_cpu"] = True  # else TrainingArguments refuses bf16, and a GPU's recipe would not run on a CPU
    if world_size() > 1 and "ddp_find_unused_parameters" not in given:
        chosen["ddp_find_unused_parameters"] = False
    return chosen


def _accumulation(recipe: Recipe, where: str) -> int | None:
    """Micro-batches per optimizer step that come nearest to data.batch_tokens tokens (padding counted), or None."""
    tokens = recipe.data.batch_tokens
    if tokens is None:
        return None
    length = recipe.training.get("max_length", 1024)
    if length is None:
        raise RecipeError(f"{where}.max_length: null has no length to reckon data.batch_tokens with. Give a number.")
    micro = recipe.training.get("per_device_train_batch_size", 8) * length * world_size()
    if tokens < micro:
        raise RecipeError(
            f"{where}: data.batch_tokens {tokens:,} is less than one batch: per_device_train_batch_size x max_length x "
            f"processes = {micro:,} tokens. Raise batch_tokens, or lower per_device_train_batch_size."
        )
    steps = round(tokens / micro)
    if steps * micro != tokens:
        logger.warning(
            "data.batch_tokens: %s tokens are not a multiple of %s; each step takes %s.",
            f"{tokens:,}",
            f"{micro:,}",
            f"{steps * micro:,}",
        )
    return steps


def switch_off_router_loss(config: Any, arguments: SFTConfig) -> None:
    """TRL's load-balancing loss reads `num_experts`; models without that key, or without experts, go without it."""
    has_experts = hasattr(config, "num_experts") and config.num_experts > 1
    if hasattr(config, "output_router_logits") and not has_experts:
        if arguments.router_aux_loss_coef:
            raise RecipeError(
                f"training.router_aux_loss_coef: there is no load-balancing loss for {config.model_type}. Leave it out."
            )
        if getattr(config, "num_local_experts", 0) > 0:
            logger.warning(
                "%s: experts are trained without a load-balancing loss; watch them if many are trained.",
                config.model_type,
            )
        arguments.router_aux_loss_coef = 0.0
