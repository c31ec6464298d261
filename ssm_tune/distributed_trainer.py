"""TRL's SFTTrainer over several processes: rows, gradients and checkpoints of a sharded model, or of one by DDP.

To transformers' Trainer a sharded model is one that "was sharded at load time": it wraps nothing, reduces nothing and
leaves saving to us. See `ssm_tune.sharding` for why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from torch import nn
from transformers.trainer_pt_utils import BatchRebalanceSampler
from trl import SFTTrainer

from ssm_tune import sharded_checkpoints as checkpoints
from ssm_tune.data.loading import leave_signals_to_the_run
from ssm_tune.optimizer import decayed_parameter_names
from ssm_tune.rank_batches import FilledRows, filled_sampler, tell_epochs
from ssm_tune.recipe import RecipeError
from ssm_tune.sharded_optimizer import step_on_shards
from ssm_tune.sharding import Sharding, average_replicated, clip_gradients, replicated, shard_model, split_groups

# MiB of gradients that DDP sends at a time, where training.ddp_bucket_cap_mb is left open. By torch's 25 MiB a model of
# 1.3 billion parameters sends 210 times a step.
_BUCKET = 100
_SCHEDULER, _OPTIMIZER = "scheduler.pt", "optimizer.pt"  # transformers' names


class DistributedTrainer(SFTTrainer):
    """Trains on the rows of this process; with `sharding`, on this process's share of the model too.

    A subclass calls `shard` once the model is as it is to be trained.
    """

    def __init__(self, *args: Any, sharding: Sharding | None = None, **kwargs: Any) -> None:
        self.sharding = sharding
        self._whole: list[nn.Parameter] = []  # trained parameters that every rank holds whole
        super().__init__(*args, **kwargs)

    def shard(self) -> None:
        """Shard `self.model`."""
        shard_model(self.model, self.sharding, self.args.device, bf16=self.args.bf16)
        self._whole = replicated(self.model)
        self.is_distributed_loading_by_transformers = True

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """DDP's buckets are the gradients: it neither copies what it has summed out of them nor needs the memory of
        both."""
        arguments = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
                if self.args.ddp_bucket_cap_mb is None:
                    handler.bucket_cap_mb = _BUCKET
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.sharding is None:  # else some blocks at a time, when it is sharded
            super()._move_model_to_device(model, device)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Each row on one process; see `ssm_tune.rank_batches`."""
        loader = self._loader_of_rows(dataset, description, batch_size, sampler_fn, **kwargs)
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's loader is round the one with the workers
        inner.worker_init_fn = partial(leave_signals_to_the_run, then=inner.worker_init_fn)
        return loader

    def _loader_of_rows(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        processes = self.accelerator.num_processes
        if processes == 1 or self.args.dataloader_drop_last or not hasattr(dataset, "__len__"):
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, **kwargs)
        rows = FilledRows(dataset)
        sampler = None if sampler_fn is None else sampler_fn(dataset)
        if not isinstance(sampler, BatchRebalanceSampler):  # which gives each process rows of its own
            sampler = filled_sampler(sampler, rows, batch_size * processes, self.args.data_seed)
        loader = super()._get_dataloader(rows, description, batch_size, lambda _: sampler, **kwargs)
        return tell_epochs(loader, sampler)

    # -- gradients ------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        try:
            optimizer = super().create_optimizer(*args, **kwargs)
        except ImportError as error:  # of a package that only this optimizer needs
            raise RecipeError(f"training.optim: {error}") from error
        if self.sharding is not None:
            split_groups(optimizer)
            step_on_shards(optimizer)
        return optimizer

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Theirs averages one parameter at a time, by an operation that gloo lacks; `training_step` does it."""

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Round every micro-batch of a step but the last. Gradients are reduced each time all the same: held back, they
        would be whole on every rank. Only the replicas of HSDP wait for the last one with their sums."""
        replicas = self.sharding.replicas > 1
        if replicas:
            self.model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            if replicas:
                self.model.set_requires_all_reduce(True)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.sharding is not None and self.accelerator.sync_gradients:  # the step's last micro-batch
            average_replicated(self._whole)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.sharding is None:
            return super()._clip_grad_norm(model)
        return clip_gradients(self.model, self.args.max_grad_norm, self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.sharding is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return clip_gradients(self.model, float("inf"), self.args.device)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.sharding is None:
            super()._save(output_dir, state_dict)
        else:
            checkpoints.save_model(self.model, Path(output_dir or self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharding is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        checkpoints.save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if checkpoints.is_sharded_checkpoint(Path(resume_from_checkpoint)):
            checkpoints.load_model(self.model, Path(resume_from_checkpoint))
        elif self.sharding is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # else it is unsharded, and was read before the model was sharded

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if checkpoints.is_sharded_checkpoint(best):
            checkpoints.load_model(self.model, best)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or (self.sharding is None and not checkpoints.is_sharded_checkpoint(folder)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self.optimizer.optimizer
        if (folder / checkpoints.OPTIMIZER).is_dir():
            checkpoints.load_optimizer(self.model, optimizer, folder)
        elif (folder / _OPTIMIZER).is_file():
            checkpoints.load_whole_optimizer(self.model, optimizer, folder / _OPTIMIZER, self._unsharded_order())
        else:  # training.save_only_model
            return
        self._load_scheduler(torch.load(folder / _SCHEDULER, weights_only=True))

    def _load_scheduler(self, state: dict[str, Any]) -> None:
        """Sharded and unsharded optimizers have other numbers of groups, all with one learning rate."""
        groups = len(self.optimizer.param_groups)
        for key in ("base_lrs", "_last_lr", "lr_lambdas"):
            if key in state:
                state[key] = (state[key] * groups)[:groups]
        self.lr_scheduler.load_state_dict(state)

    def _unsharded_order(self) -> list[str]:
        """The trained parameters' names as the optimizer of an unsharded model has them: decayed ones first."""
        trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        decayed = set(decayed_parameter_names(self.model))
        return sorted(trained, key=lambda name: name not in decayed)
