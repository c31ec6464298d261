"""Mamba-3's mixer: parameters as published, values at birth, and the published module itself where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_config
from torch import Tensor

from ssm_tune.architectures.mamba3 import Mamba3Mixer


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_are_named_and_shaped_as_in_mamba_ssm(rank: int) -> None:
    changes = {"hidden_size": 64, "state_size": 16, "mamba_head_dim": 32, "n_groups": 1, "mimo_rank": rank}
    mixer = Mamba3Mixer(make_config("mamba3_normed", **changes), 0)
    inner, heads, ranks, state = 128, 4, max(rank, 1), 16
    expected = {
        "in_proj.weight": (2 * inner + 2 * state * ranks + 3 * heads + state // 4, 64),
        "dt_bias": (heads,),
        "B_bias": (heads, ranks, state),
        "C_bias": (heads, ranks, state),
        "B_norm.weight": (state,),
        "C_norm.weight": (state,),
        "D": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (64, inner),
    }
    if rank:
        expected |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), (heads, ranks, 32))
    assert {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()} == expected


def test_begins_as_published() -> None:
    config = make_config("mamba3_mimo", hidden_size=512, mamba_head_dim=4, mimo_rank=4)
    mixer = Mamba3Mixer(config, 0)
    mixer.draw_parameters()
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert steps.min() >= 0.00099 and steps.max() <= 0.101 and steps.log().std() > 1
    for name, value in {"B_bias": 1, "C_bias": 1, "D": 1, "mimo_x": 0.25, "mimo_z": 1, "mimo_o": 0.25}.items():
        assert (getattr(mixer, name) == value).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_published_module(normed: bool) -> None:
    """Forward and gradients in bfloat16 against mamba_ssm's Mamba3 (SISO) with the same weights."""
    published = pytest.importorskip("mamba_ssm.modules.mamba3")
    torch.manual_seed(0)
    shape = {"d_state": 64, "headdim": 64, "ngroups": 2, "is_outproj_norm": normed}
    theirs = published.Mamba3(256, **shape, device="cuda", dtype=torch.bfloat16)
    config = make_config(
        "mamba3", hidden_size=256, state_size=64, mamba_head_dim=64, n_groups=2, output_norm=normed, chunk_size=64
    )
    ours = Mamba3Mixer(config, 0).cuda()
    ours.load_state_dict({name: tensor.float() for name, tensor in theirs.state_dict().items()})
    for name, parameter in ours.named_parameters():
        parameter.data = parameter.data.to(theirs.get_parameter(name).dtype)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    def run(module: torch.nn.Module) -> dict[str, Tensor]:
        given = x.clone().requires_grad_()
        y = module(given)
        y.backward(grad)
        return {"y": y, "x": given.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}

    got, expected = run(ours), run(theirs)
    for name, tensor in expected.items():
        error = (got[name].float() - tensor.float()).abs().max() / tensor.float().abs().max()
        assert error < 2e-2, (name, error.item())
