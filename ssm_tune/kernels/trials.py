"""One small call of every operation, to find out whether a backend computes the right thing on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ssm_tune.kernels import mamba3_reference, reference
from ssm_tune.kernels.compile_ahead import compiling_only, running
from ssm_tune.kernels.tuning import without_tuning

# Older packages take these arguments and drop them, in silence: each is tried with a value that shows it.
_DROPPED: dict[str, dict[str, Any]] = {
    "gated_rms_norm": {"norm_before_gate": True},
    "ssd_scan": {"dt_limit": (0.3, 0.9)},
    "ssd_block": {"norm_before_gate": True, "dt_limit": (0.3, 0.9)},
    "residual_rms_norm": {"dtype": torch.bfloat16},
}
# What the step forms, which are not differentiable, update in place.
_IN_PLACE = {"state", "residual"}
# Made of so many Triton kernels that compiling them one after the other takes a minute.
_COMPILED_AHEAD = {"ssd_scan", "ssd_block", "mamba3_scan"}
# A kernel that is wrong is wrong by far more, and one that is right in bfloat16 or TF32 by less.
_TOLERANCE = 0.05


class WrongResultError(RuntimeError):
    """A backend ran, and gave other values or gradients than the reference."""


def run_trial(operation: str, function: Callable[..., Any], device: torch.device) -> None:
    """Call `function` forward and backward on `device`, and compare with the reference.

    In float32 on a CPU, in bfloat16 elsewhere. Two documents share a row, so that a kernel that drops `seq_idx` is
    found out. A thread of its own has none of the modes of PyTorch that the caller may be in: no_grad,
    inference_mode, autocast, a default device, and the hooks of gradient checkpointing, which count what a forward
    saves and find more than in the second forward, where no trial happens any more.

    In a backward pass the trial stays in the caller's thread: that is the one in which autograd computes gradients
    for the device, and another would wait for it without end.

    Raises:
        WrongResultError: results that differ from the reference. Whatever else `function` raises passes through.
    """
    with without_tuning():
        if torch._C._current_graph_task_id() != -1:
            with _without_modes(device):
                _try(operation, function, device)
            return
        with ThreadPoolExecutor(1, "ssm-tune-trial") as thread:
            thread.submit(_try, operation, function, device).result()


@contextmanager
def _without_modes(device: torch.device) -> Iterator[None]:
    """As in a new thread: gradients, no autocast, and saved tensors that nobody else looks at."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), hooks:
        yield


def _try(operation: str, function: Callable[..., Any], device: torch.device) -> None:
    if operation in _COMPILED_AHEAD and device.type == "cuda":
        _compile(operation, function, device)
    with running():
        _compare(operation, function, device)


def _compile(operation: str, function: Callable[..., Any], device: torch.device) -> None:
    """Compile what the trial calls, on all cores; what is wrong shows in the trial itself."""
    args, kwargs, wide = _arguments(operation)
    with compiling_only():
        for more in _variants(operation):
            with suppress(Exception):
                _results(function, args, kwargs | more, wide, device, torch.bfloat16)


def _variants(operation: str) -> tuple[dict[str, Any], ...]:
    """What is added to the arguments, a call for each."""
    return ({}, _DROPPED[operation]) if operation in _DROPPED else ({},)


def _compare(operation: str, function: Callable[..., Any], device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    args, kwargs, wide = _arguments(operation)
    truth = mamba3_reference if operation == "mamba3_scan" else reference
    for more in _variants(operation):
        settings = kwargs | more
        expected = _results(getattr(truth, operation), args, settings, wide, torch.device("cpu"), torch.float32)
        found = _results(function, args, settings, wide, device, dtype)
        given = "".join(f" with {name}={value}" for name, value in more.items())
        for name in expected:
            difference = (found[name].float().cpu() - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
            if not difference <= _TOLERANCE:
                raise WrongResultError(
                    f"{operation}{given}: {name} differs from the reference by {difference:.2g}, relative"
                )


def _arguments(operation: str) -> tuple[dict[str, Tensor], dict[str, Any], set[str]]:
    """Tensors in the order of the signature, the other arguments, and the names of tensors that stay float32."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        # Rounded to bfloat16, so that both dtypes start from the same numbers.
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16().float()

    batch, length, dim, state, heads, groups, width = 2, 20, 128, 16, 2, 1, 4
    wide = {"A", "D", "dt_bias", "state"}
    packed = {"seq_idx": torch.tensor([[0] * 9 + [1] * 11, [0] * 20], dtype=torch.int32, device="cpu")}
    if operation == "selective_scan":
        tensors = {name: normal(batch, length, dim) for name in ("x", "dt", "z")}
        tensors |= {name: normal(batch, length, state) for name in ("B", "C")}
        tensors |= {"A": -normal(dim, state).exp(), "D": normal(dim), "dt_bias": normal(dim)}
        return {name: tensors[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")}, packed, wide
    if operation == "selective_scan_step":
        tensors = {name: normal(batch, dim) for name in ("x", "dt", "z")}
        tensors |= {name: normal(batch, state) for name in ("B", "C")}
        tensors |= {"A": -normal(dim, state).exp(), "D": normal(dim), "dt_bias": normal(dim)}
        tensors["state"] = normal(batch, dim, state)
        return {name: tensors[name] for name in ("x", "dt", "A", "B", "C", "state", "D", "z", "dt_bias")}, {}, wide
    if operation in ("ssd_scan", "ssd_step"):
        tokens, head_dim, state = (batch,), 64, 64
        if operation == "ssd_scan":  # of ssd_block's sizes below, so that Triton compiles the kernels of both once
            tokens = (batch, length)
            heads, head_dim, groups, state = 8, 16, 2, 32
        tensors = {"x": normal(*tokens, heads, head_dim), "dt": normal(*tokens, heads), "A": -normal(heads).exp()}
        tensors |= {name: normal(*tokens, groups, state) for name in ("B", "C")}
        if operation == "ssd_step":
            tensors["state"] = normal(batch, heads, head_dim, state)
        tensors |= {"D": normal(heads), "dt_bias": normal(heads)}
        return tensors, packed if operation == "ssd_scan" else {}, wide
    if operation == "ssd_block":
        heads, head_dim, groups, channels = 8, 16, 2, 8 * 16 + 2 * 2 * 32
        tensors = {"projected": normal(batch, length, 8 * 16 + channels + heads)}
        tensors |= {"conv_weight": normal(channels, width), "conv_bias": normal(channels), "A": -normal(heads).exp()}
        tensors |= {"D": normal(heads), "dt_bias": normal(heads), "norm_weight": normal(heads * head_dim)}
        return tensors, packed | {"head_dim": head_dim, "groups": groups, "group_size": 64}, wide
    if operation == "mamba3_scan":
        tensors = {"x": normal(batch, length, heads, 64), "dt": normal(batch, length, heads).exp()}
        tensors |= {"A": -normal(batch, length, heads).exp(), "trap": normal(batch, length, heads)}
        tensors |= {name: normal(batch, length, 1, groups, 64) for name in ("B", "C")}
        tensors |= {"angles": normal(batch, length, 16), "B_bias": normal(heads, 1, 64), "C_bias": normal(heads, 1, 64)}
        tensors |= {"D": normal(heads), "z": normal(batch, length, heads, 64)}
        return tensors, packed, wide | {"dt", "B_bias", "C_bias"}
    if operation == "causal_conv1d":
        return {"x": normal(batch, length, dim), "weight": normal(dim, width), "bias": normal(dim)}, packed, set()
    if operation == "causal_conv1d_step":
        tensors = {"x": normal(batch, dim), "state": normal(batch, dim, width - 1)}
        return tensors | {"weight": normal(dim, width), "bias": normal(dim)}, {}, set()
    if operation == "rms_norm":
        return {"x": normal(batch, length, dim), "weight": normal(dim)}, {"eps": 1e-5}, set()
    if operation == "rms_norm_parts":
        return {"x": normal(batch, length, dim)}, {"sizes": (dim - 2 * state, state, state), "eps": 1e-5}, set()
    if operation == "add_rms_norm":
        tensors = {"x": normal(batch, dim), "residual": normal(batch, dim), "weight": normal(dim)}
        return tensors, {"eps": 1e-5}, wide | {"residual"}
    if operation == "residual_rms_norm":
        tensors = {"stream": normal(batch, length, dim), "x": normal(batch, length, dim), "weight": normal(dim)}
        return tensors, {"eps": 1e-5}, wide | {"stream"}
    if operation == "low_rank_product":
        tensors = {"x": normal(batch * length, dim), "A": normal(state, dim), "B": normal(dim, state)}
        return tensors, {"scale": 2.0}, set()
    if operation == "narrow_weight_gradient":
        return {"dy": normal(batch * length, state), "x": normal(batch * length, dim)}, {}, set()
    if operation == "low_rank_gradients":
        tensors = {"dy": normal(batch * length, dim), "B": normal(dim, state), "h": normal(batch * length, state)}
        return tensors | {"A": normal(state, dim)}, {"scale": 2.0}, set()
    if operation == "gated_rms_norm":
        tensors = {name: normal(batch, length, dim) for name in ("y", "z")}
        return tensors | {"weight": normal(dim)}, {"eps": 1e-5, "group_size": 64}, set()
    raise KeyError(operation)


def _results(
    function: Callable[..., Any],
    args: dict[str, Tensor],
    kwargs: dict[str, Any],
    wide: set[str],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The outputs, and the gradients by all tensors, or what a step form updates."""
    inputs = {n: t.to(device, torch.float32 if n in wide else dtype, copy=True) for n, t in args.items()}
    kwargs = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in kwargs.items()}
    if changed := inputs.keys() & _IN_PLACE:
        with torch.no_grad():
            return {"output": function(**inputs, **kwargs)} | {name: inputs[name] for name in changed}
    for tensor in inputs.values():
        tensor.requires_grad_()
    found = function(**inputs, **kwargs)
    outputs = found if isinstance(found, tuple) else (found,)
    results = {"output" if i == 0 else f"output {i + 1}": output.detach() for i, output in enumerate(outputs)}
    if not outputs[0].requires_grad:
        return results
    # Not the sum: a gradient of ones hides errors that cancel.
    slopes = [torch.linspace(-1, 1, o.numel(), dtype=torch.float32, device="cpu").view(o.shape) for o in outputs]
    slopes = [slope.to(device, o.dtype) for slope, o in zip(slopes, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(inputs.values()), slopes)
    return results | {f"the gradient of {n}": g for n, g in zip(inputs, gradients, strict=True)}
