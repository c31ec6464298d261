"""Moving a checkpoint from one layout to another without touching its numbers."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from transformers import PreTrainedModel

from ssm_tune.families import Family, family_of
from ssm_tune.layouts import LAYOUTS, Checkpoint, Layout, Parallel, StoredTensor, open_checkpoint
from ssm_tune.layouts.writing import NewFiles, Outgoing
from ssm_tune.precision import read_dtype
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import is_disk_full
from ssm_tune.weight_checks import check_weights

logger = logging.getLogger(__name__)

_ALIASES = {"hf": "huggingface"}
_HEAD = "lm_head.weight"
# What belongs to the tokenizer, and goes along whatever the layout.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "chat_template.jinja",
)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
) -> Path:
    """Write a checkpoint in another layout (or the same one, in another dtype). Memory holds one tensor at a time.

    Args:
        src: a folder or Hub repository of any layout; a run folder of full fine-tuning.
        dst: the new folder; it must not exist.
        to: "hf", "state-spaces", "mistral" or "megatron".
        dtype: cast the weights to it; None: every number stays as it is. SSM parameters are never cast.
        revision: of a Hub repository.
        tp, pp: over how many tensor-parallel and pipeline ranks a Megatron checkpoint is spread (1).

    Returns:
        The new folder. The tokenizer's files are copied along.

    Raises:
        RecipeError: a layout that is none; a config that the target cannot express (each field is named); tensors that
            are missing, unexpected or mis-shaped, or cannot be spread over so many ranks; the target exists or the disk
            is full. Nothing is left behind.
    """
    target = _find_target(to)
    parallel = _read_parallel(target, tp, pp)
    folder = Path(dst)
    if folder.exists():
        raise RecipeError(f"convert: {folder} exists already. Name another folder, or take it away first.")
    if (Path(src) / "adapter_config.json").is_file():
        raise RecipeError(f"convert: {src} holds an adapter. Merge it first: ssm-tune merge {src}")
    checkpoint = open_checkpoint(str(src), revision, key="convert")
    if hasattr(checkpoint.config, "quantization_config"):
        raise RecipeError(f"{checkpoint.source.label} is quantised. Convert the checkpoint that it was made from.")
    weights = checkpoint.weights()
    model = check_weights(checkpoint, weights)
    tensors = _plan(checkpoint, weights, model, target, None if dtype is None else read_dtype(dtype))
    new = _lay_out(checkpoint, target, tensors, parallel)
    _write(folder, checkpoint, target, new)
    return folder


def _find_target(to: str) -> Layout:
    layouts = {layout.name: layout for layout in LAYOUTS}
    name = _ALIASES.get(to, to)
    if name not in layouts:
        names = ("hf", *(name for name in layouts if name != "huggingface"))
        near = get_close_matches(to, names, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(f"convert: --to {to!r} is not a layout that can be written.{guess} It is {', '.join(names)}.")
    return layouts[name]


def _read_parallel(target: Layout, tp: int | None, pp: int | None) -> Parallel:
    for key, value in {"tp": tp, "pp": pp}.items():
        if value is not None and not target.writing.parallel:
            raise RecipeError(f"convert: --{key} is for the megatron layout; {target.name} has no ranks. Leave it out.")
        if value is not None and (type(value) is not int or value < 1):
            raise RecipeError(f"convert: --{key} is {value!r}; a positive whole number is expected.")
    return Parallel(tp or 1, pp or 1)


def _plan(
    checkpoint: Checkpoint,
    weights: Mapping[str, StoredTensor],
    model: PreTrainedModel,
    target: Layout,
    dtype: torch.dtype | None,
) -> dict[str, Outgoing]:
    """Every tensor that is to be written, by its name in transformers' model, or as in the file if the layout stays."""
    config = checkpoint.config
    planned = dict(weights)
    if target is not checkpoint.layout:
        planned = _model_names(checkpoint, planned, model)
    embedding = next(name for name, value in model.named_parameters() if value is model.get_input_embeddings().weight)
    if config.tie_word_embeddings and model._tied_weights_keys:
        _settle_tied_head(checkpoint, planned, embedding, target.writing.repeats_tied_head)
    family = family_of(config.model_type)
    return {name: Outgoing(tensor, _new_dtype(name, tensor, family, dtype)) for name, tensor in planned.items()}


def _model_names(
    checkpoint: Checkpoint, weights: dict[str, StoredTensor], model: PreTrainedModel
) -> dict[str, StoredTensor]:
    """The tensors by the model's own names; transformers writes some of them into files under older ones."""
    known = model.state_dict(keep_vars=True).keys()
    prefix = f"{model.base_model_prefix}."
    named = {}
    for name, tensor in weights.items():
        renamed = name if name in known else prefix + name.removeprefix("backbone.")
        if renamed not in known:
            raise RecipeError(
                f"{checkpoint.source.label}: {name} has no name in another layout than {checkpoint.layout.name}."
            )
        named[renamed] = tensor
    return named


def _settle_tied_head(checkpoint: Checkpoint, planned: dict[str, StoredTensor], embedding: str, repeated: bool) -> None:
    """Have a tied weight once, or under both names, as the target has it."""
    if _HEAD in planned and embedding in planned:
        if not torch.equal(planned[_HEAD].load(), planned[embedding].load()):
            raise RecipeError(
                f"{checkpoint.source.label}: its config ties {_HEAD} to {embedding}, but the two differ. Say in the "
                f"config that they are not tied, or take one away."
            )
    elif _HEAD in planned:
        planned[embedding] = planned[_HEAD]
    planned.pop(_HEAD, None)
    if repeated:
        planned[_HEAD] = planned[embedding]


def _new_dtype(name: str, tensor: StoredTensor, family: Family, dtype: torch.dtype | None) -> torch.dtype:
    kept = dtype is None or not tensor.dtype.is_floating_point or family.is_ssm_parameter(name)
    return tensor.dtype if kept or dtype is None else dtype


def _lay_out(checkpoint: Checkpoint, target: Layout, tensors: Mapping[str, Outgoing], parallel: Parallel) -> NewFiles:
    """The new files, from the config in the target's words."""
    config = checkpoint.config
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    config.dtype = sizes.most_common(1)[0][0]
    if config.architectures is None:
        from transformers import AutoModelForCausalLM

        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    try:
        return target.writing.plan(target.writing.express(config), config, tensors, parallel)
    except RecipeError as error:
        raise RecipeError([f"{checkpoint.source.label}: {mistake}" for mistake in error.mistakes]) from error


def _write(folder: Path, checkpoint: Checkpoint, target: Layout, new: NewFiles) -> None:
    """Into a hidden folder beside the target, which is renamed when all is there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise RecipeError(f"convert: cannot write to {folder.parent} ({error.strerror}).") from error
    try:
        partial.chmod(0o755)
        for name, text in new.texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for name in (*_TOKENIZER_FILES, *(("generation_config.json",) if target.name == "huggingface" else ())):
            file = checkpoint.source.get(name)
            if file is not None:
                shutil.copyfile(file, partial / name)
        with _bar(sum(file.nbytes for file in new.weights)) as bar:
            task = bar.tasks[0].id
            for weights in new.weights:
                weights.write(partial, lambda count: bar.advance(task, count))
        partial.rename(folder)
    except (OSError, RuntimeError) as error:
        if is_disk_full(error):
            raise RecipeError(f"convert: the disk is full; {folder} was not written.") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _bar(total: int) -> Progress:
    console = Console(stderr=True)
    columns = ("writing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not (console.is_terminal and sys.stderr.isatty()))
    bar.add_task("writing", total=total)
    return bar
