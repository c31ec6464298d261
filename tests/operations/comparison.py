"""A backend against the float64 reference: the same numbers through both, and everything compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels import reference

# Float32 against float64: what an exact computation in float32 leaves.
EXACT = 1e-5
# bfloat16 inputs, rounded before both sides see them: only outputs and gradients are rounded once more.
ROUNDED = 1e-2

# Rows of 67 tokens, two rows each: a length that no chunk, segment or block divides.
LENGTH = 67
DOCUMENTS: dict[str, list[list[int]] | None] = {
    "no documents": None,
    "one document": [[0] * 67, [5] * 67],
    "start at 1": [[0] + [1] * 66, [0] * 67],
    "start at the last token": [[0] * 66 + [1], [3] * 66 + [2]],
    "start in the middle": [[0] * 33 + [1] * 34, [0] * 17 + [1] * 50],
    "every token a document": [list(range(67)), [0] * 67],
    "numbers that return": [[0] * 20 + [1] * 20 + [0] * 27, [0] * 67],
    "padding right": [[0] * 30 + [1] * 20 + [-1] * 17, [0] * 66 + [-1]],
    "padding left": [[-1] * 17 + [0] * 30 + [1] * 20, [-1] + [0] * 66],
    "padding on both sides and between": [
        [-1] * 5 + [0] * 9 + [-1] * 3 + [0] * 21 + [-1] * 2 + [1] * 20 + [-1] * 7,
        [0] * 67,
    ],
    "only padding in a row": [[-1] * 67, [0] * 67],
}


def seq_idx_of(name: str) -> Tensor | None:
    """The documents of that name, as a tensor (2, 67)."""
    rows = DOCUMENTS[name]
    return None if rows is None else torch.tensor(rows, dtype=torch.int32)


def draw(*shape: int) -> Tensor:
    """Normal numbers that float32 holds exactly."""
    return torch.randn(*shape).double()


def scan_tensors(
    batch: int = 2, length: int = LENGTH, dim: int = 20, state: int = 16, without: tuple[str, ...] = ()
) -> dict[str, Tensor | None]:
    """The tensors of `selective_scan`; those named in `without` are None."""
    tensors: dict[str, Tensor | None] = {
        "x": draw(batch, length, dim),
        "dt": draw(batch, length, dim),
        "A": -torch.rand(dim, state).double() * 8 - 0.01,
        "B": draw(batch, length, state),
        "C": draw(batch, length, state),
        "D": draw(dim),
        "z": draw(batch, length, dim),
        "dt_bias": draw(dim) - 2,
        "initial_state": draw(batch, dim, state),
    }
    return {name: None if name in without else tensor for name, tensor in tensors.items()}


def ssd_tensors(
    batch: int = 2,
    length: int = LENGTH,
    heads: int = 4,
    head_dim: int = 6,
    groups: int = 2,
    state: int = 16,
    without: tuple[str, ...] = (),
) -> dict[str, Tensor | None]:
    """The tensors of `ssd_scan`; those named in `without` are None."""
    tensors: dict[str, Tensor | None] = {
        "x": draw(batch, length, heads, head_dim),
        "dt": draw(batch, length, heads),
        "A": -torch.rand(heads).double() * 8 - 0.01,
        "B": draw(batch, length, groups, state),
        "C": draw(batch, length, groups, state),
        "D": draw(heads),
        "dt_bias": draw(heads) - 2,
        "initial_state": draw(batch, heads, head_dim, state),
    }
    return {name: None if name in without else tensor for name, tensor in tensors.items()}


def conv_tensors(
    batch: int = 2, length: int = LENGTH, dim: int = 20, width: int = 4, without: tuple[str, ...] = ()
) -> dict[str, Tensor | None]:
    """The tensors of `causal_conv1d`; those named in `without` are None."""
    tensors: dict[str, Tensor | None] = {
        "x": draw(batch, length, dim),
        "weight": draw(dim, width),
        "bias": draw(dim),
        "initial_state": draw(batch, dim, width - 1),
    }
    return {name: None if name in without else tensor for name, tensor in tensors.items()}


def block_tensors(
    batch: int = 2,
    length: int = LENGTH,
    heads: int = 8,
    head_dim: int = 8,
    groups: int = 2,
    state: int = 8,
    width: int = 4,
    without: tuple[str, ...] = (),
) -> dict[str, Tensor | None]:
    """The tensors of `ssd_block`; those named in `without` are None."""
    dim, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    tensors: dict[str, Tensor | None] = {
        "projected": draw(batch, length, dim + channels + heads),
        "conv_weight": draw(channels, width) / 2,
        "conv_bias": draw(channels),
        "A": -torch.rand(heads).double() * 8 - 0.01,
        "D": draw(heads),
        "dt_bias": draw(heads) - 2,
        "norm_weight": draw(dim),
    }
    return {name: None if name in without else tensor for name, tensor in tensors.items()}


def norm_tensors(
    batch: int = 2, length: int = LENGTH, dim: int = 37, without: tuple[str, ...] = ()
) -> dict[str, Tensor | None]:
    """The tensors of `residual_rms_norm`; those named in `without` are None."""
    tensors: dict[str, Tensor | None] = {
        "stream": draw(batch, length, dim) * 3,
        "x": draw(batch, length, dim),
        "weight": draw(dim),
    }
    return {name: None if name in without else tensor for name, tensor in tensors.items()}


def gated_norm_tensors(batch: int = 2, length: int = LENGTH, dim: int = 37) -> dict[str, Tensor | None]:
    """The tensors of `gated_rms_norm`."""
    return {"y": draw(batch, length, dim) * 3, "z": draw(batch, length, dim), "weight": draw(dim)}


def residual_norm(function: Callable[..., Any], **settings: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`residual_rms_norm`, as `results` wants it: the sum is in the place of a final state."""

    def both(*, return_final_state: bool, **given: Any) -> tuple[Tensor, Tensor]:
        return function(**given, eps=1e-5, **settings)

    return both


def without_state(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """An operation that gives no final state, as `results` wants it: with one that is nothing."""

    def both(*, return_final_state: bool, **given: Any) -> tuple[Tensor, Tensor]:
        y = function(**given)
        return y, y.new_zeros(0)

    return both


def results(
    function: Callable[..., Any],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    device: str = "cpu",
    wide: tuple[str, ...] = (),
    view: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **settings: Any,
) -> dict[str, Tensor]:
    """Outputs and gradients of `function`, float64 on the CPU.

    The tensors named in `wide` stay float32; `view` is applied to each before the call, for instance to lose
    contiguity. Both outputs count in the loss, each element by a weight of its own, so that no errors cancel.
    """
    leaves = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            kind = torch.float32 if name in wide and dtype != torch.float64 else dtype
            leaves[name] = tensor.to(device, kind).requires_grad_()
    given = {name: view(leaves[name]) if name in leaves else None for name in tensors}
    settings = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in settings.items()}
    y, state = function(**given, **settings, return_final_state=True)
    loss = sum((part.double() * weights(part)).sum() for part in (y, state))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"y": y, "final state": state}
    found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}


def weights(tensor: Tensor) -> Tensor:
    """Fixed numbers between -1 and 1, one for each element."""
    places = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return torch.sin(places * 1.7 + 0.3).view(tensor.shape)


def assert_equals_reference(
    operation: str,
    function: Callable[..., Any],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype = torch.float32,
    tolerance: float = EXACT,
    looser: dict[str, float] | None = None,
    **settings: Any,
) -> None:
    """The relative error of everything is within `tolerance`, and what the reference gives as zero is zero exactly.

    looser: larger tolerances, by the name of what is compared.
    """
    rounded = {name: None if t is None else t.to(dtype).double() for name, t in tensors.items()}
    rounded |= {name: tensors[name] for name in settings.get("wide", ()) if name in tensors}
    reference_settings = {name: v for name, v in settings.items() if name not in ("device", "wide", "view")}
    truth = getattr(reference, operation)
    wraps = {"ssd_block": without_state, "gated_rms_norm": without_state, "residual_rms_norm": residual_norm}
    wrap = wraps.get(operation)
    truth = truth if wrap is None else wrap(truth)
    expected = results(truth, rounded, torch.float64, **reference_settings)
    found = results(function, rounded, dtype, **settings)
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert found[name].shape == truth.shape, name
        error = ((found[name] - truth).norm() / truth.norm().clamp(min=1e-30)).item()
        if truth.norm() == 0:
            error = found[name].norm().item()
        assert error <= max(tolerance, (looser or {}).get(name, 0.0)), f"{name}: relative error {error:.2e}"


def assert_rounds_as_pytorch(norm: Callable[..., tuple[Tensor, Tensor]], slack: float, device: str = "cpu") -> None:
    """A `residual_rms_norm` in bfloat16 is as near float64 as PyTorch's addition, norm and cast are, in everything.

    slack: how many times PyTorch's error is allowed.
    """

    def separate(stream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = stream + x
        return F.rms_norm(total, weight.shape, weight.to(total.dtype), 1e-5).bfloat16(), total

    def fused(stream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm(stream, x, weight, 1e-5, torch.bfloat16)

    tensors = {name: t.bfloat16() for name, t in norm_tensors(length=9, dim=96).items()}
    exact = {name: t.double().requires_grad_() for name, t in tensors.items()}
    outputs = reference.residual_rms_norm(**exact, eps=1e-5)
    slopes = [torch.randn(t.shape).bfloat16() for t in outputs]
    truth = [*outputs, *torch.autograd.grad(outputs, list(exact.values()), [slope.double() for slope in slopes])]
    for wide in (torch.float32, torch.bfloat16):
        errors = []
        for function in (fused, separate):
            leaves = {n: t.to(device, t.dtype if n == "x" else wide).requires_grad_() for n, t in tensors.items()}
            outputs = function(**leaves)
            given = [slope.to(device, o.dtype) for slope, o in zip(slopes, outputs, strict=True)]
            found = [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), given)]
            pairs = zip(found, truth, strict=True)
            errors.append([((one.cpu().double() - t).norm() / t.norm()).item() for one, t in pairs])
        for name, ours, theirs in zip(("y", "sum", *(f"d{n}" for n in tensors)), *errors, strict=True):
            assert ours <= max(slack * theirs, 1e-6), f"{name}, {wide}: {ours:.2e} against {theirs:.2e}"
