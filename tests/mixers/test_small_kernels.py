"""What a mixer does to its small parameters: as few kernels as there can be, the same numbers to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_tune.kernels import recompute
from ssm_tune.mixers import cast_together, master_weights
from ssm_tune.mixers.backward_pieces import Pieces
from ssm_tune.mixers.decay_rates import decay_rates
from ssm_tune.mixers.patch import patch_model
from ssm_tune.mixers.residual_stream import pass_through


class Operations(TorchDispatchMode):
    """Names of the operations, and the shapes of what is cast from float32."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.cast: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        if self.names[-1] == "_to_copy" and args[0].dtype == torch.float32:
            self.cast.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def exponential(A_log: Tensor) -> Tensor:
    return -torch.exp(A_log.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_rates(dtype: torch.dtype) -> None:
    found, slope = [], torch.randn(3, 5)
    for compute in (decay_rates, exponential):
        A_log = torch.linspace(-3.0, 3.0, 15).reshape(3, 5).to(dtype).requires_grad_()
        A = compute(A_log)
        (gradient,) = torch.autograd.grad(A, A_log, slope, create_graph=True)
        found.append((A, gradient, *torch.autograd.grad(gradient.sum(), A_log)))
    assert found[0][0].dtype == torch.float32
    assert all(map(torch.equal, *found))


def test_decay_rates_are_two_kernels_and_one_backward() -> None:
    A_log, slope = torch.randn(3).requires_grad_(), torch.randn(3)
    with Operations() as operations:
        A = decay_rates(A_log)
        torch.autograd.grad(A, A_log, slope)
    assert [name for name in operations.names if name != "detach"] == ["_foreach_exp", "_foreach_neg_", "_foreach_mul"]


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba"])
@pytest.mark.parametrize("starts", [[0], [0, 1]])
def test_recorded_blocks_have_their_decay_rates_from_one_operation_a_piece(kind: str, starts: list[int]) -> None:
    model = patch_model(tiny_model(kind)).train()
    blocks, x = model.backbone.layers, torch.randn(2, 7, model.config.hidden_size)
    pieces = Pieces(blocks, starts, trained_input=False)
    with Operations() as operations:
        y = pieces.forward(x, None)
        found, slopes = {}, [torch.ones_like(y)]
        for piece in reversed(range(len(starts))):
            gradients, slopes = pieces.backward(piece, slopes)
            found |= dict(zip(pieces.parameters(piece), gradients, strict=True))
    assert [operations.names.count(f"_foreach_{name}") for name in ("exp", "neg_", "mul")] == [len(starts)] * 3
    expected = pass_through(blocks, x)
    assert torch.equal(y, expected)
    parameters = list(blocks.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(expected.sum(), parameters), strict=True):
        torch.testing.assert_close(found[parameter], gradient)


def test_frozen_decay_rates_are_computed_together_too() -> None:
    model = patch_model(tiny_model("mamba2")).train()
    blocks, x = model.backbone.layers, torch.randn(2, 7, model.config.hidden_size)
    for block in blocks:
        block.mixer.A_log.requires_grad_(False)
    pieces = Pieces(blocks, [0], trained_input=True)
    with Operations() as operations:
        pieces.backward(0, [torch.ones_like(pieces.forward(x, None))])
    assert operations.names.count("_foreach_exp") == 1 and "_foreach_mul" not in operations.names


@pytest.mark.parametrize("starts", [[0], [0, 1]])
def test_recorded_blocks_have_their_small_weights_cast_once_and_at_once(
    starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, to the bit; in_proj, which is larger than small here, is cast by itself."""
    model = patch_model(tiny_model("mamba")).train()
    mixer = model.backbone.layers[0].mixer
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    monkeypatch.setattr(master_weights, "SMALL", mixer.in_proj.weight.numel() - 1)
    x, found = torch.randn(2, 7, model.config.hidden_size), []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(cast_together, "DEVICES", devices)
        pieces = Pieces(model.backbone.layers, starts, trained_input=False)
        with Operations() as operations, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = pieces.forward(x, None)
            gradients, slopes = [], [torch.ones_like(y)]
            for piece in reversed(range(len(starts))):
                by_parameters, slopes = pieces.backward(piece, slopes)
                gradients += by_parameters
        found.append((y, *gradients))
        assert operations.names.count("_foreach_copy_") == len(starts) * len(devices)
        x_proj, out_proj = operations.cast.count((18, 64)), operations.cast.count((32, 64))
        assert (x_proj, out_proj) == ((0, 0) if devices else (4, 4))  # in two layers, forward and backward
        assert (128, 32) in operations.cast
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_nothing_is_filled_or_copied_for_the_convolution(kind: str) -> None:
    """The gradient of one of a dimension of one element would be zeros with that element put in."""
    model = patch_model(tiny_model(kind)).train()
    mixer = model.backbone.layers[0].mixer
    y = mixer(torch.randn(2, 7, model.config.hidden_size))
    with Operations() as operations:
        torch.autograd.grad(y.sum(), [mixer.conv1d.weight])
    assert "select_backward" not in operations.names
