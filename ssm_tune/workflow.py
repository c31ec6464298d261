"""The order of things: recipe -> tokenizer, data, model, adapter -> trainer -> run folder. The only file that knows it.

Mistakes in the data and in the targets are found before weights are read; a run that ends before its first step leaves
nothing.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ssm_tune import artefacts
from ssm_tune.adapter import adapter_targets, apply_adapter, check_targets
from ssm_tune.callbacks import GradientCheck, ProgressBar, Recorder, StartAndResume, StopOnSignal, TuningReport
from ssm_tune.closing import close_run
from ssm_tune.data import Collator, PreparedData, prepare_data
from ssm_tune.data.stream import make_stream
from ssm_tune.data.stream_data import is_streamed, prepare_stream
from ssm_tune.families import family_of, refusals
from ssm_tune.faults import told
from ssm_tune.kernel_settings import choose_graphs, choose_kernels
from ssm_tune.kernels import kernel_report
from ssm_tune.mixers import patch_model
from ssm_tune.mixers.layer_graphs import layer_graphs
from ssm_tune.model import init_model, load_model, meta_model, model_report, plan_model, read_config, set_trainable
from ssm_tune.outputs.run import Run
from ssm_tune.peers import join
from ssm_tune.recipe import RESOLVED, Recipe, RecipeError
from ssm_tune.run_folder import KEPT_BASE, RUNNING, RunFolder, Stopped
from ssm_tune.self_check import check_model
from ssm_tune.settings import recipe_from_settings
from ssm_tune.sharding import Sharding, check_optimizer, describe_processes
from ssm_tune.shards import trained_tokenizer
from ssm_tune.tokenizer import adopt_tokenizer, load_tokenizer
from ssm_tune.trainer import SSMTrainer
from ssm_tune.training_arguments import (
    build_arguments,
    compute_dtype,
    rows_per_step,
    switch_off_router_loss,
    world_size,
)

if TYPE_CHECKING:
    from trl import SFTConfig

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One run's inputs: a recipe, and what Python gave as objects in the place of names."""

    recipe: Recipe
    task: str
    resume: bool = False
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    rows: Any = None
    eval_rows: Any = None
    bar: ProgressBar = field(default_factory=ProgressBar)
    sharding: Sharding | None = field(default_factory=Sharding.from_environment)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks: rank 0 of those that a launcher started."""
        return int(os.environ.get("RANK", "0")) == 0

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.training.get("output_dir") or f"runs/{self.recipe.name}")


def run(recipe: Recipe, task: str, *, resume: bool = False) -> Run:
    """Train as a recipe says.

    Args:
        task: "sft" or "pretrain".
        resume: go on from the last checkpoint in the recipe's output_dir.

    Raises:
        RecipeError: a mistake in the recipe, the data or the model; nothing is left behind.
        Stopped: a signal, a loss that is not finite or a full disk; the run can be resumed.
    """
    return _train(Job(recipe=recipe, task=task, resume=resume))


def tune(
    model: str | Path | PreTrainedModel,
    dataset: Any,
    *,
    task: str = "sft",
    method: str = "lora",
    output_dir: str | Path | None = None,
    eval_dataset: Any = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Fine-tune (or pretrain) a model on a dataset.

    Args:
        model: a checkpoint's name or folder, in any layout, or a model, which is patched and trained in place.
        dataset: rows (a list of dicts, or a datasets.Dataset), or the path or Hub name of a dataset.
        task: "sft" or "pretrain".
        method: "lora", "qlora" (4-bit base) or "full".
        output_dir: the run folder; None: runs/<model>-<method>-<n>.
        eval_dataset: as `dataset`; its loss is measured before, during and after training.
        tokenizer: needed with a model whose name leads to none.
        settings: SFTConfig's fields (learning_rate, max_steps, max_length, packing ...) and the adapter's keys (r,
            lora_alpha, targets ...), by name.

    Returns:
        The run: model, tokenizer, metrics, output_dir; merge, evaluate, generate, push.

    Raises:
        RecipeError, Stopped: as `run`.
    """
    recipe = recipe_from_settings(
        model,
        dataset,
        eval_dataset,
        method=method,
        output_dir=output_dir,
        tokenizer=tokenizer,
        resume=resume,
        settings=settings,
    )
    named = (str, Path)
    return _train(
        Job(
            recipe=recipe,
            task=task,
            resume=resume,
            model=None if isinstance(model, named) else model,
            tokenizer=None if isinstance(tokenizer, named) else tokenizer,
            rows=None if isinstance(dataset, named) else dataset,
            eval_rows=None if isinstance(eval_dataset, named) else eval_dataset,
        )
    )


def _train(job: Job) -> Run:
    peers = join(job.recipe.training, alone=job.sharding is not None)
    with StopOnSignal() as signals:
        folder = RunFolder.create(job.output_dir, resume=job.resume) if job.is_main else RunFolder(job.output_dir)
        with job.bar, told(folder, signals, resumed=job.resume, is_main=job.is_main, peers=peers):
            if peers is not None:
                peers.wait()
                folder.check_shared()
            checkpoint = folder.last_checkpoint() if job.resume else None
            if job.resume and checkpoint is None and job.is_main:
                logger.warning("--resume: no checkpoint was written yet; the run starts from its beginning.")
            if job.is_main:
                _write_recipe(job, folder)
            choose_kernels(job.recipe)
            tokenizer, data, arguments, defaults = _prepare(job, checkpoint)
            model = _build_model(job, folder, tokenizer)
            trainer = _build_trainer(job, folder, model, tokenizer, data, arguments, checkpoint, signals)
            is_packed, is_sharded = _is_packed(job), job.sharding is not None
            checked = _check_itself(job.recipe, trainer, packing=is_packed)
            graphs, why = choose_graphs(
                job.recipe, trainer.model, trainer.args, is_packed=is_packed, is_sharded=is_sharded
            )
            if job.is_main:
                _announce(job, folder, trainer, data, [*defaults, *checked, *why])
            with layer_graphs(graphs):
                _fit(trainer, folder, checkpoint, signals)
            return close_run(trainer, folder, job.recipe, job.task, data)


def _is_packed(job: Job) -> bool:
    return bool(job.recipe.training.get("packing", job.task == "pretrain"))


def _check_itself(recipe: Recipe, trainer: SSMTrainer, *, packing: bool) -> list[str]:
    """The self-check's findings, for the table at start."""
    if not recipe.kernels.self_check:
        return []
    found = check_model(trainer.model, trainer.accelerator.autocast, isolate=packing and recipe.data.isolate)
    return ["self-check: " + ", ".join(f"{name} {difference:.0e}" for name, difference in found.items())]


def _prepare(job: Job, checkpoint: Path | None) -> tuple[PreTrainedTokenizerBase, PreparedData, SFTConfig, list[str]]:
    """All that can be checked before weights are read: arguments, tokenizer, the adapter's targets, data."""
    recipe = job.recipe
    if is_streamed(recipe.data) and (job.task != "pretrain" or job.rows is not None):
        raise RecipeError("data.streaming, data.prepared: only ssm-tune pretrain trains on a stream of text.")
    has_eval = job.eval_rows is not None or bool(recipe.data.eval) or recipe.data.eval_fraction is not None
    arguments, defaults = build_arguments(
        recipe, job.task, job.output_dir, has_eval=has_eval, checkpoint=checkpoint, sharding=job.sharding
    )
    check_optimizer(job.sharding, arguments.optim)
    if job.model is not None:
        config = job.model.config
    elif recipe.model.name is not None:
        config = read_config(recipe.model.name, recipe.model.revision)
    else:
        plan_model(recipe)  # its mistakes, before data are read
        config = None
    tokenizer, told = _find_tokenizer(job, config, checkpoint)
    defaults += told
    packing = _is_packed(job)
    if config is not None:
        _check_model(job, config, packing and recipe.data.isolate)
    if is_streamed(recipe.data):
        data = prepare_stream(
            recipe.data,
            tokenizer,
            max_length=arguments.max_length,
            packing=packing,
            seed=arguments.seed,
            max_steps=arguments.max_steps,
        )
        return tokenizer, data, arguments, defaults
    data = prepare_data(
        recipe.data,
        tokenizer,
        task=job.task,
        max_length=arguments.max_length,
        packing=packing,
        seed=arguments.seed,
        completion_only_loss=arguments.completion_only_loss,
        assistant_only_loss=recipe.training.get("assistant_only_loss"),
        dataset=job.rows,
        eval_dataset=job.eval_rows,
        batch_size=arguments.per_device_train_batch_size,
    )
    return tokenizer, data, arguments, defaults


def _find_tokenizer(job: Job, config: Any, checkpoint: Path | None) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer, and what is to be said of one that was made here."""
    section, data = job.recipe.tokenizer, job.recipe.data
    if job.tokenizer is not None:
        return adopt_tokenizer(job.tokenizer, section, config), []
    if section.train:
        return trained_tokenizer(section, data, job.task, job.rows, checkpoint)
    name = job.recipe.model.name
    if job.model is not None and section.name is None:
        name = job.model.config.name_or_path or None
        if name is None:
            raise RecipeError("tune(): the model has no name that leads to a tokenizer. Pass tokenizer=.")
    return load_tokenizer(section, name, job.recipe.model.revision, config=config), []


def _check_model(job: Job, config: Any, isolated: bool) -> None:
    """What the family cannot do right, and adapter targets that are not there, told before weights are read."""
    section = job.recipe.adapter
    paths: list[str] = []
    if section is not None:
        model = job.model if job.model is not None else meta_model(config)
        check_targets(model, section)
        paths = adapter_targets(model, section.targets)
    mistakes = refusals(
        family_of(config.model_type),
        packing=isolated,
        targets={path.rpartition(".")[2] for path in paths},
        attention=job.recipe.model.attn_implementation or config._attn_implementation,
    )
    if mistakes:
        raise RecipeError(mistakes)


def _build_model(job: Job, folder: RunFolder, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model with its adapter, patched, SSM parameters and what is trained in float32."""
    recipe, section = job.recipe, job.recipe.model
    seed = recipe.training.get("seed", 42)
    trainable = "full" if recipe.adapter is None else "adapter"
    if job.model is not None:
        model = patch_model(job.model)
        set_trainable(model, trainable)
    elif section.name is not None:
        model = load_model(
            section.name,
            revision=section.revision,
            dtype=compute_dtype(recipe),
            load_in_4bit=section.load_in_4bit,
            load_in_8bit=section.load_in_8bit,
            attn_implementation=section.attn_implementation,
            trainable=trainable,
        )
    else:
        model = init_model(
            section,
            len(tokenizer),
            seed=seed,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    if recipe.adapter is not None:
        if job.is_main:
            _keep_base(model, tokenizer, folder)
        model = apply_adapter(model, recipe.adapter, seed=seed)
        model.active_peft_config.revision = section.revision
    return model


def _keep_base(model: Any, tokenizer: PreTrainedTokenizerBase, folder: RunFolder) -> None:
    """Save the base of an adapter that could not be loaded again by name: made in Python, or from dimensions."""
    name = model.config.name_or_path
    if name and (Path(name).is_dir() or not Path(name).is_absolute()):
        return
    base = folder.path / KEPT_BASE
    if not base.exists():  # a resumed run has it
        with RunFolder(base).staging("base") as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    model.config.name_or_path = model.name_or_path = str(base.resolve())


def _build_trainer(
    job: Job,
    folder: RunFolder,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: SFTConfig,
    checkpoint: Path | None,
    signals: StopOnSignal,
) -> SSMTrainer:
    packing = _is_packed(job)
    switch_off_router_loss(model.config, arguments)
    disable_progress_bar()  # transformers' own, for every file that a checkpoint writes
    start = StartAndResume(checkpoint)
    collator = Collator(tokenizer.pad_token_id, fixed_length=arguments.max_length if packing else None)
    stream = None if data.stream is None else make_stream(data.stream, arguments, collator, checkpoint)
    trainer = SSMTrainer(
        model,
        arguments,
        folder=folder,
        tokenizer=tokenizer,
        train_dataset=data.train,
        eval_dataset=data.eval,
        collator=collator,
        row_name=data.row_name if stream is None else stream.row_name,
        stream=stream,
        callbacks=[start, GradientCheck(), signals, TuningReport(), Recorder(folder), job.bar],
        sharding=job.sharding,
        checkpoint=checkpoint,
    )
    start.trainer = trainer
    return trainer


def _write_recipe(job: Job, folder: RunFolder) -> None:
    resolved = job.recipe.to_yaml()
    folder.write_text("recipe.yaml", job.recipe.text or resolved)
    folder.write_text(RESOLVED, resolved)
    folder.write_state(RUNNING, task=job.task, model=job.recipe.model.name)


def _announce(job: Job, folder: RunFolder, trainer: SSMTrainer, data: PreparedData, defaults: list[str]) -> None:
    """Write down and print what is about to happen."""
    arguments = trainer.args
    kernels = kernel_report(arguments.device, family_of(trainer.model.config.model_type).operations)
    artefacts.write_kernels(folder, kernels)
    folder.write_json(
        "environment.json", artefacts.describe_environment(arguments.device, world_size(), job.recipe.overrides)
    )
    length = arguments.max_steps if arguments.max_steps > 0 else f"{arguments.num_train_epochs:g} epochs"
    artefacts.print_start(
        job.bar.console,
        model=model_report(trainer.model),
        kernels=kernels,
        data=data.report,
        steps=f"{length} of {rows_per_step(arguments)} rows, seed {arguments.seed}",
        device=arguments.device,
        processes=describe_processes(job.sharding, world_size()),
        defaults=defaults,
        output=folder.path,
    )


def _fit(trainer: SSMTrainer, folder: RunFolder, checkpoint: Path | None, signals: StopOnSignal) -> None:
    """Train, and turn a signal into Stopped once its checkpoint is written."""
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.check_finite()
    if signals.received is not None and trainer.state.global_step < trainer.state.max_steps:
        raise Stopped(
            f"ended by {signal.Signals(signals.received).name} after step {trainer.state.global_step}; the checkpoint "
            f"is in {folder.checkpoints}. The same command with --resume goes on.",
            signals.exit_code,
        )
