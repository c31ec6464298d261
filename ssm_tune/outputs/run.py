"""A finished run, in memory: its model, its tokenizer, what it measured, and everything that follows from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssm_tune.adapter import load_adapter
from ssm_tune.outputs.decoding.loop import Decoder
from ssm_tune.outputs.evaluate import evaluate_model
from ssm_tune.outputs.finished_run import FinishedRun, load_finished_tokenizer, open_finished_run, read_metrics
from ssm_tune.outputs.generate import generate_text
from ssm_tune.outputs.merge import merge_run
from ssm_tune.outputs.model_card import add_results, is_hub_name
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What training returns. `model` is patched, and has its adapter on it if it was trained with one."""

    model: nn.Module
    tokenizer: Any
    metrics: dict[str, Any]
    output_dir: Path

    @classmethod
    def load(cls, folder: str | Path, **model_keys: Any) -> Run:
        """Open a finished run folder: base model and adapter together, or the whole model.

        Args:
            model_keys: keys of `load_model` (dtype, device, ...) in the place of the recipe's.

        Raises:
            RecipeError: not a run folder; a run that has not ended; files missing or damaged; a base model that was
                only ever in memory.
        """
        finished = open_finished_run(folder, only_runs=True)
        return cls(
            model=load_finished_model(finished, **model_keys),
            tokenizer=load_finished_tokenizer(finished),
            metrics=read_metrics(finished),
            output_dir=finished.folder,
        )

    def generate(self, prompt: str, **settings: Any) -> str:
        """The model's answer to a prompt, which is put as the run's training rows put it; see `generate_text`.

        Args:
            settings: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop; chat, to choose
                the chat template (True) or the bare text (False) whatever the run was trained with.

        Raises:
            RecipeError: an empty prompt or an impossible setting.
        """
        decoder = vars(self).setdefault("_decoder", Decoder())  # kept from prompt to prompt
        return generate_text(self.model, self.tokenizer, prompt, decoder=decoder, **settings)

    def evaluate(self, tasks: str | Sequence[str], limit: int | float | None = None, **settings: Any) -> dict[str, Any]:
        """Run lm-eval tasks, write eval.json (lm-eval's schema), and return the same; see `evaluate_model`."""
        results = evaluate_model(self.model, self.tokenizer, tasks, limit=limit, **settings)
        RunFolder(self.output_dir).write_json("eval.json", results)
        add_results(self.output_dir)
        return results

    def measure_perplexity(self, data: Any, **settings: Any) -> dict[str, Any]:
        """Predict texts (a file, a folder, a Hub name, rows in memory), write perplexity.json and perplexity.png into
        the run, and return the figures; see `outputs.perplexity.measure_perplexity`.
        """
        from ssm_tune.outputs.perplexity import measure_perplexity, write_perplexity

        found = measure_perplexity(self.model, self.tokenizer, data, **settings)
        write_perplexity(self.output_dir, found)
        add_results(self.output_dir)
        return found

    def merge(self, path: str | Path | None = None, dtype: str | torch.dtype | None = None) -> Path:
        """Write a model with the adapter merged in (default: `<run>/merged`); this run's own model stays as it is.

        Raises:
            RecipeError: the path exists already; merging would change what the model says.
        """
        return merge_run(self.output_dir, path, dtype=dtype)

    def push(self, repo: str, private: bool = False, what: str = "adapter") -> str:
        """Publish the run on the Hugging Face Hub, in one commit; returns the commit's address.

        Args:
            repo: owner/name; made if it is not there.
            what: "adapter", what the run trained (the whole model after full fine-tuning); or "merged", the merged
                model (merged into `<run>/merged` first, if it is not there yet).

        Raises:
            RecipeError: no token, no permission, a name that cannot be; and as `merge`.
        """
        from ssm_tune.outputs.hub import check_repo_name, push_folder  # the Hub's client: not for training

        if what not in ("adapter", "merged"):
            raise RecipeError(f"hub.push: {what!r} is neither adapter nor merged.")
        check_repo_name(repo)
        finished = open_finished_run(self.output_dir, only_runs=True)
        if what == "merged" and finished.adapter is not None:
            folder = self.output_dir / "merged"
            if not folder.exists():
                self.merge(folder)
        else:
            folder = self.output_dir
            if finished.adapter is not None and not is_hub_name(finished.base_name):
                logger.warning(
                    "push: the adapter's base model is a folder of this machine (%s), which readers have not. "
                    "Push what='merged', or push the base model too.",
                    finished.base_name,
                )
        add_results(folder, self.output_dir)  # it may have been merged before it was measured
        return push_folder(folder, repo, private=private, message=f"Upload {what} with ssm-tune")


def load_finished_model(finished: FinishedRun, **model_keys: Any) -> nn.Module:
    """The run's model, patched and frozen, in the recipe's dtype and quantisation unless told otherwise."""
    from ssm_tune.model import load_model

    if finished.adapter is not None and finished.base_name is None:
        raise RecipeError(
            f"{finished.folder}: its base model was given in memory and lies nowhere on disk. Make it again and use "
            "ssm_tune.adapter.load_adapter(model, folder)."
        )
    section = finished.model
    keys: dict[str, Any] = {
        "dtype": section.dtype,
        "load_in_4bit": section.load_in_4bit,
        "load_in_8bit": section.load_in_8bit,
        "attn_implementation": section.attn_implementation,
    }
    keys.update(model_keys)
    if finished.adapter is None:
        return load_model(str(finished.folder), trainable="none", **keys)
    base = load_model(finished.base_name, revision=finished.revision, trainable="none", **keys)
    return load_adapter(base, finished.folder)


def load_source(source: str | Path) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a finished run, or of any model that `load_model` reads; on the GPU if there is one."""
    from ssm_tune.model import load_model, read_config
    from ssm_tune.recipe import TokenizerSection
    from ssm_tune.tokenizer import load_tokenizer

    keys = {"device": "cuda"} if torch.cuda.is_available() else {}
    if (Path(source) / "run.json").exists():
        run = Run.load(source, **keys)
        return run.model, run.tokenizer
    tokenizer = load_tokenizer(TokenizerSection(), str(source), None, config=read_config(source))
    return load_model(source, trainable="none", **keys), tokenizer
