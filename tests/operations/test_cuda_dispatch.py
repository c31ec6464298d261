"""Which kernels for a GPU serve; what is done around convolutions, steps and norms: on a CPU, with stand-ins for them.

What is done around scans: `test_cuda_dispatch_scans.py`.
"""

from __future__ import annotations

import logging
import sys

import pytest
import stand_ins
import torch
from comparison import DOCUMENTS, assert_equals_reference, conv_tensors, draw, scan_tensors, seq_idx_of, ssd_tensors
from stand_ins import OURS, ours

from ssm_tune import kernels
from ssm_tune.kernels import documents
from ssm_tune.kernels.backends import Unsupported

pytestmark = pytest.mark.usefixtures("stand_in_packages")


def test_tensors_of_a_cpu_never_reach_a_kernel_for_cuda() -> None:
    scan = {name: t.float() for name, t in scan_tensors(length=3).items()}
    ssd = {name: t.float() for name, t in ssd_tensors(length=3).items()}
    conv = {name: t.float() for name, t in conv_tensors(length=3).items()}
    kernels.selective_scan(**scan)
    kernels.ssd_scan(**ssd)
    kernels.causal_conv1d(**conv)
    kernels.rms_norm(conv["x"], conv["bias"], 1e-5)
    kernels.gated_rms_norm(conv["x"], conv["x"], conv["bias"], 1e-5)
    kernels.causal_conv1d_step(conv["x"][:, 0], conv["initial_state"], conv["weight"])
    kernels.kernel_report("cpu")
    assert stand_ins.CALLS == []
    assert not any(f"ssm_tune.kernels.{name}" in sys.modules for name in OURS)


def test_their_operations_are_served_by_them_on_their_device(as_if_cuda: None) -> None:
    found = {choice.operation: (choice.backend, choice.reason) for choice in kernels.kernel_report("cpu")}
    scans = ("selective_scan", "selective_scan_step", "ssd_scan", "ssd_step")
    for operation in (*scans, "rms_norm", "gated_rms_norm"):
        assert found[operation] == ("mamba_ssm", "")
    for operation in ("causal_conv1d", "causal_conv1d_step"):
        assert found[operation] == ("causal_conv1d", "")


def test_the_next_mamba_ssm_without_the_mamba_1_scan_leaves_the_rest(
    as_if_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built by its new defaults it imports, and raises at the first call."""
    interface = sys.modules["mamba_ssm.ops.selective_scan_interface"]
    monkeypatch.setattr(interface, "selective_scan_fn", stand_ins.selective_scan_not_built)
    found = {choice.operation: choice for choice in kernels.kernel_report("cpu")}
    assert found["selective_scan"].backend == "reference"
    assert "RuntimeError: selective_scan_cuda is not installed" in found["selective_scan"].reason
    assert found["selective_scan_step"].backend == found["ssd_scan"].backend == "mamba_ssm"


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (stand_ins.norm_without_groups, "output differs from the reference"),
        (stand_ins.norm_always_after_the_gate, "gated_rms_norm with norm_before_gate=True: output differs"),
        (stand_ins.norm_of_fewer_arguments, "TypeError"),
    ],
)
def test_an_old_mamba_ssm_that_drops_the_arguments_of_norms_is_not_chosen(
    as_if_cuda: None, monkeypatch: pytest.MonkeyPatch, old: object, said: str
) -> None:
    monkeypatch.setattr(sys.modules["mamba_ssm.ops.triton.layernorm_gated"], "rmsnorm_fn", old)
    found = {choice.operation: choice for choice in kernels.kernel_report("cpu")}
    assert found["gated_rms_norm"].backend == "reference"
    assert said in found["gated_rms_norm"].reason
    assert found["ssd_scan"].backend == found["rms_norm"].backend == "mamba_ssm"
    y, z, weight = draw(2, 3, 8).float(), draw(2, 3, 8).float(), draw(8).float()
    given = (y, z, weight, 1e-5, 4, True)
    torch.testing.assert_close(kernels.gated_rms_norm(*given), kernels.reference.gated_rms_norm(*given))


def test_causal_conv1d_serves_without_mamba_ssm(as_if_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    found = {choice.operation: choice for choice in kernels.kernel_report("cpu")}
    assert found["causal_conv1d"].backend == "causal_conv1d"
    assert found["ssd_scan"].reason.startswith("mamba_ssm: mamba_ssm is not installed")


def test_mamba_ssm_without_triton_is_told_by_its_own_error(as_if_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_triton(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.delitem(sys.modules, "triton.errors", raising=False)
    monkeypatch.setattr(sys.modules["mamba_ssm.ops.triton.layer_norm"], "rms_norm_fn", without_triton)
    (choice,) = kernels.kernel_report("cpu", ["rms_norm"])
    assert "mamba_ssm: does not work here: ModuleNotFoundError: No module named 'triton'" in choice.reason


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("activation", "without"), [("silu", ()), (None, ("bias",))])
def test_causal_conv1d(documents: str, activation: str | None, without: tuple[str, ...]) -> None:
    module, seq_idx = ours("causal_conv1d_cuda"), seq_idx_of(documents)
    tensors = conv_tensors(dim=24, without=without if seq_idx is None else (*without, "initial_state"))
    settings = {"activation": activation, "seq_idx": seq_idx}
    if documents == "padding on both sides and between":
        with pytest.raises(Unsupported, match="padding inside a document"):
            assert_equals_reference("causal_conv1d", module.causal_conv1d, tensors, **settings)
    else:
        assert_equals_reference("causal_conv1d", module.causal_conv1d, tensors, **settings)
        assert "causal_conv1d_fn" in stand_ins.CALLS


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_causal_conv1d_of_short_rows(length: int) -> None:
    tensors = conv_tensors(length=length, dim=8)
    assert_equals_reference("causal_conv1d", ours("causal_conv1d_cuda").causal_conv1d, tensors)


def test_causal_conv1d_of_a_part_of_a_wider_projection() -> None:
    module = ours("causal_conv1d_cuda")
    weight, wide = draw(16, 4).float(), draw(2, 9, 43).float()
    for first in (0, 3):
        part = wide[..., first : first + 16]
        torch.testing.assert_close(module.causal_conv1d(part, weight), kernels.causal_conv1d(part, weight))


def test_causal_conv1d_row_by_row_within_32_bit_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours("causal_conv1d_cuda")
    monkeypatch.setattr(module, "_LARGEST", 67 * 24 + 1)
    assert_equals_reference("causal_conv1d", module.causal_conv1d, conv_tensors(dim=24))
    assert stand_ins.CALLS == ["causal_conv1d_fn"] * 2
    monkeypatch.setattr(module, "_LARGEST", 67 * 24)
    with pytest.raises(Unsupported, match="67 tokens in a row, beyond 32-bit offsets"):
        module.causal_conv1d(**{name: t.float() for name, t in conv_tensors(dim=24).items()})


def test_causal_conv1d_refuses_what_the_kernel_cannot_do() -> None:
    module = ours("causal_conv1d_cuda")
    for change, words in (({"dim": 20}, "20 channels"), ({"dim": 8, "width": 5}, "a width of 5")):
        tensors = {name: t.float() for name, t in conv_tensors(length=3, **change).items()}
        with pytest.raises(Unsupported, match=words):
            module.causal_conv1d(**tensors)
    tensors = {name: t.float() for name, t in conv_tensors(length=67, dim=8).items()}
    with pytest.raises(Unsupported, match="documents together with an initial state"):
        module.causal_conv1d(**tensors, seq_idx=seq_idx_of("one document"))


def test_step_forms(as_if_cuda: None) -> None:
    t = {name: tensor.float() for name, tensor in scan_tensors(length=1).items()}
    token = {name: t[name][:, 0] for name in ("x", "dt", "B", "C", "z")} | {"A": t["A"]}
    for more in ({"D": t["D"], "dt_bias": t["dt_bias"]}, {}):
        check_step("selective_scan_step", token | more, t["initial_state"])
    t = {name: tensor.float() for name, tensor in ssd_tensors(length=1).items()}
    token = {name: t[name][:, 0] for name in ("x", "dt", "B", "C")} | {"A": t["A"]}
    by_channel = {"D": torch.ones(4, 6), "dt_bias": t["dt_bias"]}
    for more in ({"D": t["D"], "dt_bias": t["dt_bias"]}, by_channel, {}, {"dt_limit": (0.1, 0.2)}):
        check_step("ssd_step", token | more, t["initial_state"])
    t = {name: tensor.float() for name, tensor in conv_tensors(length=1).items()}
    for activation in ("silu", None):
        token = {"x": t["x"][:, 0], "weight": t["weight"], "bias": t["bias"], "activation": activation}
        check_step("causal_conv1d_step", token, t["initial_state"])
    assert set(stand_ins.CALLS) >= {"selective_state_update", "causal_conv1d_update"}


def check_step(operation: str, arguments: dict[str, object], state: torch.Tensor) -> None:
    found, expected = state.clone(), state.clone()
    y = getattr(kernels, operation)(**arguments, state=found)
    torch.testing.assert_close(y, getattr(kernels.reference, operation)(**arguments, state=expected))
    torch.testing.assert_close(found, expected)


def test_a_convolution_state_in_another_dtype_goes_to_the_reference(
    as_if_cuda: None, caplog: pytest.LogCaptureFixture
) -> None:
    x, state, weight = draw(2, 8).bfloat16(), draw(2, 8, 3).float(), draw(8, 4).bfloat16()
    kernels.causal_conv1d_step(x, state, weight)
    assert "tokens in torch.bfloat16 with a state in torch.float32. reference serves" in caplog.text


def test_norms(as_if_cuda: None, caplog: pytest.LogCaptureFixture) -> None:
    y, z, weight = draw(2, 3, 8).float(), draw(2, 3, 8).float(), draw(8).float()
    torch.testing.assert_close(kernels.rms_norm(y, weight, 1e-5), kernels.reference.rms_norm(y, weight, 1e-5))
    for settings in ((None, False), (4, False), (2, True)):
        expected = kernels.reference.gated_rms_norm(y, z, weight, 1e-5, *settings)
        torch.testing.assert_close(kernels.gated_rms_norm(y, z, weight, 1e-5, *settings), expected)
    assert stand_ins.CALLS[-3:] == ["rmsnorm_fn"] * 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    wide = torch.ones(1, 1, 16385)
    kernels.rms_norm(wide, torch.ones(16385), 1e-5)
    assert "a mean over 16385 channels, at most 16384" in caplog.text


def test_norms_beyond_32_bit_offsets_are_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """z is part of a wider projection: 20 numbers from one row to the next, so that 3 of 14 rows fit."""
    norms = ours("mamba_ssm_norm")
    monkeypatch.setattr(norms, "_LARGEST", 61)
    wide, weight = draw(2, 7, 20).float().requires_grad_(), draw(8).float().requires_grad_()
    for settings in ((None, False), (4, True)):
        y = draw(2, 7, 8).float().requires_grad_()
        found = norms.gated_rms_norm(y, wide[..., 3:11], weight, 1e-5, *settings)
        expected = kernels.reference.gated_rms_norm(y, wide[..., 3:11], weight, 1e-5, *settings)
        torch.testing.assert_close(found, expected)
        slope = draw(2, 7, 8).float()
        pairs = [torch.autograd.grad(result, (y, wide, weight), slope) for result in (found, expected)]
        torch.testing.assert_close(*pairs)
    assert stand_ins.CALLS == ["rmsnorm_fn"] * 10
    found = norms.rms_norm(wide[..., 3:11], weight, 1e-5)
    torch.testing.assert_close(found, kernels.reference.rms_norm(wide[..., 3:11], weight, 1e-5))
    assert stand_ins.CALLS[10:] == ["rms_norm_fn"] * 5


def test_documents_are_found_once_while_they_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    find = documents._find_documents
    monkeypatch.setattr(documents, "_find_documents", lambda seq_idx: count.append(1) or find(seq_idx))
    seq_idx = torch.tensor([[0, 0, 1, 1, -1]], dtype=torch.int32)
    first = documents.find_documents(seq_idx)
    assert documents.find_documents(seq_idx) is first
    assert len(count) == 1
    seq_idx[0, 1] = 1
    assert documents.find_documents(seq_idx).starts[1].tolist() == [1]
    assert len(count) == 2
    with torch.inference_mode():
        inner = torch.tensor([[0, 1]], dtype=torch.int32)
        assert documents.find_documents(inner).starts[1].tolist() == [1]


def test_what_is_found_about_documents() -> None:
    seq_idx = torch.tensor([[-1, 3, 3, 5, 3, -1], [4, -1, 4, 2, 2, 2]], dtype=torch.int32)
    found = documents.find_documents(seq_idx)
    assert found.number.tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 1, 1]]
    assert [part.tolist() for part in found.starts] == [[0, 0, 1], [3, 4, 3]]
    assert [part.tolist() for part in found.padding] == [[0, 0, 1], [0, 5, 1]]
    assert found.gaps
    assert not documents.find_documents(seq_idx[:1].clone()).gaps
    assert documents.find_documents(seq_idx[1:, 3:].clone()).is_padding is None
