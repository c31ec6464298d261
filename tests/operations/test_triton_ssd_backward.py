"""The gradients of Mamba-2's scan in Triton at the sizes of real layers, on a GPU, beside mamba_ssm's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SIZES = [(4, 2048, 64, 64, 128, 1), (8, 2048, 24, 64, 128, 1), (2, 2048, 128, 64, 128, 8)]
NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias")


def layer(batch: int, length: int, heads: int, head_dim: int, state: int, groups: int) -> dict[str, Tensor]:
    """Steps between 0.001 and 0.1 and A between -1 and -16, as trained models have them; bfloat16."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    steps = torch.rand(heads, device="cuda").mul(4.6).sub(6.9).exp()
    return {
        "x": normal(batch, length, heads, head_dim),
        "dt": normal(batch, length, heads) * 0.5,
        "A": -1 - 15 * torch.rand(heads, device="cuda"),
        "B": normal(batch, length, groups, state),
        "C": normal(batch, length, groups, state),
        "D": torch.rand(heads, device="cuda"),
        "dt_bias": steps.expm1().log(),
    }


def gradients(scan: Callable[..., Tensor], tensors: dict[str, Tensor], dy: Tensor, seq_idx: Tensor) -> list[Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    return list(torch.autograd.grad(scan(**leaves, seq_idx=seq_idx), list(leaves.values()), dy))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=["mamba2-1.3b", "mamba2-130m", "codestral-7b"])
def test_gradients_are_as_near_as_mamba_ssm_s(sizes: tuple[int, ...]) -> None:
    pytest.importorskip("mamba_ssm")
    from ssm_tune.kernels import mamba_ssm_ssd, ssd_chunked, triton_ssd

    tensors = layer(*sizes)
    dy = torch.randn_like(tensors["x"])
    seq_idx = torch.arange(2048, device="cuda").div(300, rounding_mode="floor").int().expand(sizes[0], -1).contiguous()
    # Rows one by one: the chunks of matrix products take gigabytes for each.
    rows = []
    for row in range(sizes[0]):
        wide = {name: (t[row : row + 1] if t.dim() > 1 else t).float() for name, t in tensors.items()}
        rows.append(gradients(ssd_chunked.ssd_scan, wide, dy[row : row + 1].float(), seq_idx[:1]))
    truth = [
        torch.cat(of) if t.dim() > 1 else sum(of)
        for of, t in zip(zip(*rows, strict=True), tensors.values(), strict=True)
    ]
    ours, theirs = (
        [((found.float() - true).norm() / true.norm()).item() for found, true in zip(some, truth, strict=True)]
        for some in (gradients(f, tensors, dy, seq_idx) for f in (triton_ssd.ssd_scan, mamba_ssm_ssd.ssd_scan))
    )
    for name, our, their in zip(NAMES, ours, theirs, strict=True):
        assert our <= max(1.1 * their, 4e-3), f"{name}: {our:.1e}, mamba_ssm's {their:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=["mamba2-1.3b", "mamba2-130m", "codestral-7b"])
def test_recorded_launches_give_the_same_gradients(sizes: tuple[int, ...]) -> None:
    from ssm_tune.kernels import triton_ssd
    from ssm_tune.kernels.devices import recorded_launches

    tensors = layer(*sizes)
    dy = torch.randn_like(tensors["x"])
    seq_idx = torch.arange(2048, device="cuda").div(300, rounding_mode="floor").int().expand(sizes[0], -1).contiguous()
    expected = gradients(triton_ssd.ssd_scan, tensors, dy, seq_idx)
    with recorded_launches():
        found = gradients(triton_ssd.ssd_scan, tensors, dy, seq_idx)
    for name, one, other in zip(NAMES, expected, found, strict=True):
        assert torch.equal(one, other), name
