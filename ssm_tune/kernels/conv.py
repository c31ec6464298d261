"""The short causal convolution before the scan and its step form: one signature, backends behind it."""

from __future__ import annotations

from torch import Tensor

from ssm_tune.kernels import backends


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise convolution over the last `width` tokens of the same document, then the activation.

    Args:
        x: (batch, length, dim). weight: (dim, width), the newest token last. bias: (dim,). activation: "silu" or
        None. seq_idx: (batch, length) integers, the document of each token; -1 is padding. See
        `kernels/reference.py`. initial_state: (batch, dim, width - 1): the tokens before the first, the newest last.
        return_final_state: also give the last width - 1 real tokens, same shape, in the dtype of `initial_state` or
        of x.

    Returns:
        y (batch, length, dim) in the dtype of x, or (y, final state). Differentiable in everything.

    Raises:
        ValueError: shapes that do not belong together, or an activation that is not known.
        KernelError: kernels are required and only a fallback can serve this call.
    """
    batch, length, dim = x.shape
    width = weight.shape[-1]
    _check_activation("causal_conv1d", activation)
    backends.check_shapes(
        "causal_conv1d",
        weight=(weight, (dim, width)),
        bias=(bias, (dim,)),
        seq_idx=(seq_idx, (batch, length)),
        initial_state=(initial_state, (batch, dim, width - 1)),
    )
    return backends.call(
        "causal_conv1d",
        x,
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """One token of `causal_conv1d`, for decoding.

    Args:
        x: (batch, dim). state: (batch, dim, width - 1), the newest token last, updated in place.
        weight: (dim, width). bias: (dim,). activation: "silu" or None.

    Returns:
        y (batch, dim) in the dtype of x.

    Raises:
        ValueError: shapes that do not belong together, or an activation that is not known.
    """
    batch, dim = x.shape
    width = weight.shape[-1]
    _check_activation("causal_conv1d_step", activation)
    backends.check_shapes(
        "causal_conv1d_step",
        state=(state, (batch, dim, width - 1)),
        weight=(weight, (dim, width)),
        bias=(bias, (dim,)),
    )
    return backends.call("causal_conv1d_step", x, state, weight, bias, activation)


def _check_activation(operation: str, activation: str | None) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"{operation}: activation {activation!r} is not known, expected 'silu' or None.")
