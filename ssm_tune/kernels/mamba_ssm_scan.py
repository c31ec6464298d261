"""Mamba-1's selective scan and its step form through the CUDA kernels of the package mamba_ssm.

The scan kernel knows no documents, and starts from zero. Both are done around it, exactly: see `_set_starts` and
`_from_initial_state`. `package`: where its functions come from, see `ssm_tune.kernels.packages`; it is imported at the
first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.backends import Unsupported
from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.documents import Documents, find_documents
from ssm_tune.kernels.packages import MAMBA_SSM, Package
from ssm_tune.kernels.recompute import kept_tensors, recomputable, recomputing, reference_to

# Offsets into every tensor are 32-bit in the kernel.
_LARGEST = 2**31
# The kernel works through a row in pieces of this many tokens, and keeps two numbers a state for each.
_PIECE = 2048
# A step so long that exp(step * A) is 0 in float32, for any A below -1e-4. A power of two: bfloat16 holds it.
_FORGETTING_STEP = float(2**20)
# A step before softplus so small that softplus gives 0.
_NO_STEP = -float(2**20)
# Tokens to which the initial state is added at a time: bounds the memory of (batch, tokens, dim, state).
_TOKENS_AT_ONCE = 64


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    package: Package = MAMBA_SSM,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.selective_scan`. x, dt, B, C and z are used in the dtype of x, the rest in
    float32.

    Raises:
        Unsupported: float64, more than 256 states, a channel too long for 32-bit offsets, or a gradient through the
        final
            state, which the kernel drops.
    """
    kernel = package.function("ops.selective_scan_interface.selective_scan_fn")
    if x.dtype == torch.float64:
        raise Unsupported("float64 is computed by the reference only")
    if A.shape[-1] > 256:
        raise Unsupported(f"{A.shape[-1]} states, at most 256")
    given = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    if return_final_state and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise Unsupported("a gradient through the final state")
    documents = None if seq_idx is None else find_documents(seq_idx)
    if documents is not None and documents.starts is None:
        raise Unsupported("where documents start has to be waited for, which a CUDA graph cannot")
    A, D, dt_bias = (None if t is None else t.float() for t in (A, D, dt_bias))
    if documents is not None and not dt_softplus and dt_bias is not None:
        dt, dt_bias = dt + dt_bias, None  # so that what `_set_starts` writes is the step itself
    u, delta, z_turned = _turned(documents, x, dt, D, z, dt_bias, dt_softplus)
    B_turned, C_turned = (_turn(t, x.dtype) for t in (B, C))
    skipped = _skipped(documents, x, u, D, z)
    _recompute_turned(documents, x, dt, D, z, dt_bias, dt_softplus, (u, delta, z_turned))
    with device_of(x), kept_tensors() as kept:
        y, state = _scan(kernel, u, delta, A, B_turned, C_turned, D, z_turned, dt_bias, dt_softplus)
    ungated = [t for t in kept if t.shape == u.shape]
    y = _finished(y, documents, skipped).transpose(1, 2)
    if initial_state is not None:
        step = _true_step(dt, dt_bias, dt_softplus)
        more, carried = _from_initial_state(documents, step, A, C, initial_state)
        y = y + (more if z is None else more * F.silu(z.float())).to(y.dtype)
        state = state + carried
    if documents is not None and documents.is_padding is not None:
        y = y.masked_fill(documents.is_padding[..., None], 0.0)
    y = y.contiguous()  # whoever multiplies it by a matrix would copy it, and save the copy
    if z is not None and initial_state is None and len(ungated) == 1:
        _recompute_gated(y, ungated[0], z, documents, skipped)
    # Of the buffer that the kernel keeps for its backward, the state is a view.
    return (y, state.contiguous()) if return_final_state else y


def _true_step(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """The step of the recurrence, (..., dim), float32."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias
    return F.softplus(step) if dt_softplus else step


def _turn(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(batch, dim, length), tokens side by side, as the kernel wants it."""
    return None if tensor is None else tensor.to(dtype).transpose(1, 2).contiguous()


def _turned(
    documents: Documents | None,
    x: Tensor,
    dt: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, dt and z as the kernel gets them, documents and padding marked in x and dt."""
    u, delta, z_turned = (_turn(t, x.dtype) for t in (x, dt, z))
    if documents is not None:
        # Copies, ours to write into: turning may have given the tensor itself.
        u, delta = (t.clone() if t.data_ptr() == given.data_ptr() else t for t, given in ((u, x), (delta, dt)))
        _set_starts(documents, x, dt, dt_bias, dt_softplus, u, delta)
        _clear_padding(documents, dt_softplus, u, delta)
    return u, delta, z_turned


def _recompute_turned(
    documents: Documents | None,
    x: Tensor,
    dt: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    turned: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Let what was turned be turned again in backward, rather than kept beside what it was made of."""
    if not recomputing():
        return
    given = [None if t is None else reference_to(t) for t in (x, dt, z)]
    vectors = [None if t is None else t.detach() for t in (D, dt_bias)]

    def turn_again() -> list[Tensor]:
        x, dt, z = (None if t is None else t() for t in given)
        again = _turned(documents, x, dt, vectors[0], z, vectors[1], dt_softplus)
        return [t for t in again if t is not None]

    recomputable([t for t in turned if t is not None], turn_again)


def _set_starts(
    documents: Documents,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    u: Tensor,
    delta: Tensor,
) -> None:
    """Make the kernel forget at the first token of each document; changes u and delta (batch, dim, length) there.

    A step of _FORGETTING_STEP makes exp(step A) zero, and x times true step over this step enters the state as it
    should.
    """
    rows, columns = documents.starts
    if rows.numel() == 0:
        return
    values = x[rows, columns].float()
    long_step = x.new_full((), _FORGETTING_STEP, dtype=torch.float32)
    # The kernel adds the bias to this step too, and softplus leaves it as it is.
    long_step = long_step if dt_bias is None else long_step + dt_bias
    u[rows, :, columns] = (values * _true_step(dt[rows, columns], dt_bias, dt_softplus) / long_step).to(u.dtype)
    delta[rows, :, columns] = delta.new_full((), _FORGETTING_STEP)


def _skipped(documents: Documents | None, x: Tensor, u: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor | None:
    """What the skip connection lacks at the first tokens of documents, (starts, dim), gated: D (x - u) silu(z)."""
    if documents is None or D is None or documents.starts[0].numel() == 0:
        return None
    rows, columns = documents.starts
    skipped = D * (x[rows, columns].float() - u[rows, :, columns].float())
    return skipped if z is None else skipped * F.silu(z[rows, columns].float())


def _finished(y: Tensor, documents: Documents | None, skipped: Tensor | None) -> Tensor:
    """y (batch, dim, length) with the skip connection whole at the first tokens of documents."""
    if skipped is not None:
        rows, columns = documents.starts
        y[rows, :, columns] = y[rows, :, columns] + skipped.to(y.dtype)
    return y


def _recompute_gated(
    y: Tensor, ungated: Tensor, z: Tensor, documents: Documents | None, skipped: Tensor | None
) -> None:
    """Let y be gated again in backward: the kernel keeps its output before the gate."""
    z_again, skipped = reference_to(z), None if skipped is None else skipped.detach()

    def gate_again() -> list[Tensor]:
        again = F.silu(z_again()) * ungated.transpose(1, 2)
        if skipped is not None:
            rows, columns = documents.starts
            again[rows, columns] += skipped.to(again.dtype)
        if documents is not None and documents.is_padding is not None:
            again.masked_fill_(documents.is_padding[..., None], 0.0)
        return [again]

    recomputable([y], gate_again)


def _clear_padding(documents: Documents, dt_softplus: bool, u: Tensor, delta: Tensor) -> None:
    """Make the kernel pass over padding: no step, and nothing that enters."""
    rows, columns = documents.padding
    if rows.numel():
        u[rows, :, columns] = u.new_zeros(())
        delta[rows, :, columns] = delta.new_full((), _NO_STEP if dt_softplus else 0.0)


def _scan(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The kernel, on as many rows and channels at a time as its offsets allow: neither depends on the others."""
    batch, dim, length = u.shape
    largest = max(length, -(-length // _PIECE) * 2 * A.shape[1])  # numbers of one channel of a row, in any tensor
    if batch * dim * largest < _LARGEST:
        return kernel(u, delta, A, B, C, D, z, dt_bias, dt_softplus, True)
    step = min(dim, (_LARGEST - 1) // largest)
    if step == 0:
        raise Unsupported(f"{length} tokens in a row, beyond 32-bit offsets")
    rows = []
    for row in range(batch):
        parts = []
        for first in range(0, dim, step):
            some = slice(first, first + step)
            vectors = (None if t is None else t[some] for t in (D, dt_bias))
            per_token = (None if t is None else t[row : row + 1, some] for t in (u, delta, z))
            (u_part, delta_part, z_part), (D_part, bias_part) = per_token, vectors
            per_row = (B[row : row + 1], C[row : row + 1], D_part, z_part, bias_part)
            parts.append(kernel(u_part, delta_part, A[some], *per_row, dt_softplus, True))
        rows.append([torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)])
    y, state = (torch.cat(pieces, dim=0) for pieces in zip(*rows, strict=True))
    return y, state


def _from_initial_state(
    documents: Documents | None, step: Tensor, A: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What the state before the first token adds, since the recurrence is linear in it.

    Returns C_t exp(S_t A) h for every token of the first document, (batch, length, dim) before the gate, where S_t is
    the sum of steps up to t, and exp(S A) h after the last token, (batch, dim, state); zero beyond the first
    document.
    """
    first = None
    if documents is not None:
        first = (documents.number == 0)[..., None]
        if documents.is_padding is not None:
            step = step.masked_fill(documents.is_padding[..., None], 0.0)
            C = C.masked_fill(documents.is_padding[..., None], 0.0)
    total = step.cumsum(1)
    parts = []
    for t in range(0, step.shape[1], _TOKENS_AT_ONCE):
        some = slice(t, t + _TOKENS_AT_ONCE)
        carried = torch.exp(total[:, some, :, None] * A) * state.float()[:, None]
        parts.append((carried * C[:, some, None].float()).sum(-1))
    more, carried = torch.cat(parts, dim=1), torch.exp(total[:, -1, :, None] * A) * state.float()
    if first is not None:
        more, carried = more * first, carried * first[:, -1, :, None]
    return more, carried


def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    *,
    package: Package = MAMBA_SSM,
) -> Tensor:
    """The operation of `ssm_tune.kernels.selective_scan_step`.

    Raises:
        Unsupported: float64.
    """
    if torch.float64 in {x.dtype, state.dtype}:
        raise Unsupported("float64 is computed by the reference only")
    update = package.function("ops.triton.selective_state_update.selective_state_update")
    # The kernel's launch fails without a D and a bias.
    D, dt_bias = (x.new_zeros(x.shape[-1], dtype=torch.float32) if t is None else t for t in (D, dt_bias))
    with device_of(x):
        return update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
