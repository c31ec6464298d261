"""A mixer's short convolution: its nn.Conv1d holds the parameters, the kernels compute."""

from __future__ import annotations

from torch import Tensor, nn

from ssm_tune import kernels
from ssm_tune.kernels.recompute import recomputable, reference_to
from ssm_tune.mixers.raw_parameters import kernel_of
from ssm_tune.mixers.states import continued


def convolve_row(
    conv1d: nn.Conv1d,
    x: Tensor,
    window: Tensor | None,
    seq_idx: Tensor | None,
    *,
    keep_window: bool,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor | None]:
    """x (batch, length, dim) convolved and activated, and the window (batch, dim, width - 1) after it if it is to be
    kept.

    `window`: the inputs before the first token, where a cache is continued.
    """
    weight = kernel_of(conv1d)
    arguments = {"activation": activation, "seq_idx": seq_idx, "initial_state": continued(window)}
    if keep_window:
        return kernels.causal_conv1d(x, weight, conv1d.bias, **arguments, return_final_state=True)
    y = kernels.causal_conv1d(x, weight, conv1d.bias, **arguments)
    if window is None:
        given = reference_to(x)

        def convolve_again() -> list[Tensor]:
            settings = {"activation": activation, "seq_idx": seq_idx}
            return [kernels.causal_conv1d(given(), kernel_of(conv1d), conv1d.bias, **settings)]

        recomputable([y], convolve_again)
    return y, None


def convolve_token(conv1d: nn.Conv1d, x: Tensor, window: Tensor, activation: str | None = "silu") -> Tensor:
    """One token, x (batch, dim); the window is updated in place."""
    return kernels.causal_conv1d_step(x, window, kernel_of(conv1d), conv1d.bias, activation)
