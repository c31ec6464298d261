"""The CUDA C++ selective scan against the float64 reference: compiled for a CPU everywhere, as it is on a GPU."""

from __future__ import annotations

import shutil
from types import ModuleType
from typing import Any

import pytest
import torch
from comparison import DOCUMENTS, ROUNDED, assert_equals_reference, scan_tensors, seq_idx_of
from cuda_on_cpu import Compiler
from torch import Tensor

from ssm_tune.kernels import cuda_scan, recompute, runtime_compile
from ssm_tune.kernels.backends import Unsupported

WIDE = ("A", "D", "dt_bias", "initial_state")
EXACT, BFLOAT16 = 2e-5, 2e-2
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return Compiler(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def on_cpu(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(cuda_scan, "compiled", compiler)
    return cuda_scan


def check(tensors: dict[str, Tensor | None], dtype: torch.dtype, tolerance: float, **settings: Any) -> None:
    settings = {"wide": WIDE} | settings
    assert_equals_reference("selective_scan", cuda_scan.selective_scan, tensors, dtype, tolerance, **settings)


def of_a_projection(tensor: Tensor) -> Tensor:
    """The same numbers, the second part of a wider projection: channels side by side, tokens apart."""
    return torch.cat([tensor, tensor], dim=-1)[..., tensor.shape[-1] :] if tensor.dim() == 3 else tensor


def lose_contiguity(tensor: Tensor) -> Tensor:
    """The same numbers, every second channel of a wider tensor."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def long_documents(length: int) -> Tensor:
    """Documents of 90 tokens, padding at the end."""
    seq_idx = torch.arange(length).div(90, rounding_mode="floor").int().expand(2, -1).contiguous()
    if length > 90:
        seq_idx[:, -5:] = -1
    return seq_idx


def steps_without_softplus() -> dict[str, Tensor | None]:
    tensors = scan_tensors(length=20, dim=4, state=4, without=("z", "D", "dt_bias", "initial_state"))
    return tensors | {"dt": tensors["dt"].abs() * 0.1}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_on_a_cpu(on_cpu: ModuleType, documents: str) -> None:
    check(scan_tensors(dim=36), torch.float32, EXACT, seq_idx=seq_idx_of(documents))


@pytest.mark.parametrize("length", [1, 16, 128, 275])
def test_lengths_on_a_cpu(on_cpu: ModuleType, length: int) -> None:
    """One token, a tile, a chunk, and pieces of chunks."""
    check(scan_tensors(length=length, dim=4), torch.float32, EXACT, seq_idx=long_documents(length))


@pytest.mark.parametrize("view", [of_a_projection, lose_contiguity])
def test_parts_of_tensors_on_a_cpu(on_cpu: ModuleType, view: Any) -> None:
    check(scan_tensors(length=20), torch.float32, EXACT, view=view)


def test_nothing_optional_on_a_cpu(on_cpu: ModuleType) -> None:
    check(steps_without_softplus(), torch.float32, EXACT, dt_softplus=False)


def test_bfloat16_on_a_cpu(on_cpu: ModuleType) -> None:
    check(scan_tensors(dim=36), torch.bfloat16, ROUNDED, seq_idx=seq_idx_of("start in the middle"))


@pytest.mark.parametrize("state", [4, 8, 32])
def test_states_on_a_cpu(on_cpu: ModuleType, state: int) -> None:
    check(scan_tensors(length=35, dim=40, state=state), torch.float32, EXACT)


@pytest.mark.parametrize("start", [2, 3, 4])
def test_nothing_leaks(on_cpu: ModuleType, start: int) -> None:
    """Whatever one document or padding holds, another's outputs and gradients are the same to the bit.

    Sums over channels are made for two tokens at once: a start at the first and at the second of two.
    """
    tensors = {name: t.float() for name, t in scan_tensors(batch=1, length=9, dim=4).items()}
    seq_idx = torch.tensor([[0] * start + [1] * 3 + [-1] + [1] * (5 - start)], dtype=torch.int32)
    spoilt = {name: t.clone() for name, t in tensors.items()}
    spoilt["x"][:, 1] = torch.nan
    for name in ("x", "dt", "B", "C", "z"):
        spoilt[name][:, start + 3] = torch.nan
    found = []
    for given in (tensors, spoilt):
        leaves = {name: given[name].requires_grad_() for name in tensors}
        y = on_cpu.selective_scan(**leaves, seq_idx=seq_idx)
        tokens = [leaves[name] for name in ("x", "dt", "B", "C", "z")]
        gradients = torch.autograd.grad(y[:, start:].sin().sum(), tokens)
        found.append([y, *gradients])
        assert not gradients[0][:, :start].any()
        assert not any(gradient[:, start + 3].any() for gradient in gradients)
    assert found[1][0][:, 1:start].isnan().all()
    for clean, beside_nan in zip(*found, strict=True):
        assert torch.equal(clean[:, start:], beside_nan[:, start:])


def test_inputs_of_several_dtypes(on_cpu: ModuleType) -> None:
    tensors = {name: t.float() for name, t in scan_tensors(length=5).items()}
    rounded = {name: t.bfloat16().float() if name == "x" else t for name, t in tensors.items()}
    y = on_cpu.selective_scan(**tensors | {"x": tensors["x"].bfloat16()})
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, on_cpu.selective_scan(**rounded).bfloat16())


@pytest.mark.parametrize("length", [20, 275])
def test_outputs_are_recomputed_to_the_bit(on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    tensors = {name: t.float() for name, t in scan_tensors(length=length, dim=4).items()}
    found = []
    for like in ("x", None):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        with recompute.recomputed(leaves["x"] if like else torch.empty(0, device="meta")):
            y = on_cpu.selective_scan(**leaves, seq_idx=long_documents(length))
            loss = (y * y).sum()
            assert like is None or recompute._current().find(y) is not None, "no note of the output"
            del y
        found.append(torch.autograd.grad(loss, list(leaves.values())))
    for name, again, once in zip(tensors, *found, strict=True):
        assert torch.equal(once, again), name


@pytest.mark.parametrize("length", [1, 20, 275])
def test_backward_gives_the_outputs_again(on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """To who expects them; the forward pass does not run a second time."""
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    leaves = {name: t.float().requires_grad_() for name, t in scan_tensors(length=length, dim=36).items()}
    with recompute.recomputed(leaves["x"]):
        y = on_cpu.selective_scan(**leaves, seq_idx=long_documents(length))
        again = recompute.reference_to(y)
    monkeypatch.setattr(on_cpu, "_outputs_again", None)
    again.expect()
    y.sin().sum().backward()
    assert not torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(again(), y.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [False, True], ids=["nobody else's", "somebody else's"])
@pytest.mark.parametrize("length", [20, 275])
def test_the_gradient_of_dt_goes_over_a_dt_that_nobody_else_has(
    on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int, known: bool
) -> None:
    monkeypatch.setattr(recompute, "DEVICES", ("cpu",))
    leaves = {name: t.float().requires_grad_() for name, t in scan_tensors(length=length, dim=36).items()}
    documents, alone = long_documents(length), recompute.is_ours_alone
    made: list[Tensor] = []

    def dt_again() -> list[Tensor]:
        made.append(leaves["dt"].detach() * 2)
        return [made[-1] if known else made.pop()]

    with recompute.recomputed(leaves["x"]):
        dt = leaves["dt"] * 2
        recompute.recomputable([dt], dt_again)
        y = on_cpu.selective_scan(**leaves | {"dt": dt}, seq_idx=documents)
        again = recompute.reference_to(y)
    again.expect()
    doubled = leaves | {"dt": dt.detach().requires_grad_()}
    loss = on_cpu.selective_scan(**doubled, seq_idx=documents).sin().sum()
    wanted = torch.autograd.grad(loss, list(doubled.values()))
    over: list[bool] = []
    monkeypatch.setattr(on_cpu, "is_ours_alone", lambda tensor: over.append(alone(tensor)) or over[-1])
    found = torch.autograd.grad(y.sin().sum(), list(leaves.values()))
    assert over == [not known]
    if known:
        assert torch.equal(made[0], dt)
    for name, one, other in zip(leaves, found, wanted, strict=True):
        assert torch.equal(one, other * 2 if name == "dt" else other), name


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ({"dim": 6}, torch.float32, "6 channels, no multiple of 4"),
        ({"state": 5}, torch.float32, "5 states"),
        ({}, torch.float64, "float64"),
        ({"length": 0}, torch.float32, r"x is \(2, 0, 20\)"),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(sizes: dict[str, int], dtype: torch.dtype, words: str) -> None:
    tensors = {name: t.to(dtype) for name, t in scan_tensors(**sizes).items()}
    with pytest.raises(Unsupported, match=words):
        cuda_scan.selective_scan(**tensors)


def test_a_cpu_has_no_kernel() -> None:
    with pytest.raises(RuntimeError, match="compiled for NVIDIA's GPUs, not for cpu"):
        runtime_compile.compiled("scan_forward", (), {}, torch.device("cpu"), 128, 0)


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_on_a_gpu(documents: str, dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    check(scan_tensors(dim=64), dtype, tolerance, seq_idx=seq_idx_of(documents), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("without", [(), ("initial_state",), ("z",), ("D", "z", "dt_bias", "initial_state")])
@pytest.mark.parametrize("length", [1, 67, 2049])
def test_lengths_on_a_gpu(length: int, without: tuple[str, ...]) -> None:
    tensors = scan_tensors(length=length, dim=36, without=without)
    check(tensors, torch.float32, EXACT, seq_idx=long_documents(length), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "state"), [(4, 4), (36, 8), (128, 16), (132, 32)])
def test_sizes_on_a_gpu(dim: int, state: int, dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    check(scan_tensors(batch=1, length=19, dim=dim, state=state), dtype, tolerance, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("view", [of_a_projection, lose_contiguity])
def test_parts_of_tensors_on_a_gpu(view: Any) -> None:
    check(scan_tensors(), torch.float32, EXACT, view=view, device="cuda")
    check(steps_without_softplus(), torch.float32, EXACT, view=view, device="cuda", dt_softplus=False)


@pytest.mark.gpu
def test_a_captured_scan_computes_what_comes_later() -> None:
    """In a CUDA graph, forward and backward, with other numbers and other documents than it was captured with."""
    tensors = {name: t.float().cuda().requires_grad_() for name, t in scan_tensors(dim=64).items()}
    seq_idx = seq_idx_of("start in the middle").cuda()

    def both() -> list[Tensor]:
        y = cuda_scan.selective_scan(**tensors, seq_idx=seq_idx.clone())  # a tensor not known yet
        return [y, *torch.autograd.grad(y.square().sum(), list(tensors.values()))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.mul_(0.5)
        seq_idx.copy_(seq_idx_of("padding on both sides and between"))
    graph.replay()
    for found, expected in zip(captured, both(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 100e9, reason="needs 100 GB"
)
@pytest.mark.gpu
def test_beyond_32_bit_offsets_on_a_gpu() -> None:
    """The last document of a row of more than 2^31 numbers is what it is alone, forward and backward."""
    dim, tail = 8192, 1000
    length = 2**31 // dim + 3 * tail
    A = -torch.rand(dim, 4, device="cuda") - 0.1
    tokens = {name: torch.randn(1, length, dim, device="cuda", dtype=torch.bfloat16) * 0.5 for name in ("x", "dt")}
    tokens |= {name: torch.randn(1, length, 4, device="cuda", dtype=torch.bfloat16) for name in ("B", "C")}
    seq_idx = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    seq_idx[:, -tail:] = 1
    alone = {name: t[:, -tail:].clone() for name, t in tokens.items()}
    tokens["x"].requires_grad_()
    alone["x"].requires_grad_()
    y = cuda_scan.selective_scan(**tokens, A=A, seq_idx=seq_idx)
    expected = cuda_scan.selective_scan(**alone, A=A)
    torch.testing.assert_close(y[:, -tail:], expected, rtol=BFLOAT16, atol=BFLOAT16)
    slope = torch.randn_like(expected)
    gradient = torch.autograd.grad(y[:, -tail:], tokens["x"], slope)[0]
    truth = torch.autograd.grad(expected, alone["x"], slope)[0]
    torch.testing.assert_close(gradient[:, -tail:], truth, rtol=5e-2, atol=5e-2)
    assert not gradient[:, :-tail].any()
