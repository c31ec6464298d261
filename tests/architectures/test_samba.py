"""Samba against a small implementation of the papers' equations, one token at a time; and windows with padding."""

from __future__ import annotations

import pytest
import torch
from tiny_models import IDS, make_model
from torch import Tensor, nn
from torch.nn.functional import silu, softplus


def norm(x: Tensor, module: nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight


def mamba(x: Tensor, mixer: nn.Module) -> Tensor:
    """Mamba, algorithm 2 and figure 3: x (length, hidden)."""
    u, gate = mixer.in_proj(x).chunk(2, dim=-1)
    width = mixer.conv1d.weight.shape[-1]
    state, outputs = torch.zeros_like(mixer.A_log), []
    for t in range(len(x)):
        window = [u[t - lag] if t >= lag else torch.zeros_like(u[0]) for lag in range(width)]
        taps = mixer.conv1d.weight[:, 0].flip(-1)
        seen = silu(sum(taps[:, lag] * window[lag] for lag in range(width)) + mixer.conv1d.bias)
        dt, B, C = mixer.x_proj(seen).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size])
        dt = softplus(mixer.dt_proj(dt))[:, None]
        state = torch.exp(-dt * mixer.A_log.exp()) * state + dt * seen[:, None] * B
        outputs.append(((state * C).sum(-1) + mixer.D * seen) * silu(gate[t]))
    return mixer.out_proj(torch.stack(outputs))


def attention(x: Tensor, mixer: nn.Module, window: int) -> Tensor:
    """Each head attends to the last `window` tokens; RoFormer's rotation as complex numbers."""
    size, heads = mixer.head_dim, x.shape[-1] // mixer.head_dim
    frequency = 10000.0 ** (-torch.arange(size // 2) / (size // 2))

    def turned(vector: Tensor, t: int) -> Tensor:
        z = torch.complex(*vector.chunk(2)) * torch.polar(torch.ones(size // 2), t * frequency)
        return torch.cat([z.real, z.imag])

    q, k, v = (linear(x).unflatten(-1, (-1, size)) for linear in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    outputs = torch.zeros(len(x), heads, size)
    for head in range(heads):
        shared = head // mixer.num_key_value_groups
        for t in range(len(x)):
            first = max(0, t - window + 1)
            scores = [turned(q[t, head], t) @ turned(k[s, shared], s) * size**-0.5 for s in range(first, t + 1)]
            outputs[t, head] = torch.stack(scores).softmax(0) @ v[first : t + 1, shared]
    return mixer.o_proj(outputs.flatten(1))


def test_equals_the_papers_equations() -> None:
    model = make_model("samba")
    ids = torch.randint(3, IDS["vocab_size"], (12,))
    with torch.no_grad():
        x = model.get_input_embeddings()(ids)
        for symbol, layer in zip("M-*-M-", model.backbone.layers, strict=True):
            inner = norm(x, layer.norm)
            if symbol == "M":
                x = x + mamba(inner, layer.mixer)
            elif symbol == "*":
                x = x + attention(inner, layer.mixer, model.config.sliding_window)
            else:
                mlp = layer.mixer
                x = x + mlp.down_proj(silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        expected = norm(x, model.backbone.norm_f) @ model.lm_head.weight.T
        torch.testing.assert_close(model(ids[None]).logits[0], expected, rtol=1e-5, atol=1e-5)


def test_order_and_window_are_the_published_ones() -> None:
    config = make_model("samba").config
    types = ["linear_attention", "mlp", "sliding_attention", "mlp", "linear_attention", "mlp"]
    assert config.layer_types == types
    assert type(config)().sliding_window == 2048 and type(config)().rope_theta == 10000.0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["samba", "mamba_hybrid", "mamba3_hybrid"])
def test_padding_takes_no_place_in_the_window(kind: str, attention: str) -> None:
    """Of rows that hold one document each, with and without a cache that begins."""
    model = make_model(kind, sliding_window=5)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, IDS["vocab_size"], (1, 12))
    rows = ([*range(4, 16)], [*range(12)], [*range(4), *range(8, 16)], [1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15])
    mask = torch.zeros(len(rows), 16, dtype=torch.long)
    for row, places in enumerate(rows):
        mask[row, places] = 1
    padded = torch.zeros_like(mask).masked_scatter(mask == 1, ids.expand(len(rows), -1))
    expected = model(ids, use_cache=False).logits.expand(len(rows), -1, -1)
    for use_cache in (False, True):
        got = model(padded, attention_mask=mask, use_cache=use_cache).logits[mask == 1].view_as(expected)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_window_that_has_kept_padding_is_not_continued() -> None:
    model = make_model("samba")
    ids = torch.randint(3, IDS["vocab_size"], (1, 8))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1]])
    cache = model(ids, attention_mask=mask, use_cache=True).cache
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    with pytest.raises(ValueError, match="Pad rows on the left"):
        model(ids[:, :1], attention_mask=longer, cache=cache)
    short = make_model("samba", sliding_window=9)  # sees all of them
    cache = short(ids, attention_mask=mask, use_cache=True).cache
    got = short(ids[:, :1], attention_mask=longer, cache=cache).logits[0, -1]
    together = torch.cat([ids[mask == 1], ids[0, :1]])[None]
    torch.testing.assert_close(got, short(together, use_cache=False).logits[0, -1], rtol=1e-5, atol=1e-5)
