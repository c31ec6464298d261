"""Models: loaded from any layout, quantised or not, or new from dimensions; SSM parameters always in float32."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ssm_tune.families import Family, family_of
from ssm_tune.layouts import Checkpoint, StoredTensor, open_checkpoint
from ssm_tune.precision import check_trainable, kept_in_float32, read_dtype, set_trainable
from ssm_tune.quantization import is_quantized, parameter_size, quantization_config, refuse_packed
from ssm_tune.recipe import RESOLVED, RecipeError, read_model_section
from ssm_tune.run_folder import locate_base
from ssm_tune.weight_checks import check_weights, read_strictly

if TYPE_CHECKING:
    from ssm_tune.recipe import ModelSection, Recipe

logger = logging.getLogger(__name__)

_RESCALE = "rescale_prenorm_residual"


# -- loading -------------------------------------------------------------------------------------------------------


def load_model(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    load_in_4bit: bool | None = None,
    load_in_8bit: bool | None = None,
    attn_implementation: str | None = None,
    trainable: str = "adapter",
    device: str | torch.device | None = None,
) -> Any:
    """A causal language model from a checkpoint of any layout, or from a run folder, patched for training.

    Args:
        name: a folder or a Hub repository (Hugging Face, original state-spaces, Mistral's Codestral, Megatron-LM), or a
            run folder: one with an adapter gives base and adapter together.
        revision: of a Hub repository.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto", the checkpoint's own. None: bfloat16 where
            there is a GPU, else float32. The parameters of the recurrence (A_log, D, step bias) are read in full
            precision and stay float32 whatever this is.
        load_in_4bit, load_in_8bit: bitsandbytes weights under an adapter. None: as a run folder's adapter was trained
            with, for on other weights it says something else; otherwise False.
        attn_implementation: of a hybrid's attention layers, as transformers has it.
        trainable: "adapter" (weights in `dtype`, to be frozen under an adapter), "full" (every weight a float32
            master; `dtype` is then what the trainer computes in) or "none" (frozen).
        device: where to; None: the CPU, or for quantised weights the current GPU if there is one.

    Raises:
        RecipeError: there is no such checkpoint or it cannot be had; a type of model that is not supported; a tensor
            that is missing, unexpected or mis-shaped (each is named); options that do not go together.
    """
    check_trainable(trainable)
    adapter = _adapter_base(str(name))
    if adapter is not None:
        if load_in_4bit is None and load_in_8bit is None:
            load_in_4bit, load_in_8bit = _trained_in(Path(name).expanduser())
        keys = {"dtype": dtype, "load_in_4bit": load_in_4bit, "load_in_8bit": load_in_8bit, "device": device}
        return _load_adapted(Path(name), adapter, trainable, attn_implementation=attn_implementation, **keys)

    from ssm_tune.mixers import patch_model

    load_in_4bit, load_in_8bit = bool(load_in_4bit), bool(load_in_8bit)
    checkpoint = open_checkpoint(str(name), revision)
    family = family_of(checkpoint.config.model_type)
    place = torch.device(device) if device is not None else _default_device(load_in_4bit or load_in_8bit)
    compute = read_dtype(dtype, checkpoint)
    weights = checkpoint.weights()
    if hasattr(checkpoint.config, "quantization_config"):  # its shapes in the file are not the model's
        refuse_packed(checkpoint.source.label, load_in_4bit or load_in_8bit, trainable)
        blueprint = meta_model(checkpoint.config)
    else:
        blueprint = check_weights(checkpoint, weights)
    quantization = quantization_config(
        blueprint,
        family,
        load_in_4bit=load_in_4bit,
        load_in_8bit=load_in_8bit,
        dtype=compute,
        device=place,
        trainable=trainable,
    )
    options: dict[str, Any] = {"dtype": torch.float32 if trainable == "full" else compute}
    if quantization is not None:
        options["quantization_config"] = quantization
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantization is not None or place.type != "cpu":
        options["device_map"] = {"": place}
    model = _read_model(checkpoint, weights, family, options)
    patch_model(model)
    set_trainable(model, trainable)
    return model


def _load_adapted(folder: Path, base: tuple[str, str | None], trainable: str, **keys: Any) -> Any:
    """The base that a run's adapter belongs to, and the adapter on it, for inference."""
    from ssm_tune.adapter import load_adapter

    if trainable == "full":
        raise RecipeError(f"model.name: {folder} is an adapter. To train it whole, merge it first (ssm-tune merge).")
    name, revision = base
    model = load_model(name, revision=revision, trainable=trainable, **keys)
    return load_adapter(model, folder, trainable=False).eval()


def read_config(name: str | Path, revision: str | None = None, *, local_only: bool = False) -> PreTrainedConfig:
    """The config of a checkpoint of any layout, without its weights.

    `local_only`: never ask the Hub, as `validate` must not. Raises RecipeError as `load_model` does.
    """
    adapter = _adapter_base(str(name))
    if adapter is not None:
        name, revision = adapter
    return open_checkpoint(str(name), revision, local_only=local_only).config


def meta_model(config: PreTrainedConfig, *, patched: bool = False) -> PreTrainedModel:
    """The model of a config with no memory behind its weights: for checking names before a checkpoint is read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if patched:
        from ssm_tune.mixers import patch_model

        patch_model(model)
    return model


def _adapter_base(name: str) -> tuple[str, str | None] | None:
    """The base model and its revision that a run folder's adapter belongs to; None if `name` is no adapter's folder."""
    folder = Path(name).expanduser()
    path = folder / "adapter_config.json"
    if not path.is_file():
        if (folder / "run.json").is_file() and not (folder / "config.json").is_file():
            raise RecipeError(
                f"model.name: the run in {name} has not finished, so it has no model yet. Resume it with --resume, or "
                f"load one of its checkpoints/."
            )
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"{path} is not valid JSON: {error}") from error
    base = config.get("base_model_name_or_path")
    if not base:
        raise RecipeError(f"{path} does not say which base model the adapter is for (base_model_name_or_path).")
    return locate_base(folder, base), config.get("revision")


def _trained_in(folder: Path) -> tuple[bool, bool]:
    """Whether a run's adapter, or that of one of its checkpoints, was trained on weights in 4 bits, and in 8."""
    run = folder if (folder / RESOLVED).is_file() else folder.resolve().parent.parent
    section = read_model_section(run)
    return section.load_in_4bit, section.load_in_8bit


def _default_device(quantized: bool) -> torch.device:
    if quantized and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _read_model(
    checkpoint: Checkpoint, weights: Mapping[str, StoredTensor], family: Family, options: dict[str, Any]
) -> PreTrainedModel:
    """The stock model with the checkpoint's weights, each tensor read from the file straight into its dtype."""
    config = copy.deepcopy(checkpoint.config)
    # transformers divides out_proj by sqrt(layers) at every load of such a model, not only at its birth.
    rescaled = vars(config).get(_RESCALE, False)
    if rescaled:
        setattr(config, _RESCALE, False)
    with kept_in_float32(AutoModelForCausalLM._model_mapping[type(config)], family):
        model = read_strictly(checkpoint, weights, config, options, stored=weights)
    if rescaled:
        setattr(model.config, _RESCALE, True)
    model.config.name_or_path = model.name_or_path = checkpoint.config.name_or_path
    generation = checkpoint.source.get("generation_config.json")
    if generation is not None:
        model.generation_config = GenerationConfig.from_pretrained(generation.parent)
    _untie_if_different(model)
    return model


def _untie_if_different(model: PreTrainedModel) -> None:
    """Say so in the config when a checkpoint that claims a tied head holds another one: it is kept as it is."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False
        logger.warning(
            "%s: its config says that head and embedding are tied, but the head in the weights differs. It is kept, "
            "and the two are trained and saved apart.",
            model.name_or_path,
        )


# -- new models ----------------------------------------------------------------------------------------------------


def init_model(
    section: ModelSection,
    vocab_size: int,
    *,
    seed: int = 0,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Any:
    """A new model of a recipe's `model` section, initialised as the papers say, float32, patched for training.

    Args:
        section: architecture, and size or dimensions.
        vocab_size: of the tokenizer; the embedding has it rounded up as the published models have (8 or 16).
        seed: of every random number; torch's own random state is neither used nor moved.
        pad_token_id, bos_token_id, eos_token_id: of the tokenizer, for the config.

    Raises:
        RecipeError: an unknown architecture, size or dimension, or a key that this architecture has no use for.
    """
    from ssm_tune.architectures import initialize, plan_config
    from ssm_tune.mixers import patch_model

    tokens = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    model = meta_model(plan_config(section, vocab_size, tokens))
    model.to_empty(device="cpu")
    model.tie_weights()
    initialize(model, seed)
    patch_model(model)
    return model.train()


def plan_model(recipe: Recipe) -> Any:
    """The config of the new model that a recipe describes, but for its tokenizer, which need not be there yet.

    Raises:
        RecipeError: every mistake in the model section, naming the recipe.
    """
    from ssm_tune.architectures import plan_config

    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    try:
        return plan_config(recipe.model, recipe.tokenizer.vocab_size or 1024, tokens)
    except RecipeError as error:
        raise RecipeError([f"{recipe.source or 'recipe'}: {mistake}" for mistake in error.mistakes]) from error


# -- facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelReport:
    """What a model is. `total` and `trainable` count numbers; a tied or shared weight counts once.

    `dtypes`: how many numbers are stored in which dtype ("4-bit" for bitsandbytes' packed ones). `memory`: bytes of
    parameters and buffers.
    """

    name: str
    model_type: str
    total: int
    trainable: int
    memory: int
    dtypes: dict[str, int] = field(default_factory=dict)
    quantized: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of most of its numbers."""
        return max(self.dtypes, key=self.dtypes.__getitem__)


def model_report(model: nn.Module) -> ModelReport:
    """Parameters, dtypes and memory of a model, with or without an adapter on it."""
    total = trainable = memory = 0
    dtypes: dict[str, int] = {}
    for parameter in model.parameters():
        size = parameter_size(parameter)
        total += size
        trainable += size if parameter.requires_grad else 0
        memory += parameter.numel() * parameter.element_size()
        packed = hasattr(parameter, "quant_state")
        stored = "4-bit" if packed else str(parameter.dtype).removeprefix("torch.")
        dtypes[stored] = dtypes.get(stored, 0) + size
    memory += sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelReport(
        name=model.config.name_or_path or "a new model",
        model_type=model.config.model_type,
        total=total,
        trainable=trainable,
        memory=memory,
        dtypes=dtypes,
        quantized=is_quantized(model),
    )


def padded_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Rows of the output layer that no token has, because the vocabulary was padded: they must never be sampled.

    They were never trained, or trained only as wrong answers. As `suppress_tokens` of generate() they are ruled out.
    """
    rows = model.get_output_embeddings().weight.shape[0]
    used = set(tokenizer.get_vocab().values())
    return [token for token in range(rows) if token not in used]
