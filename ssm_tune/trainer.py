"""One trainer for SFT and pretraining: TRL's SFTTrainer with prepared rows, exact resume and an honest loss.

Why a subclass of SFTTrainer and not of transformers' Trainer: it calls the backbone and a chunked language-model head,
so full logits are never built, and it passes document borders to the backbone where the stock causal LM drops them.
What it does to data is not used here: rows arrive tokenised, labelled and packed (`ssm_tune.data`), since its packing
leaks in models that ignore `seq_idx`, and its assistant-only loss needs a template with generation markers.

What is added: losses that are sums over tokens until they are logged (so an eval loss does not depend on the batch
size), no device synchronisation per micro-batch, a stop at the first loss that is not finite, checkpoints that appear
whole, and a resumed run whose numbers are those of an unbroken one.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig

from ssm_tune import adapter
from ssm_tune.data.stream import TokenStream, write_state
from ssm_tune.distributed_trainer import DistributedTrainer
from ssm_tune.finite import FiniteWatch, Watched
from ssm_tune.head_chunks import even_chunks
from ssm_tune.model import load_model
from ssm_tune.optimizer import clip_in_step, clips_in_step, decayed_parameter_names
from ssm_tune.peers import current
from ssm_tune.run_folder import RunFolder, Stopped, is_disk_full
from ssm_tune.sharded_checkpoints import is_sharded_checkpoint
from ssm_tune.sharding import Sharding
from ssm_tune.throughput import Throughput
from ssm_tune.training_arguments import WINDOW, rows_per_step

logger = logging.getLogger(__name__)


class LossSums:
    """Sums over tokens, kept on the device: negative log-likelihood, entropy, hits and how many tokens they cover."""

    def __init__(self) -> None:
        self.totals: torch.Tensor | None = None  # (4,)

    def add(self, outputs: Any, per_token_loss: torch.Tensor) -> None:
        dtype = torch.float32 if per_token_loss.device.type == "mps" else torch.float64  # mps has no float64
        values = (per_token_loss, outputs.entropy, outputs.is_top1, outputs.label_mask)
        sums = torch.stack([value.detach().sum().to(dtype) for value in values])
        self.totals = sums if self.totals is None else self.totals + sums

    def drain(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means over all tokens of all processes since the last call, and start again."""
        if self.totals is None:
            return {}
        nll, entropy, hits, tokens = gather(self.totals[None]).sum(0).tolist()
        self.totals = None
        tokens = max(tokens, 1.0)
        return {"loss": nll / tokens, "entropy": entropy / tokens, "mean_token_accuracy": hits / tokens}


class SSMTrainer(DistributedTrainer):
    """Trains a patched model on prepared rows and writes into a run folder.

    Args:
        model: a patched causal LM, or a PEFT model round one.
        args: SFTConfig with packing off (rows are packed already) and the folder's `checkpoints` as output_dir.
        folder: where artefacts go.
        collator: makes batches of input_ids, labels, borders and `rows` (batch, n), the numbers of the source rows.
        row_name: names a source row for messages.
        sharding: how to shard the model over the processes; None: each holds it whole.
        checkpoint: what a resumed run goes on from.
        stream: what is trained on in the place of train_dataset, which then is one row that stands for it.

    Raises:
        Stopped: the loss or the gradient norm is not finite, or the disk is full while a checkpoint is written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: SFTConfig,
        *,
        folder: RunFolder,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any,
        collator: Any,
        row_name: Callable[[int], str] = str,
        callbacks: list[Any] | None = None,
        sharding: Sharding | None = None,
        checkpoint: Path | None = None,
        stream: TokenStream | None = None,
    ) -> None:
        self.stream = stream
        if stream is not None:
            args.ignore_data_skip = True  # a resumed stream begins where it was; nothing is to be skipped
        args.dataset_kwargs = {"skip_prepare_dataset": True}
        args.remove_unused_columns = False
        args.logging_nan_inf_filter = False  # it would log an average in the place of a NaN
        self.folder = folder
        self.row_name = row_name
        self.sums = {"train": LossSums(), "eval": LossSums()}
        self.throughput: Throughput | None = None
        self.watch = FiniteWatch()
        self._staging: Path | None = None  # where a checkpoint is being written
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            train_dataset=train_dataset.with_format("numpy"),  # made into a batch twice as fast as lists
            eval_dataset=None if eval_dataset is None else eval_dataset.with_format("numpy"),
            data_collator=collator,
            callbacks=callbacks,
            sharding=sharding,
        )
        for parameter in self.model.parameters():
            # SFTTrainer casts the adapters of a quantised model to bfloat16; what is trained here has fp32 masters.
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        self.throughput = Throughput(self.model, self.args.device)
        self.remove_callback(PrinterCallback)  # `ProgressBar` speaks
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                callback.logging_dir = str(folder.path / "tensorboard")
        if sharding is not None:
            if checkpoint is not None and not is_sharded_checkpoint(checkpoint):
                self._read_whole(checkpoint)
            self.shard()

    def _read_whole(self, checkpoint: Path) -> None:
        """Read a checkpoint of unsharded training, while the model is whole."""
        if adapter.is_adapted(self.model):
            adapter.restore_adapter(self.model, checkpoint)
        else:
            self.model.load_state_dict(load_model(str(checkpoint), trainable="full").state_dict())

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run folder's own card is written at the end; checkpoints need none."""

    def get_train_dataloader(self) -> Any:
        """The stream's own loader, which deals its rows out to processes and workers itself."""
        return super().get_train_dataloader() if self.stream is None else self.stream

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of a step; how long they are waited for is logged as `data_wait_share`."""
        return super().get_batch_samples(self.throughput.watch(epoch_iterator), num_batches, device)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return decayed_parameter_names(model)

    # -- loss -----------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The sum of the tokens' losses over the number of tokens of the whole (accumulated, global) batch."""
        rows = inputs.pop("rows", None)
        training = self.model.training
        if training:
            self._stop_at(self.watch.next_batch())
            self.throughput.count(inputs, rows)
        if return_outputs or self.label_smoother is not None or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with even_chunks(self.model.config.vocab_size):
            outputs = model(**inputs, fused_lm_head=True)
        per_token_loss = -outputs.log_probs  # zero where there is no label
        self.sums["train" if training else "eval"].add(outputs, per_token_loss)
        if (
            self.args.loss_type == "dft"
        ):  # Dynamic Fine-Tuning, arXiv 2508.05629: weighted by the token's own probability
            per_token_loss = per_token_loss * outputs.log_probs.exp().detach()
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = per_token_loss.sum() / torch.as_tensor(tokens, device=per_token_loss.device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # DDP and FSDP average over ranks
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        if training:
            self._expect_finite(loss.detach(), rows)
        return loss

    def _expect_finite(self, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Stop at a value that is not finite: at once on the CPU, elsewhere when reading it costs no waiting."""
        self.watch.add(self.state.global_step + 1, value, rows)
        if value.device.type == "cpu":
            self.check_finite()

    def check_finite(self) -> None:
        """Raises Stopped, naming step, rows and the last good checkpoint, if a loss or gradient norm was not finite."""
        self._stop_at(self.watch.rest())

    def _stop_at(self, found: Watched | None) -> None:
        if found is None:
            return
        step, rows, value = found
        numbers = [] if rows is None else [row for row in rows.flatten().tolist() if row >= 0]
        what = f"the loss is {value.item()}" if numbers else f"the norm of the gradients is {value.item()}"
        where = f" on {', '.join(self.row_name(number) for number in numbers[:20])}" if numbers else ""
        more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
        found = self.folder.list_checkpoints()
        good = (
            f"The last good checkpoint is {found[-1]}; --resume goes on from it."
            if found
            else "No checkpoint was written yet."
        )
        raise Stopped(
            f"step {step}: {what}{where}{more}. {good} A lower training.learning_rate or max_grad_norm, "
            "or leaving those rows out, usually helps."
        )

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        optimizer, parameters = getattr(self.optimizer, "optimizer", None), list(model.parameters())
        if self._nobody_reads_clipped() and clips_in_step(optimizer, parameters):
            norm = clip_in_step(optimizer, parameters, self.args.max_grad_norm)
        else:
            norm = super()._clip_grad_norm(model)
        if isinstance(norm, torch.Tensor):
            self._expect_finite(norm.detach())
        return norm

    def _nobody_reads_clipped(self) -> bool:
        """Whether gradients, once clipped, are read by the optimizer alone: by no scaler, and by no callback, which are
        promised clipped ones by transformers, but for those that say that they can do without (`unclipped_will_do`)."""
        return (
            self.sharding is None
            and self.accelerator.scaler is None
            and all(
                type(callback).on_pre_optimizer_step is TrainerCallback.on_pre_optimizer_step
                or getattr(callback, "unclipped_will_do", False)
                for callback in self.callback_handler.callbacks
            )
        )

    # -- logs -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put sums over all tokens and ranks in the place of averages of averages, and add throughput."""
        if "loss" in logs:
            means = self.sums["train"].drain(self.accelerator.gather)
            logs.update(means)
            logs.update(self._rates())
            if self.stream is not None:  # an epoch is max_steps; Trainer counts from where the process began
                self.state.epoch = self.state.global_step / self.state.max_steps
        for key in [key for key in logs if key.startswith("eval_") and key.endswith("_loss")]:
            prefix = key.removesuffix("loss")
            for name, value in self.sums["eval"].drain(self.accelerator.gather).items():
                logs[f"{prefix}{name}"] = value
            logs[f"{prefix}perplexity"] = math.exp(min(logs[key], 700.0))  # beyond that there is no such number
        self._metrics["train"].clear()
        self._metrics["eval"].clear()
        super().log(logs, start_time)

    def _rates(self) -> dict[str, float]:
        """Tokens and tokens per second of all processes together, MFU and waiting as their mean; the rest as here."""
        rates, peers = self.throughput.drain(self.state.global_step), current()
        if peers is not None:
            summed, means = ("num_tokens", "tokens_per_second"), ("mfu", "data_wait_share")
            shared = [name for name in (*summed, *means) if name in rates]
            rates.update(zip(shared, peers.add([rates[name] for name in shared]), strict=True))
            rates.update({name: rates[name] / peers.count for name in means if name in rates})
        return rates

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or self.args.output_dir)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write a checkpoint beside its place and rename it there; on a full disk nothing of it stays."""
        self.check_finite()
        target = self.folder.checkpoints / f"checkpoint-{self.state.global_step}"
        if target in self.folder.list_checkpoints() and self.state.global_step > self._initial_global_step:
            return  # this very step was saved a moment ago
        self._staging = self.folder.checkpoints / ".partial"
        staged = self._staging / target.name
        try:
            if self.accelerator.is_main_process:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._staging.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            window = self._window()
            if self.stream is not None:
                steps = self.state.global_step - self._initial_global_step
                position = self.stream.state_at(steps * self.args.gradient_accumulation_steps)
                write_state(staged, self.args.process_index, position)
            self.accelerator.wait_for_everyone()
            best = self.state.best_model_checkpoint == str(staged)
            if best:
                self.state.best_model_checkpoint = str(target)  # on every rank: together they load it in the end
            if self.accelerator.is_main_process:
                if best:
                    self.state.save_to_json(str(staged / "trainer_state.json"))
                (staged / WINDOW).write_text(json.dumps(window), encoding="utf-8")
                self.folder.commit_checkpoint(staged)
                rotate_checkpoints(
                    output_dir=str(self.folder.checkpoints),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,
                )
        except (OSError, RuntimeError) as error:
            if not is_disk_full(error):
                raise
            found = self.folder.list_checkpoints()
            last = f"the last whole checkpoint is {found[-1].name}" if found else "there is no earlier checkpoint"
            raise Stopped(
                f"step {self.state.global_step}: the disk is full while writing a checkpoint in "
                f"{self.folder.checkpoints}; {last}. Free some space "
                "(training.save_total_limit keeps fewer) and use --resume."
            ) from error
        finally:
            if self.accelerator.is_main_process:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.sharding is not None or not adapter.is_adapted(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:  # with the SSM parameters beside it, and nothing asked of the Hub
            adapter.save_adapter(self.model, Path(output_dir or self.args.output_dir), state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        unsharded = self.sharding is None and not is_sharded_checkpoint(Path(resume_from_checkpoint))
        if unsharded and adapter.is_adapted(self.model):
            adapter.restore_adapter(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _window(self) -> dict[str, Any]:
        """What is summed up since the last log, over all processes: an unbroken run would have it in its next log."""
        totals, peers = self.sums["train"].totals, current()
        sums = None if totals is None else totals.tolist()
        loss, tokens = self._tr_loss.item(), self.throughput.total_tokens()
        if peers is not None:
            loss, tokens, *sums = peers.add([loss / peers.count, tokens, *(sums or [0.0] * 4)])
        return {
            "tr_loss": loss,
            "last_logged": self._globalstep_last_logged,
            "sums": sums,
            "tokens": int(tokens),
            "rows_per_step": rows_per_step(self.args),
            "processes": self.accelerator.num_processes,
        }

    def restore_window(self, checkpoint: str | Path) -> None:
        """Take up the sums of an interrupted log window (called when training begins)."""
        window = json.loads((Path(checkpoint) / WINDOW).read_text(encoding="utf-8"))
        self._tr_loss += window["tr_loss"]
        self._globalstep_last_logged = window["last_logged"]
        if not self.accelerator.is_main_process:
            return  # the sums are all processes'; one of them goes on with them
        if window["sums"] is not None:
            self.sums["train"].totals = torch.tensor(window["sums"], dtype=torch.float64, device=self.args.device)
        self.throughput.restore(window["tokens"])
