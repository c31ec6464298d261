"""Which path each operation of a model takes: one of its mixers is run, in its own sizes, without its weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from ssm_tune.doctor.report import PathReport
from ssm_tune.families import Family, family_of
from ssm_tune.kernels.backends import KernelChoice, recorded_calls
from ssm_tune.kernels.tuning import without_tuning
from ssm_tune.model import meta_model

TOKENS = 64
# A mixer that cannot run at all is a finding as well.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_paths(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> list[PathReport]:
    """What serves each operation: of a packed row in training, of a prompt, and of one token after it.

    Raises:
        what a mixer raises that does not run: one of FAILURES.
    """
    family = family_of(config.model_type)
    model = meta_model(config, patched=True)
    mixer = next((m for m in model.modules() if type(m).__name__ == family.mixer), None)
    norm = next((m for m in model.modules() if _calls_a_kernel(m)), None)
    if mixer is None:
        return []
    for module in (mixer, norm):
        if module is not None:
            _materialise(module, family, device, dtype)
    paths: list[PathReport] = []
    # The sizes of weights are a mixer's own; what comes in is small, and random.
    with torch.random.fork_rng(devices=[]), without_tuning(), recorded_calls() as calls:
        x = torch.randn(1, TOKENS, config.hidden_size).to(device, dtype)
        compute = torch.autocast("cuda", torch.bfloat16) if dtype == torch.bfloat16 and device.type == "cuda" else None
        with compute or nullcontext():
            _train(mixer, norm, x)
        paths += _take(calls, "training")
        cache = DynamicCache(config=config)
        with torch.no_grad():
            _output(mixer.eval()(x, cache=cache))
            paths += _take(calls, "prompt")
            _output(mixer(x[:, :1], cache=cache))
            paths += _take(calls, "token")
    known = {(path.operation, path.backend) for path in paths if path.phase == "training"}
    return [path for path in paths if path.phase == "training" or (path.operation, path.backend) not in known]


def _train(mixer: nn.Module, norm: nn.Module | None, x: Tensor) -> None:
    """Forward and backward of a row with two documents in it."""
    numbers = (torch.arange(TOKENS, device=x.device) >= TOKENS // 3).to(torch.int32)[None]
    x = x.clone().requires_grad_()
    y = _output(mixer.train()(x, seq_idx=numbers))
    y = y if norm is None else norm(y)
    y.float().square().mean().backward()


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _take(calls: list[KernelChoice], phase: str) -> list[PathReport]:
    """The calls so far, each path once; the list is empty afterwards."""
    found = dict.fromkeys((call.operation, call.backend, call.reason, call.cost) for call in calls)
    calls.clear()
    return [PathReport(phase, *path) for path in found]


def _calls_a_kernel(module: nn.Module) -> bool:
    """The residual norm of our own models; those of transformers are its own code."""
    return type(module).__name__ == "RMSNorm" and type(module).__module__.startswith("ssm_tune.")


def _materialise(module: nn.Module, family: Family, device: torch.device, dtype: torch.dtype) -> None:
    """Memory for one module of a model without any, and values that a recurrence survives."""
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data if family.is_ssm_parameter(name) else parameter.data.to(dtype)
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.zero_() if name.endswith("bias") else parameter.fill_(1.0)
        for buffer in module.buffers():
            buffer.fill_(1)
