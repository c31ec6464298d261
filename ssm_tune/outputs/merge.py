"""Merging an adapter into its base model: checked before anything is written, and written whole or not at all.

The merge is done in float32 and rounded once, at the end. PEFT adds in the base's own dtype, which rounds twice.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ssm_tune.adapter import load_adapter
from ssm_tune.families import family_of
from ssm_tune.mixers import unpatch_model
from ssm_tune.model import load_model, read_dtype
from ssm_tune.outputs.finished_run import FinishedRun, load_finished_tokenizer, open_finished_run
from ssm_tune.outputs.model_card import write_merged_card
from ssm_tune.quantization import is_quantized, release_norms
from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import open_to_readers
from ssm_tune.weight_checks import without_bars

logger = logging.getLogger(__name__)

# Largest difference of logits that is rounding, as a share of the largest: merged weights sum in another order.
_TOLERANCE = 1e-4


def merge_run(folder: str | Path, path: str | Path | None = None, dtype: str | torch.dtype | None = None) -> Path:
    """Write a run's model with adapter and train_also merged in, for plain AutoModelForCausalLM to load.

    Works on the CPU and takes four bytes of memory for each parameter.

    Args:
        folder: a finished run; or a folder with an adapter (a checkpoint of a run).
        path: where to; None: `<folder>/merged`. It must not exist yet.
        dtype: of the merged weights; None: what the base was loaded in. SSM parameters stay float32 in the file.
            A quantised base is dequantised and becomes 16-bit.

    Raises:
        RecipeError: the folder is not a finished run; the path exists; the merged model says something else than the
            adapter's (nothing is written then).
    """
    finished = open_finished_run(folder)
    target = Path(path) if path is not None else finished.folder / "merged"
    if target.exists():
        raise RecipeError(f"merge: {target} exists already. Name another path, or take it away first.")
    if finished.adapter is None:
        logger.warning("merge: %s has no adapter; its model is copied%s.", finished.folder, _as_dtype(dtype))
        model = load_model(str(finished.folder), dtype=dtype or "auto", trainable="none", device="cpu")
        stored = read_dtype(dtype) if dtype is not None else model.dtype
    else:
        base, stored = _load_base(finished, dtype)
        model = merge_adapter(load_adapter(base, finished.folder, trainable=True))
        _round_weights(model, stored)
    _write_model(model, stored, finished, target)
    return target


def _as_dtype(dtype: str | torch.dtype | None) -> str:
    return "" if dtype is None else f" as {str(read_dtype(dtype)).removeprefix('torch.')}"


def _load_base(finished: FinishedRun, dtype: str | torch.dtype | None) -> tuple[nn.Module, torch.dtype]:
    """The base model in float32 on the CPU, with the values it had in training; and the dtype to store."""
    section = finished.model
    quantised = section.load_in_4bit or section.load_in_8bit
    base = load_model(
        finished.base_name,
        revision=finished.revision,
        dtype=finished.dtype,
        load_in_4bit=section.load_in_4bit,
        load_in_8bit=section.load_in_8bit,
        attn_implementation=section.attn_implementation,
        trainable="none",
        device="cpu",
    )
    stored = read_dtype(dtype if dtype is not None else finished.dtype)
    if quantised:
        base = _dequantise(base)
        if dtype is None and stored == torch.float32:
            stored = torch.bfloat16
    return base.float(), stored


def _dequantise(model: nn.Module) -> nn.Module:
    """Plain float32 linears with the values that the packed ones stand for."""
    from ssm_tune.mixers import patch_model

    model = unpatch_model(model).dequantize(dtype=torch.float32)
    release_norms(model)
    if is_quantized(model):
        raise RecipeError("merge: the base's quantised weights could not be turned back into plain ones.")
    logger.warning("merge: the base is quantised; its weights keep the rounding that the adapter was trained with.")
    return patch_model(model)


def merge_adapter(model: PeftModel) -> nn.Module:
    """The base model with the adapter merged in, in place (float32, patched), after comparing their logits.

    A tied head is untied where the adapter changes only one of the two: merging into the shared weight would change
    both.

    Raises:
        RecipeError: the merged model's logits are not the adapter's.
    """
    model.eval()
    tokens = _random_tokens(model)
    before = _logits(model, tokens)
    tied = model.get_base_model().config.tie_word_embeddings
    _part_tied_head(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged = model.merge_and_unload(safe_merge=True)
    if tied and merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight:
        logger.warning("merge: the adapter changes head and embedding differently, so they are stored apart (untied).")
    after = _logits(merged, tokens)
    scale = before.abs().max().clamp(min=1.0)
    difference = ((after - before).abs().max() / scale).item()
    if not difference <= _TOLERANCE:  # NaN too
        raise RecipeError(
            f"merge: the merged model's logits differ from the adapter's by {difference:.1e} of their size, more "
            "than rounding does. Nothing was written. Adapters on weights that several blocks share cannot be merged."
        )
    logger.info("merge: adapter and merged logits differ by %.1e of their size.", difference)
    return merged


def _random_tokens(model: nn.Module, rows: int = 2, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (rows, length), generator=generator)


@torch.no_grad()
def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()


def _part_tied_head(model: PeftModel) -> None:
    """Give a tied head a weight of its own if an adapter lies on it or on the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not any(isinstance(module, BaseTunerLayer) for module in (head, embedding)):
        return
    if head.weight is embedding.weight:
        layer = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def _round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """To the dtype that is stored, but for the SSM parameters; what it costs is said."""
    if dtype == torch.float32:
        return
    tokens = _random_tokens(model)
    before = _logits(model, tokens)
    family = family_of(model.config.model_type)
    for name, parameter in model.named_parameters():
        if not family.is_ssm_parameter(name):
            parameter.data = parameter.data.to(dtype)
    after = _logits(model, tokens)
    difference = ((after - before).norm() / before.norm()).item()
    logger.warning(
        "merge: rounding the merged weights to %s changes the logits by %.1e of their size.",
        str(dtype).removeprefix("torch."),
        difference,
    )


def _write_model(model: nn.Module, dtype: torch.dtype, finished: FinishedRun, target: Path) -> None:
    """Model, tokenizer and card into a folder beside the target, which is renamed into place at the end."""
    model = unpatch_model(model)
    model.config.use_cache = True  # the trainer turned it off
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with without_bars():
            model.save_pretrained(partial)
        # for generation: right pads would stand between prompt and answer
        tokenizer = load_finished_tokenizer(finished, padding_side="left")
        tokenizer.save_pretrained(partial)
        write_merged_card(partial, finished.folder)
        open_to_readers(partial)
        partial.rename(target)  # fails if somebody made it meanwhile
    except OSError as error:
        raise RecipeError(f"merge: {target} cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("merge: wrote %s (%s).", target, dtype)
