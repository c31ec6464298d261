"""The reference itself, against closed forms and against what documents and padding mean."""

from __future__ import annotations

import torch
from comparison import conv_tensors, draw, scan_tensors, ssd_tensors
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels import reference
from ssm_tune.kernels.reference import starts_and_padding

# Ten tokens: a document that continues the initial state, one of a single token, padding within and after.
PACKED = torch.tensor([[-1, 0, 0, 0, 1, 2, -1, 2, 2, -1]])
FIRST, SECOND, THIRD = [1, 2, 3], [4], [5, 7, 8]
OPERATIONS = (
    (reference.selective_scan, scan_tensors),
    (reference.ssd_scan, ssd_tensors),
    (reference.causal_conv1d, conv_tensors),
)


def cut(tensors: dict[str, Tensor | None], places: list[int]) -> dict[str, Tensor | None]:
    """The tokens at `places` of every tensor that has tokens."""
    return {name: t[:, places] if name in ("x", "dt", "B", "C", "z") else t for name, t in tensors.items()}


def test_selective_scan_is_the_sum_over_earlier_tokens() -> None:
    t = scan_tensors(batch=1, length=6, dim=3, state=2, without=("initial_state",))
    y = reference.selective_scan(**t)
    step = F.softplus(t["dt"] + t["dt_bias"])[0]
    expected = torch.zeros(6, 3, dtype=torch.float64)
    for i in range(6):
        for j in range(i + 1):
            decay = torch.exp(step[j + 1 : i + 1].sum(0)[:, None] * t["A"])
            expected[i] += (decay * t["B"][0, j] * t["C"][0, i]).sum(-1) * step[j] * t["x"][0, j]
    expected = (expected + t["D"] * t["x"][0]) * F.silu(t["z"][0])
    torch.testing.assert_close(y[0], expected)


def test_ssd_scan_is_the_selective_scan_with_one_decay_for_each_head() -> None:
    t = ssd_tensors(batch=2, length=6, heads=4, head_dim=3, groups=1, state=2)
    y, state = reference.ssd_scan(**t, return_final_state=True)
    spread = lambda tensor: tensor.repeat_interleave(3, -1)  # noqa: E731
    y_flat, state_flat = reference.selective_scan(
        t["x"].flatten(2), spread(t["dt"]), spread(t["A"])[:, None].expand(-1, 2), t["B"][:, :, 0], t["C"][:, :, 0],
        spread(t["D"]), None, spread(t["dt_bias"]),
        initial_state=t["initial_state"].flatten(1, 2), return_final_state=True,
    )  # fmt: skip
    torch.testing.assert_close(y.flatten(2), y_flat)
    torch.testing.assert_close(state.flatten(1, 2), state_flat)


def test_ssd_scan_clamps_the_time_step_after_softplus() -> None:
    t = ssd_tensors(length=5)
    step = F.softplus(t.pop("dt") + t.pop("dt_bias")).clamp(0.1, 0.3)
    clamped = reference.ssd_scan(**t, dt=step, dt_softplus=False)
    t = ssd_tensors(length=5) | t | {"dt": torch.log(torch.expm1(step)), "dt_bias": None}
    torch.testing.assert_close(reference.ssd_scan(**t, dt_limit=(0.1, 0.3)), clamped)
    assert not torch.allclose(reference.ssd_scan(**t, dt_limit=(0.0, 0.2)), clamped)


def test_causal_conv1d_is_the_padded_convolution_of_pytorch() -> None:
    t = conv_tensors(length=9, without=("initial_state",))
    expected = F.conv1d(F.pad(t["x"].transpose(1, 2), (3, 0)), t["weight"][:, None], t["bias"], groups=20)
    torch.testing.assert_close(reference.causal_conv1d(**t), F.silu(expected).transpose(1, 2))
    torch.testing.assert_close(reference.causal_conv1d(**t, activation=None), expected.transpose(1, 2))


def test_packed_documents_are_what_they_are_alone() -> None:
    for function, make in OPERATIONS:
        t = make(batch=1, length=10)
        y, state = function(**t, seq_idx=PACKED, return_final_state=True)
        alone = t | {"initial_state": torch.zeros_like(t["initial_state"])}
        first = function(**cut(t, FIRST))
        second = function(**cut(alone, SECOND))
        third, last = function(**cut(alone, THIRD), return_final_state=True)
        torch.testing.assert_close(y[:, FIRST], first)
        torch.testing.assert_close(y[:, SECOND], second)
        torch.testing.assert_close(y[:, THIRD], third)
        torch.testing.assert_close(state, last)
        assert not y[PACKED == -1].any()


def test_padding_is_not_looked_at() -> None:
    for function, make in OPERATIONS:
        t = make(batch=1, length=10)
        leaves = {name: tensor.requires_grad_() for name, tensor in t.items()}
        clean = function(**leaves, seq_idx=PACKED)
        gradient = torch.autograd.grad(clean.square().sum(), leaves["x"])[0]
        assert not gradient[PACKED == -1].any()
        with torch.no_grad():
            for name in ("x", "dt", "B", "C", "z"):
                if name in t:
                    t[name][PACKED == -1] = torch.nan
        assert torch.equal(function(**t, seq_idx=PACKED), clean)


def test_step_forms_are_the_scan_token_by_token() -> None:
    t = scan_tensors(length=5)
    y, last = reference.selective_scan(**t, return_final_state=True)
    state = t["initial_state"].clone()
    for i in range(5):
        token = (
            t["x"][:, i],
            t["dt"][:, i],
            t["A"],
            t["B"][:, i],
            t["C"][:, i],
            state,
            t["D"],
            t["z"][:, i],
            t["dt_bias"],
        )
        torch.testing.assert_close(reference.selective_scan_step(*token), y[:, i])
    torch.testing.assert_close(state, last)

    t = ssd_tensors(length=5)
    y, last = reference.ssd_scan(**t, dt_limit=(0.0, 0.5), return_final_state=True)
    state = t["initial_state"].clone()
    for i in range(5):
        token = (t["x"][:, i], t["dt"][:, i], t["A"], t["B"][:, i], t["C"][:, i], state, t["D"], t["dt_bias"])
        torch.testing.assert_close(reference.ssd_step(*token, dt_limit=(0.0, 0.5)), y[:, i])
    torch.testing.assert_close(state, last)

    t = conv_tensors(length=5)
    y, last = reference.causal_conv1d(**t, return_final_state=True)
    state = t["initial_state"].clone()
    for i in range(5):
        torch.testing.assert_close(reference.causal_conv1d_step(t["x"][:, i], state, t["weight"], t["bias"]), y[:, i])
    torch.testing.assert_close(state, last)


def test_norms_follow_their_formulas() -> None:
    y, z, weight = draw(2, 3, 8), draw(2, 3, 8), draw(8)
    torch.testing.assert_close(reference.rms_norm(y, weight, 1e-5), F.rms_norm(y, (8,), weight, 1e-5))
    grouped = F.rms_norm((y * F.silu(z)).view(2, 3, 2, 4), (4,), None, 1e-5).flatten(2) * weight
    torch.testing.assert_close(reference.gated_rms_norm(y, z, weight, 1e-5, group_size=4), grouped)
    before = F.rms_norm(y, (8,), weight, 1e-5) * F.silu(z)
    torch.testing.assert_close(reference.gated_rms_norm(y, z, weight, 1e-5, norm_before_gate=True), before)


def test_norms_of_bfloat16_are_computed_in_float32() -> None:
    y, z, weight = (t.bfloat16() for t in (draw(2, 3, 64), draw(2, 3, 64), draw(64)))
    wide = reference.gated_rms_norm(y.float(), z.float(), weight.float(), 1e-5)
    assert torch.equal(reference.gated_rms_norm(y, z, weight, 1e-5), wide.bfloat16())
    assert torch.equal(
        reference.rms_norm(y, weight, 1e-5), reference.rms_norm(y.float(), weight.float(), 1e-5).bfloat16()
    )


def test_starts_compare_with_the_last_real_token() -> None:
    starts, padding = starts_and_padding(torch.tensor([[-1, 4, -1, 4, 5, -1, 4]]), 1, 7, torch.device("cpu"))
    assert starts.tolist() == [[False, False, False, False, True, False, True]]
    assert padding.tolist() == [[True, False, True, False, False, True, False]]
