"""The packages mamba_ssm and causal_conv1d in plain PyTorch, for a CPU: what they take, give, refuse and do not know.

They prove what reaches a kernel and what is made of its results, not that a kernel is right: that is
`test_gpu_kernels.py`. The signatures are those of mamba-ssm 2.3.2 and causal-conv1d 1.7.0.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels import reference

CALLS: list[str] = []
# Our modules that call them.
OURS = ("mamba_ssm_scan", "mamba_ssm_ssd", "mamba_ssm_block", "mamba_ssm_norm", "causal_conv1d_cuda")
OUR_NORM = "ssm_tune.kernels.triton_gated_norm"  # a kernel for a GPU as well, which `ssd_block` is made of


def ours(name: str) -> ModuleType:
    """One of them, imported at the first call, when the stand-ins are there."""
    return importlib.import_module(f"ssm_tune.kernels.{name}")


class _Kernel(torch.autograd.Function):
    """Saves what the real one saves, and computes its gradients from what it finds saved."""

    @staticmethod
    def forward(ctx, compute, *tensors):
        with torch.no_grad():
            results, also_saved = compute(*tensors)
        ctx.compute, ctx.given = compute, len(tensors)
        ctx.save_for_backward(*tensors, *also_saved)
        return results

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors[: ctx.given]
        inputs = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in saved]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        with torch.enable_grad():
            results = ctx.compute(*inputs)[0]
        first = results[0] if isinstance(results, tuple) else results  # of the last state no gradient is known
        found = dict(zip(map(id, wanted), torch.autograd.grad(first, wanted, grads[0]), strict=True))
        return None, *(None if t is None else found.get(id(t)) for t in inputs)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """(batch, dim, length); no documents, no initial state, no gradient through the last state."""
    CALLS.append("selective_scan_fn")
    assert {t.dtype for t in (delta, B, C)} == {u.dtype}
    assert z is None or z.dtype == u.dtype
    assert {t.dtype for t in (A, D, delta_bias) if t is not None} == {torch.float32}
    assert A.shape[1] <= 256

    def compute(u, delta, A, B, C, D, z, delta_bias):
        turned = [None if t is None else t.transpose(1, 2) for t in (u, delta, B, C)]
        out, state = reference.selective_scan(
            turned[0], turned[1], A, turned[2], turned[3], D, None, delta_bias,
            dt_softplus=delta_softplus, return_final_state=True,
        )  # fmt: skip
        out = out.transpose(1, 2).contiguous()
        if z is None:
            return (out, state.detach()), ()
        return ((out.float() * F.silu(z.float())).to(out.dtype), state.detach()), (out,)

    y, state = _Kernel.apply(compute, u, delta, A, B, C, D, z, delta_bias)
    return (y, state) if return_last_state else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Both step forms; the real launch fails without D and dt_bias."""
    CALLS.append("selective_state_update")
    assert D is not None
    assert dt_bias is not None
    if state.dim() == 3:
        return reference.selective_scan_step(x, dt, A, B, C, state, D, z, dt_bias, dt_softplus)
    assert z is None
    assert x.shape == dt.shape
    assert A.shape == state.shape[1:]
    assert D.shape == dt_bias.shape == x.shape[1:]
    heads = x.shape[1]
    dt, A, dt_bias = dt[..., 0], A[:, 0, 0], dt_bias[:, 0]
    assert heads % B.shape[1] == 0
    return reference.ssd_step(x, dt, A, B, C, state, D, dt_bias, dt_softplus)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Tokens with equal numbers see each other; the initial state is of document 0; padding is not known."""
    CALLS.append("mamba_chunk_scan_combined")
    assert B.dtype == C.dtype == x.dtype
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    batch, length, heads = x.shape[:3]
    B, C = (t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    step = dt.float() if dt_bias is None else dt.float() + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    total = (step * A).cumsum(1)
    same = torch.ones(batch, length, length, dtype=torch.bool)
    of_state = torch.ones(batch, length, dtype=torch.bool)
    if seq_idx is not None:
        same, of_state = seq_idx[:, :, None] == seq_idx[:, None], seq_idx == 0
    same = (same & torch.ones(length, length, dtype=torch.bool).tril())[..., None]
    decay = torch.exp((total[:, :, None] - total[:, None]).masked_fill(~same, -math.inf))
    entering = x.float() * step[..., None]
    y = torch.einsum("bijh,bihn,bjhn,bjhp->bihp", decay, C, B, entering)
    state = torch.einsum("bjh,bjhn,bjhp->bhpn", decay[:, -1], B, entering)
    if initial_states is not None:
        carried = torch.exp(total) * of_state[..., None]
        y = y + torch.einsum("bih,bihn,bhpn->bihp", carried, C, initial_states.float())
        state = state + carried[:, -1, :, None, None] * initial_states
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * x.float()
    y = y.to(x.dtype)
    return (y, state) if return_final_states else y


# -- what `ssd_block` calls: functions without autograd, whose gradients go where they are told -----------------------


def _mamba_chunk_scan_combined_fwd(x, dt, A, B, C, chunk_size, D, z, dt_bias, seq_idx, dt_softplus, dt_limit):
    """The output, and, if there is a z to multiply by, what it was before."""
    CALLS.append("_mamba_chunk_scan_combined_fwd")
    assert {t.dtype for t in (A, D, dt_bias)} == {torch.float32}
    settings = {"dt_bias": dt_bias, "seq_idx": seq_idx, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    with torch.autocast("cpu", enabled=False):  # of which no kernel knows
        out = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, **settings)
    return (out, None, *[None] * 4) if z is None else ((out.float() * F.silu(z.float())).to(x.dtype), out, *[None] * 4)


def _mamba_chunk_scan_combined_bwd(
    dout, x, dt, A, B, C, out, chunk_size, D, z, dt_bias, seq_idx, dt_softplus, dt_limit, dx, ddt, dB, dC, dz=None
):
    """`out` is the output before z."""
    CALLS.append("_mamba_chunk_scan_combined_bwd")
    leaves = _leaves(x, dt, A, B, C, D, z, dt_bias)
    with torch.enable_grad():
        given = (*leaves[:5], chunk_size, *leaves[5:], seq_idx, dt_softplus, dt_limit)
        y, before, *_ = _mamba_chunk_scan_combined_fwd(*given)
    assert torch.equal(y if before is None else before, out)
    found = _gradients(y, leaves, dout)
    for given, gradient in zip((dx, ddt, dB, dC, dz), (found[i] for i in (0, 1, 3, 4, 6)), strict=True):
        if given is not None:
            given.copy_(gradient)
    return (dx, ddt, found[2], dB, dC, found[5], dz, found[7], None)


def causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation):
    """`causal_conv1d_fn`."""
    CALLS.append("causal_conv1d_fwd_function")
    assert initial_states is None and final_states_out is None
    assert bias is None or bias.dtype == weight.dtype
    return causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu" if silu_activation else None)


def causal_conv1d_bwd_function(
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu_activation
):
    """Reads and writes the gradients, too, in pieces of 16 bytes."""
    CALLS.append("causal_conv1d_bwd_function")
    for tensor in (dout, dx):
        assert tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 and tensor.stride(2) % 8 == 0
        assert tensor.data_ptr() % 16 == 0
    leaves = _leaves(x, weight, bias)
    with torch.enable_grad():
        y = causal_conv1d_fwd_function(*leaves, seq_idx, initial_states, dfinal_states, silu_activation)
    found = _gradients(y, leaves, dout)
    dx.copy_(found[0])
    return (dx, *found[1:], None)


def normalise(y, z, weight, eps, group_size, norm_before_gate):
    """Of our own kernel for a GPU; in the second place `eps` in the place of what depends on it."""
    CALLS.append("normalise")
    scales = torch.full((y.numel() // group_size,), eps)
    return reference.gated_rms_norm(y, z, weight, eps, group_size, norm_before_gate), scales


def normalise_backward(dout, y, z, weight, scales, dz, group_size, norm_before_gate, need_weight, again=None):
    """Of our own kernel for a GPU."""
    CALLS.append("normalise_backward")
    leaves = _leaves(y, z, weight)
    with torch.enable_grad():
        out = reference.gated_rms_norm(*leaves, scales[0].item(), group_size, norm_before_gate)
    found = _gradients(out, leaves, dout)
    if again is not None:
        again.copy_(out.detach())
    dz.view(-1, dz.shape[-1]).copy_(found[1].view(-1, dz.shape[-1]))
    return found[0], found[2] if need_weight else None


def _leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def _gradients(y: Tensor, leaves: list[Tensor | None], slope: Tensor) -> list[Tensor | None]:
    """By all of them, None for what is None."""
    found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], slope))
    return [None if t is None else next(found) for t in leaves]


# ------------------------------------------------------------------------------------------------------------------


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """The gated norm."""
    CALLS.append("rmsnorm_fn")
    return reference.gated_rms_norm(x, z, weight, eps, group_size, norm_before_gate)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The plain norm."""
    CALLS.append("rms_norm_fn")
    return reference.rms_norm(x, weight, eps)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """(batch, dim, length), channels side by side; a window holds what has the token's number, if not negative."""
    CALLS.append("causal_conv1d_fn")
    batch, dim = x.shape[:2]
    width = weight.shape[1]
    assert 2 <= width <= 4
    assert dim % 8 == 0
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == 0
    assert x.stride(2) % 8 == 0
    assert x.data_ptr() % 16 == 0
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    assert seq_idx is None or initial_states is None
    assert initial_states is None or (initial_states.stride(1) == 1 and initial_states.dtype == x.dtype)

    def compute(x, weight, bias, initial_states):
        head = x.new_zeros(batch, dim, width - 1) if initial_states is None else initial_states
        seen = torch.cat([head, x], dim=-1).float().unfold(-1, width, 1)
        if seq_idx is not None:
            numbers = F.pad(seq_idx, (width - 1, 0), value=-1).unfold(-1, width, 1)
            seen = seen * (numbers == seq_idx[..., None])[:, None]
        y = (seen * weight[:, None].float()).sum(-1)
        if bias is not None:
            y = y + bias.float()[:, None]
        y = F.silu(y) if activation == "silu" else y
        if seq_idx is not None:
            y = y * (seq_idx >= 0)[:, None]
        return torch.empty_like(x).copy_(y), ()  # channels side by side, as in x

    return _Kernel.apply(compute, x, weight, bias, initial_states)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """One token; the state has the dtype of x."""
    CALLS.append("causal_conv1d_update")
    assert conv_state.dtype == x.dtype
    return reference.causal_conv1d_step(x, conv_state, weight, bias, activation)


# -- other versions: the next mamba-ssm, and old ones --------------------------------------------------------------


def selective_scan_not_built(*args: object, **kwargs: object) -> None:
    """The next version, built by its defaults."""
    raise RuntimeError(
        "selective_scan_cuda is not installed. To use Mamba-1, reinstall with:\n"
        "  MAMBA_KEEP_CUDA_BUILD=TRUE pip install mamba-ssm --no-build-isolation"
    )


def norm_without_groups(
    x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, group_size: int | None, norm_before_gate: bool
) -> Tensor:
    """Takes the size of groups, and normalises over the whole row."""
    return reference.gated_rms_norm(x, z, weight, eps, None, norm_before_gate)


def norm_always_after_the_gate(
    x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, group_size: int | None, norm_before_gate: bool
) -> Tensor:
    """Takes the order of norm and gate, and keeps its own."""
    return reference.gated_rms_norm(x, z, weight, eps, group_size, False)


def norm_of_fewer_arguments(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float) -> Tensor:
    """Knows neither."""
    return reference.gated_rms_norm(x, z, weight, eps)


# ------------------------------------------------------------------------------------------------------------------


def modules() -> dict[str, ModuleType]:
    """What to put into sys.modules."""
    convolutions = (causal_conv1d_fwd_function, causal_conv1d_bwd_function)
    contents = {
        "mamba_ssm": (),
        "mamba_ssm.ops": (),
        "mamba_ssm.ops.selective_scan_interface": (selective_scan_fn,),
        "mamba_ssm.ops.triton": (),
        "mamba_ssm.ops.triton.selective_state_update": (selective_state_update,),
        "mamba_ssm.ops.triton.ssd_combined": (
            mamba_chunk_scan_combined,
            _mamba_chunk_scan_combined_fwd,
            _mamba_chunk_scan_combined_bwd,
            *convolutions,
        ),
        "mamba_ssm._causal_conv1d": (),  # which the Hub's has
        "mamba_ssm._causal_conv1d.cpp_functions": convolutions,
        "mamba_ssm.ops.triton.layer_norm": (rms_norm_fn,),
        "mamba_ssm.ops.triton.layernorm_gated": (rmsnorm_fn,),
        "causal_conv1d": (causal_conv1d_fn, causal_conv1d_update),
        "causal_conv1d.cpp_functions": convolutions,
        OUR_NORM: (normalise, normalise_backward),
    }
    found = {}
    for name, functions in contents.items():
        found[name] = ModuleType(name)
        found[name].__path__ = []
        vars(found[name]).update({function.__name__: function for function in functions})
    found[OUR_NORM].WIDEST = 512
    return found
