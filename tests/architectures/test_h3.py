"""H3 against a small implementation of the paper's equations, one channel and token at a time."""

from __future__ import annotations

import math

import torch
from tiny_models import make_config, make_model
from torch import Tensor

from ssm_tune.architectures.h3 import H3Mixer
from ssm_tune.optimizer import decayed_parameter_names


def by_the_paper(mixer: H3Mixer, x: Tensor) -> Tensor:
    """x (length, hidden): q * diagonal(shift(k) v), section 3.2; systems run as h = A h + B u, y = C h + D u."""
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    shift, diagonal, d = mixer.shift, mixer.diagonal, mixer.head_dim
    shifted = []
    memory = torch.zeros_like(shift.B)
    for t in range(len(x)):
        memory = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], dim=1) + shift.B * k[t][:, None]
        shifted.append((shift.C * memory).sum(1) + mixer.shift_D * k[t])
    outputs = torch.zeros(len(x), d, mixer.heads)
    for head in range(mixer.heads):
        dt = diagonal.log_dt[head].exp()
        A = torch.complex(-diagonal.inv_A_real[head].exp(), diagonal.A_imag[head])
        B, C = (torch.complex(part[head, :, 0], part[head, :, 1]) for part in (diagonal.B, diagonal.C))
        keep, take = (1 + A * dt / 2) / (1 - A * dt / 2), B * dt / (1 - A * dt / 2)  # the bilinear rule
        for value in range(d):
            for key in range(d):
                state = torch.zeros_like(A)
                for t in range(len(x)):
                    met = shifted[t][head * d + key] * v[t][head * d + value]
                    state = keep * state + take * met
                    remembered = 2 * (C * state).real.sum() + mixer.D[head] * met
                    outputs[t, value, head] = outputs[t, value, head] + q[t][head * d + key] * remembered
    return mixer.out_proj(outputs.flatten(1))


def test_equals_the_papers_equations() -> None:
    model = make_model("h3_hybrid", hidden_size=8, num_attention_heads=2)
    mixer = model.backbone.layers[0].mixer
    x = torch.randn(9, 8)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x[None])[0], by_the_paper(mixer, x), rtol=1e-5, atol=1e-5)


def test_begins_as_published() -> None:
    """S4D-Lin, steps in their range, a shift that hands on its input, and skips (H3, appendix; S4D, section 4)."""
    config = make_config("h3", hidden_size=256, num_attention_heads=4)
    mixer = H3Mixer(config, 0)
    mixer.draw_parameters()
    diagonal = mixer.diagonal
    steps = diagonal.log_dt.exp()
    assert steps.min() >= config.time_step_min and steps.max() <= config.time_step_max
    assert steps.log().std() > 1  # log-uniform over two decades: 1.33
    assert torch.allclose(-diagonal.inv_A_real.exp(), torch.tensor(-0.5))
    assert torch.allclose(diagonal.A_imag, math.pi * torch.arange(4.0).expand(256, 4))
    assert torch.equal(diagonal.B, torch.tensor([1.0, 0.0]).expand_as(diagonal.B))
    assert abs(diagonal.C.square().sum(-1).mean() - 1) < 0.1  # a standard complex normal
    assert torch.equal(mixer.shift.B.sum(1), torch.ones(256)) and mixer.shift.B[:, 0].all()
    assert mixer.shift.C.abs().max() <= 8**-0.5
    assert 0.8 < mixer.D.std() < 1.2 and 0.8 < mixer.shift_D.std() < 1.2


def test_what_decays_is_what_decays_in_the_published_code() -> None:
    mixer = H3Mixer(make_config("h3"), 0)
    kept = {name for name, _ in mixer.named_parameters()} - set(decayed_parameter_names(mixer))
    systems = {"shift.B", "diagonal.log_dt", "diagonal.inv_A_real", "diagonal.A_imag", "diagonal.B"}
    biases = {f"{name}.bias" for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    assert kept == systems | biases | {"D", "shift_D"}
