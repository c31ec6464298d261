"""What watches a run: the gradient check, signals, metrics.jsonl, the progress bar."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ssm_tune.gradient_check import dead_parameters
from ssm_tune.kernels.tuning import report_tuning
from ssm_tune.peers import current
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import RunFolder

if TYPE_CHECKING:
    from ssm_tune.trainer import SSMTrainer


logger = logging.getLogger(__name__)

_ECHO = 10.0  # seconds in which a signal that comes again is the same one


class GradientCheck(TrainerCallback):
    """Before the first optimizer step: every trainable parameter has a gradient, or the run stops and names them."""

    unclipped_will_do = True  # clipping scales gradients; zeros stay zeros

    def __init__(self) -> None:
        self.done = False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.done:
            return
        self.done = True
        dead = dead_parameters(kwargs["model"])
        if dead:
            shown = "\n  ".join(str(parameter) for parameter in dead[:20])
            more = f"\n  and {len(dead) - 20} more" if len(dead) > 20 else ""
            raise RecipeError(
                f"{len(dead)} trainable parameters would never be trained:\n  {shown}{more}\n"
                "Name other adapter.targets, or train them on a path that uses them."
            )


class StopOnSignal(TrainerCallback):
    """Ctrl-C and SIGTERM end training after the step under way, with a checkpoint; a second one ends it at once.

    Before the first step and after the last there is no such step: then KeyboardInterrupt is raised on the spot. Of
    several processes all end after the same step: the one in which the first of them heard of it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.training = False
        self.closing = False  # a failed run is being put in order: no signal breaks that off
        self.steps = 0  # that ended in this process
        self._previous: dict[int, Any] = {}
        self._noted = 0.0  # clock

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A scheduler, or a terminal, tells the launcher and its processes, and the launcher tells them once more.
        echo = current() is not None and time.monotonic() - self._noted < _ECHO
        again = self.received is not None and not echo
        self.received, self._noted = number, time.monotonic()
        if not self.closing and (again or not self.training):
            raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        return 128 + (self.received or 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.training = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.training = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps += 1
        peers = current()
        if peers is not None:
            self.received = peers.agree(self.received or 0) or None
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True


class TuningReport(TrainerCallback):
    """After a step in which Triton tuned kernels: how many, for how long, and where the result is kept."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        said = report_tuning()
        if said and state.is_world_process_zero:
            logger.warning(said)


class Recorder(TrainerCallback):
    """Appends every log to metrics.jsonl; a resumed run first drops what lies behind its checkpoint."""

    def __init__(self, folder: RunFolder) -> None:
        self.file = folder.path / "metrics.jsonl"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.file.exists():
            lines = self.file.read_text().splitlines() if state.global_step else []  # at 0 the first evaluation too
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
            self.file.write_text("".join(f"{line}\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class StartAndResume(TrainerCallback):
    """At the start: restores the interrupted log window of a resumed run, and starts the clock of the throughput."""

    def __init__(self, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint
        self.trainer: SSMTrainer | None = None  # set once the trainer exists

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.checkpoint is not None:
            self.trainer.restore_window(self.checkpoint)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer.throughput.session_tokens() == 0:
            self.trainer.throughput.start(state.global_step)


class ProgressBar(TrainerCallback):
    """A bar with loss, tokens/s and ETA; where the output is no terminal, a line for each log."""

    def __init__(self, console: Console | None = None) -> None:
        # Where there is no terminal (a log file), there is no width of 80 columns either.
        self.console = console or Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)
        self.bar: Progress | None = None
        self.task: Any = None
        self.begun = (0.0, 0)  # clock, step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun = (time.perf_counter(), state.global_step)
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self.bar = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step, figures="")
        self.bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "eval_loss" in logs:
            perplexity = logs.get("eval_perplexity")
            told = f", perplexity {perplexity:,.2f}" if perplexity is not None else ""
            self._say(f"step {state.global_step}: eval loss {logs['eval_loss']:.4f}{told}")
        if "loss" in logs:
            figures = f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tokens/s"
            if self.bar:
                self.bar.update(self.task, figures=figures)
            else:
                clock, step = self.begun
                left = (
                    (time.perf_counter() - clock)
                    / max(state.global_step - step, 1)
                    * (state.max_steps - state.global_step)
                )
                self._say(
                    f"step {state.global_step}/{state.max_steps}  {figures}  ETA {int(left) // 60}:{int(left) % 60:02d}"
                )

    def _say(self, text: str) -> None:
        (self.bar.console if self.bar else self.console).print(text)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()  # also when training ends by an exception

    def close(self) -> None:
        """Stop drawing."""
        if self.bar:
            self.bar.stop()
            self.bar = None
