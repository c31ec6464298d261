"""In which precision weights are read, kept and trained. The recurrence's own parameters are float32 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from torch import nn
from transformers import PreTrainedModel

from ssm_tune.families import Family, family_of
from ssm_tune.layouts import Checkpoint
from ssm_tune.quantization import is_quantized, prepare_packed
from ssm_tune.recipe import RecipeError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TRAINABLE = ("adapter", "full", "none")


def read_dtype(dtype: str | torch.dtype | None, checkpoint: Checkpoint | None = None) -> torch.dtype:
    """A torch dtype from what a recipe may say; None: bfloat16 where there is a GPU, else float32.

    Raises:
        RecipeError: not a dtype that a model can be loaded in.
    """
    if dtype is None:
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if dtype == "auto":
        return torch.float32 if checkpoint is None else _stored_dtype(checkpoint)
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            near = get_close_matches(dtype, _DTYPES, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise RecipeError(f"model.dtype: {dtype!r} is not one of auto, float32, bfloat16, float16.{guess}")
        return _DTYPES[dtype]
    if dtype not in _DTYPES.values():
        raise RecipeError(f"model.dtype: {dtype} is not one of auto, float32, bfloat16, float16.")
    return dtype


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What most of the checkpoint's numbers are stored as (a few, such as A_log, may be float32 in a bfloat16 file)."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in checkpoint.weights().values():
        if tensor.dtype in _DTYPES.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    return max(sizes, key=sizes.__getitem__) if sizes else torch.float32


@contextmanager
def kept_in_float32(model_class: type[PreTrainedModel], family: Family) -> Iterator[None]:
    """While inside, this class reads its SSM parameters as float32, not through a lower dtype first.

    transformers' own switch for that is a class attribute, of regular expressions; it is put back on leaving.
    """
    attribute = "_keep_in_fp32_modules_strict"
    own = attribute in vars(model_class)
    before = getattr(model_class, attribute)
    ours = [rf"\.{end.replace('.', chr(92) + '.')}$" for end in family.ssm_parameters]
    setattr(model_class, attribute, [*(before or []), *ours])
    try:
        yield
    finally:
        if own:
            setattr(model_class, attribute, before)
        else:
            delattr(model_class, attribute)


def check_trainable(trainable: str) -> None:
    if trainable not in TRAINABLE:
        raise ValueError(f"trainable is {trainable!r}; it is one of {', '.join(TRAINABLE)}")


def set_trainable(model: nn.Module, trainable: str) -> None:
    """Make a model's weights what a method needs, in place; also for a model that was loaded elsewhere.

    "full": float32 masters that require gradients. "adapter": SSM parameters float32, the rest as it is (PEFT freezes
    it), but for the norms of quantised models, which become float32 as well. "none": the same, frozen. Precision that
    was lost at loading does not come back.

    Raises:
        RecipeError: full training of quantised weights.
    """
    check_trainable(trainable)
    if trainable == "full" and is_quantized(model):
        raise RecipeError("adapter.method: quantised weights cannot be trained whole. Set adapter.method=lora.")
    family = family_of(model.config.model_type)
    if is_quantized(model):
        prepare_packed(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
            if trainable == "full" or family.is_ssm_parameter(name):
                parameter.data = parameter.data.float()
            if trainable == "full":
                parameter.requires_grad_(True)
        if trainable == "none":
            parameter.requires_grad_(False)
