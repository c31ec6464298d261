"""Putting our forwards into a transformers model, and taking them out again."""

from __future__ import annotations

import logging
from types import MethodType

from torch import nn
from transformers import PreTrainedModel

from ssm_tune.families import OWN_FAMILIES, Family, family_of
from ssm_tune.mixers.classes import Patched, patched_class
from ssm_tune.mixers.hybrid import HybridBackbone, HybridCausalLM, JambaMambaLayer
from ssm_tune.mixers.language_model import Backbone, Block, CausalLM
from ssm_tune.mixers.mamba import MambaMixer, NormedMambaMixer
from ssm_tune.mixers.mamba2 import FalconH1Mixer, Mamba2Mixer
from ssm_tune.mixers.mamba_heads import MambaHeadsMixer
from ssm_tune.mixers.short_conv import ShortConvMixer

logger = logging.getLogger(__name__)

# The mixer of each kind in the table of families.
_MIXERS: dict[str, type[Patched]] = {
    "mamba": MambaMixer,
    "normed_mamba": NormedMambaMixer,
    "mamba_heads": MambaHeadsMixer,
    "mamba2": Mamba2Mixer,
    "falcon_h1": FalconH1Mixer,
    "short_conv": ShortConvMixer,
}
# Blocks whose stock forward does not hand document borders to the mixer.
_BLOCKS: dict[str, type[Patched]] = {
    "MambaBlock": Block,
    "FalconMambaBlock": Block,
    "Mamba2Block": Block,
    "JambaMambaDecoderLayer": JambaMambaLayer,
}


def patch_model(model: nn.Module) -> nn.Module:
    """Make a causal language model of a supported family train what it evaluates; in place, and given back.

    Works on transformers models and on PEFT models round them, before or after adapters are put in. Parameters, their
    names and the names of classes stay as they are, so saving, sharding by class name and loading elsewhere are not
    touched. Patching a second time does nothing. Our own models need none. Families that have no mixers of ours yet
    are left as they are, and that is logged.

    Raises:
        RecipeError: the model is of no family that ssm-tune knows.
        ValueError: the model cannot be patched as it is; the message says why and what to do.
    """
    family = _find_family(model)
    if family.model_type in OWN_FAMILIES:
        return model
    if family.kind is None:
        logger.warning("%s has no mixer of ours: it keeps transformers' own forward.", family.model_type)
        return model
    swaps = [(module, _patch_for(module, family)) for module in model.modules() if not isinstance(module, Patched)]
    swaps = [(module, patch) for module, patch in swaps if patch is not None]
    if not swaps and not is_patched(model):
        raise ValueError(
            f"{type(model).__name__} holds no {family.mixer}. Patch a model before it is sharded or compiled."
        )
    for module, _ in swaps:
        _check_patchable(module)
    for module, patch in swaps:
        _change_class(module, patched_class(patch, type(module)))
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Put transformers' own forwards back; in place, and given back. A model that is not patched is left as it is."""
    patched = [module for module in model.modules() if "stock" in vars(type(module))]  # not our own models' mixers
    for module in patched:
        _check_patchable(module)
    for module in patched:
        _change_class(module, type(module).stock)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` has changed this model."""
    return any(isinstance(module, Patched) for module in model.modules())


def _find_family(model: nn.Module) -> Family:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return family_of(module.config.model_type)
    raise ValueError(f"{type(model).__name__} holds no transformers model to patch.")


def _patch_for(module: nn.Module, family: Family) -> type[Patched] | None:
    """Which of our forwards a module is to have, if any."""
    name = type(module).__name__
    if name == family.mixer:
        return _MIXERS[family.kind]
    if name == family.block:
        return _BLOCKS.get(name)
    if not isinstance(module, PreTrainedModel):
        return None
    if module.base_model is module:
        return HybridBackbone if family.hybrid else Backbone
    if "lm_head" in module._modules:
        return HybridCausalLM if family.hybrid else CausalLM
    return None  # another head calls the patched backbone


def _check_patchable(module: nn.Module) -> None:
    activation = vars(module).get("activation", "silu")  # of a mixer; the kernels know no other
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r}: the kernels of {type(module).__name__} only know silu.")
    if "forward" in vars(module) and "_old_forward" not in vars(module):
        raise ValueError(
            f"{type(module).__name__}.forward was replaced on the object itself (a trainer does that to add its loss), "
            "so changing its class would not reach it. Patch or unpatch the model before it goes to a trainer, or "
            "delete the attribute `forward` from the model."
        )


def _change_class(module: nn.Module, cls: type) -> None:
    module.__class__ = cls
    if "_old_forward" in vars(module):  # accelerate's hooks keep the bound forward of the class they found
        module._old_forward = MethodType(cls.forward, module)
