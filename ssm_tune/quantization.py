"""4-bit and 8-bit base weights by bitsandbytes: what is quantised, what is not, and what its CPU path needs."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from ssm_tune.families import Family
from ssm_tune.recipe import RecipeError

logger = logging.getLogger(__name__)

# x_proj and dt_proj make the step size and the input and output maps of the state: a few per cent of the weights, and
# the ones a recurrence is most sensitive to. A router's rounding moves tokens to other experts. The head is named
# because a list given to bitsandbytes replaces the default that would have spared it.
_FULL_PRECISION = ("lm_head", "x_proj", "dt_proj", "router", "gate")
_BLOCK = 64  # weights that share one scale in 4 bits


def quantization_config(
    model: nn.Module,
    family: Family,
    *,
    load_in_4bit: bool,
    load_in_8bit: bool,
    dtype: torch.dtype,
    device: torch.device,
    trainable: str,
) -> Any | None:
    """The BitsAndBytesConfig that a model section asks for, None if it asks for none.

    `model` is of the config, on the meta device. 4-bit is QLoRA's (Dettmers et al., 2023): NF4, double quantisation,
    `dtype` to compute in. On a GPU the packed weights are stored as `dtype`, so that FSDP2 shards them with the rest
    (it leaves uint8 storage whole on every rank).

    Raises:
        RecipeError: both asked for, full fine-tuning of quantised weights, bitsandbytes missing.
    """
    if not (load_in_4bit or load_in_8bit):
        return None
    key = "model.load_in_4bit" if load_in_4bit else "model.load_in_8bit"
    if load_in_4bit and load_in_8bit:
        raise RecipeError("model.load_in_4bit and model.load_in_8bit are both true. Choose one.")
    if trainable == "full":
        raise RecipeError(
            f"{key}: quantised weights cannot be trained, only adapters on them. Set adapter.method=lora."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(f"{key} needs bitsandbytes: pip install 'ssm-tune[quant]'.")
    from transformers import BitsAndBytesConfig

    skipped = list(_FULL_PRECISION)
    if load_in_8bit:
        # The scales of an 8-bit weight move into the first module that uses it; the others would compute without.
        skipped += [rf".*\.{name}" for name in family.shared]
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    if device.type == "cpu":
        skipped += _narrow_layers(model)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if device.type == "cuda" else torch.uint8,
        llm_int8_skip_modules=skipped,
    )


def refuse_packed(label: str, again: bool, trainable: str) -> None:
    """What cannot be done with a checkpoint that is quantised already; `again`: a second quantisation is asked for."""
    if again:
        raise RecipeError(f"{label} is quantised already. Remove model.load_in_4bit and model.load_in_8bit.")
    if trainable == "full":
        raise RecipeError(f"{label} is quantised, so only adapters on it can be trained. Set adapter.method=lora.")


def _narrow_layers(model: nn.Module) -> list[str]:
    """Linear layers that bitsandbytes' CPU code gets wrong in 4 bits: rows that are no whole number of blocks."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features % _BLOCK and not name.endswith(_FULL_PRECISION)
    ]
    if names:
        logger.warning(
            "%d linear layers stay in full precision, %s among them: on a CPU bitsandbytes' 4-bit weights are wrong "
            "where in_features is not a multiple of %d.",
            len(names),
            names[0],
            _BLOCK,
        )
    return names


def prepare_packed(model: nn.Module) -> None:
    """What training on packed weights needs, in place: norms in float32, and weights that stay packed as they are.

    PEFT's `prepare_model_for_kbit_training` raises everything that is not packed, the embeddings, the head and the
    convolutions too: gigabytes in a model of 7B. The recurrence's own parameters are float32 already.
    """
    keep_packed_weights(model)
    for module in model.modules():
        if _is_norm(module) and not any(isinstance(hook, _Raised) for hook in module._forward_hooks.values()):
            module.float()
            hook = _Raised(model.get_input_embeddings())
            module.register_forward_pre_hook(hook)
            module.register_forward_hook(hook)


def release_norms(model: nn.Module) -> None:
    """Take the casts round norms away from a model that is not packed any more, in place."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Raised)]:
                del hooks[key]


def refuse_dora_in_8_bits(model: nn.Module) -> None:
    """PEFT moves an 8-bit weight on a CPU at every step of DoRA, and its scales are lost on the way."""
    if any(hasattr(parameter, "CB") and parameter.device.type == "cpu" for parameter in model.parameters()):
        raise RecipeError(
            "adapter.use_dora: on a CPU, DoRA cannot be had on weights in 8 bits. Use load_in_4bit, or LoRA without it."
        )


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and module._parameters.get("weight") is not None


class _Raised:
    """Before and after a norm in float32: the model goes on in its own dtype, whatever that is by then."""

    only_float32 = True  # what computes a norm in float32 anyway need not call this (ssm_tune.mixers.step)

    def __init__(self, embedding: nn.Module) -> None:
        self.embedding = embedding

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> Any:
        if output is None:
            return (inputs[0].float(), *inputs[1:])
        return output.to(self.embedding.weight.dtype)


def keep_packed_weights(model: nn.Module) -> None:
    """Switch off bitsandbytes' repacking of 4-bit weights on CPUs with AVX512-BF16.

    It happens at the first forward in eval mode, fails unless out_features is a multiple of 32, and leaves weights from
    which a merge of an adapter makes garbage (relative change of the logits 1.2, without it 0.17).
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight is packed by bitsandbytes."""
    return any(hasattr(parameter, "quant_state") or hasattr(parameter, "CB") for parameter in model.parameters())


def parameter_size(parameter: nn.Parameter) -> int:
    """How many numbers a parameter stands for; a packed 4-bit one holds several in each element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())
