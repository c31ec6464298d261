"""One token for every row, through a model of state-space layers only: what decoding repeats.

The same function as the model's forward with a cache, with less round it: additions and norms of the residual stream
are one kernel, what depends on weights alone is computed once instead of at every token, and nothing is allocated
that outlives the call, asks the host, or depends on how much was read. So a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssm_tune import kernels
from ssm_tune.mixers.language_model import CausalLM
from ssm_tune.mixers.mamba import NormedMambaMixer
from ssm_tune.mixers.projections import project

# The values that a mixer computes from its weights at every call.
_COMPUTED = "_recurrence"
_NORMS = "_normalise"
# What of PEFT's layers decides what they compute, beside their weights.
_OF_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


def can_step(model: nn.Module) -> bool:
    """Whether `DecodeStep` computes what this model computes.

    It does for patched mamba, falcon_mamba and mamba2, with and without adapters in their layers. It does not where
    something hangs on the modules that are passed by (hooks, a forward of their own), where the model lies on several
    devices, or where an adapter is no layer but a prompt.
    """
    inner = [module for module in model.modules() if isinstance(module, CausalLM)]
    if len(inner) != 1 or "prompt_encoder" in model._modules:
        return False
    backbone = inner[0].backbone
    passed_by = [inner[0], backbone, backbone.norm_f, *backbone.layers, *(block.norm for block in backbone.layers)]
    devices = {parameter.device for parameter in inner[0].parameters()}
    here = len(devices) == 1 and "meta" not in {device.type for device in devices}  # meta: offloaded
    return here and not any(_is_changed(module) for module in passed_by)


def same_step(model: nn.Module) -> tuple[Any, ...]:
    """Equal as long as a captured step stays right: weights at the same places, adapters on or off as they were."""
    tensors = [*model.parameters(), *model.buffers()]
    adapters = [
        tuple(str(vars(module).get(name)) for name in _OF_ADAPTERS)
        for module in model.modules()
        if _OF_ADAPTERS[0] in vars(module)
    ]
    casting = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return (id(model), tuple((t.data_ptr(), t.dtype) for t in tensors), tuple(adapters), tuple(casting))


def _is_changed(module: nn.Module) -> bool:
    own = vars(module)
    replaced = "forward" in own and "_old_forward" not in own  # accelerate's hooks only move what lies elsewhere
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return replaced or not all(getattr(hook, "only_float32", False) for hook in hooks)


class DecodeStep:
    """step(ids, cache) -> logits; the states in the cache are updated in place.

    Args:
        model: one that `can_step`, in evaluation mode. Its weights may change in place between calls, after which
            `refresh` is due; tensors that are replaced need a new DecodeStep.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = next(module for module in model.modules() if isinstance(module, CausalLM))
        self._mixers = [block.mixer for block in self._model.backbone.layers]
        self._ones: dict[int, Tensor] = {}
        with torch.no_grad():
            self._fixed = [tuple(values.detach().clone() for values in mixer._recurrence()) for mixer in self._mixers]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute again, in place, what was computed from weights."""
        for mixer, values in zip(self._mixers, self._fixed, strict=True):
            for old, new in zip(values, mixer._recurrence(), strict=True):
                old.copy_(new)

    @torch.no_grad()
    def __call__(self, ids: Tensor, cache: Any) -> Tensor:
        """ids: (rows,). cache: has states of all layers, for these rows. Returns (rows, vocabulary) in float32."""
        backbone = self._model.backbone
        hidden = backbone.embeddings(ids)
        wide = torch.float32 if self._model.config.residual_in_fp32 else hidden.dtype
        residual = torch.zeros_like(hidden, dtype=wide)
        with self._fixed_values():
            for block in backbone.layers:
                normed = kernels.add_rms_norm(hidden, residual, block.norm.weight, block.norm.variance_epsilon)
                hidden = block.mixer(normed[:, None], cache=cache)[:, 0]
        normed = kernels.add_rms_norm(hidden, residual, backbone.norm_f.weight, backbone.norm_f.variance_epsilon)
        return project(self._model.lm_head, normed).float()

    @contextmanager
    def _fixed_values(self) -> Iterator[None]:
        """Inside, the mixers find the values that were computed once, and norms of one kernel each."""
        for mixer, values in zip(self._mixers, self._fixed, strict=True):
            vars(mixer)[_COMPUTED] = lambda values=values: values
            if isinstance(mixer, NormedMambaMixer):
                vars(mixer)[_NORMS] = partial(self._normalise, mixer.rms_eps)
        try:
            yield
        finally:
            for mixer in self._mixers:
                del vars(mixer)[_COMPUTED]
                vars(mixer).pop(_NORMS, None)

    def _normalise(self, eps: float, *parts: Tensor) -> tuple[Tensor, ...]:
        """Falcon-Mamba's norms of dt, B and C, which have no weights."""
        normed = []
        for part in parts:
            dim = part.shape[-1]
            if dim not in self._ones:
                self._ones[dim] = torch.ones(dim, device=part.device)
            normed.append(kernels.rms_norm(part, self._ones[dim], eps))
        return tuple(normed)
