"""The CUDA C++ convolution against the float64 reference: compiled for a CPU everywhere, as it is on a GPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from comparison import DOCUMENTS, EXACT, ROUNDED, assert_equals_reference, conv_tensors, seq_idx_of
from cuda_on_cpu import Compiler
from torch import Tensor

from ssm_tune.kernels import cuda_conv
from ssm_tune.kernels.backends import Unsupported

BFLOAT16 = 2e-2
# In test_documents_of_any_length: a row of 300 tokens has three blocks of tokens, and nine and a half warps.
LONG = 300


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return Compiler(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def on_cpu(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_conv, "compiled", compiler)


def check(tensors: dict[str, Tensor | None], dtype: torch.dtype, tolerance: float, **settings: Any) -> None:
    assert_equals_reference("causal_conv1d", cuda_conv.causal_conv1d, tensors, dtype, tolerance, **settings)


def random_documents(length: int, seed: int = 0) -> Tensor:
    """Two rows of documents of one to some 40 tokens, with padding within and between them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(2, 2, length, generator=generator)
    documents = (drawn[0] < torch.tensor([[0.3], [0.03]])).cumsum(1)
    return documents.masked_fill(drawn[1] < torch.tensor([[0.1], [0.4]]), -1).int()


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("activation", ["silu", None])
def test_documents_on_a_cpu(on_cpu: None, documents: str, activation: str | None) -> None:
    check(conv_tensors(), torch.float32, EXACT, activation=activation, seq_idx=seq_idx_of(documents))


@pytest.mark.parametrize("without", [(), ("initial_state",)])
def test_documents_of_any_length_on_a_cpu(on_cpu: None, without: tuple[str, ...]) -> None:
    tensors = conv_tensors(length=LONG, dim=4, without=without)
    check(tensors, torch.float32, EXACT, seq_idx=random_documents(LONG))
    check(tensors, torch.float32, EXACT)


@pytest.mark.parametrize("without", [("bias",), ("initial_state",), ("bias", "initial_state")])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_widths_on_a_cpu(on_cpu: None, width: int, without: tuple[str, ...]) -> None:
    seq_idx = seq_idx_of("padding on both sides and between")
    check(conv_tensors(width=width, without=without), torch.float32, EXACT, seq_idx=seq_idx)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 32, 33, 128, 129])
def test_lengths_on_a_cpu(on_cpu: None, length: int) -> None:
    check(conv_tensors(length=length, dim=4), torch.float32, EXACT)


def test_channels_of_two_blocks_on_a_cpu(on_cpu: None) -> None:
    check(conv_tensors(length=9, dim=132), torch.float32, EXACT)


def test_parts_of_tensors_on_a_cpu(on_cpu: None) -> None:
    def of_a_projection(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor], dim=-1)[..., tensor.shape[-1] :] if tensor.dim() == 3 else tensor

    def lose_contiguity(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    for view in (of_a_projection, lose_contiguity):
        check(conv_tensors(length=9), torch.float32, EXACT, view=view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_on_a_cpu(on_cpu: None, dtype: torch.dtype) -> None:
    check(conv_tensors(), dtype, ROUNDED, seq_idx=seq_idx_of("start in the middle"))
    check(conv_tensors(), dtype, ROUNDED, wide=("weight", "bias"))


def test_frozen_weights_get_no_gradient(on_cpu: None) -> None:
    tensors = {name: t.float() for name, t in conv_tensors(without=("initial_state",)).items() if t is not None}
    found = []
    for names in (("x",), ("x", "weight", "bias")):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in tensors.items()}
        y = cuda_conv.causal_conv1d(**leaves)
        found.append(torch.autograd.grad(y.sin().sum(), [leaves[name] for name in names]))
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("start", range(1, 9))
def test_nothing_leaks(on_cpu: None, start: int) -> None:
    """Whatever one document or padding holds, another's outputs and gradients are the same to the bit."""
    tensors = conv_tensors(batch=1, length=40, dim=4, without=("initial_state",))
    clean = {name: t.float() for name, t in tensors.items() if t is not None}
    seq_idx = torch.tensor([[0] * start + [1] * 3 + [-1] + [1] * (36 - start)], dtype=torch.int32)
    spoilt = clean | {"x": clean["x"].clone()}
    spoilt["x"][:, [0, start - 1, start + 3]] = torch.nan
    found = []
    for given in (clean, spoilt):
        x = given["x"].requires_grad_()
        y = cuda_conv.causal_conv1d(x, clean["weight"], clean["bias"], seq_idx=seq_idx)
        (dx,) = torch.autograd.grad(y[:, start:].sin().sum(), x)
        assert not dx[:, :start].nan_to_num().any() and not dx[:, start + 3].any() and not y[:, start + 3].any()
        found.append((y[:, start:], dx[:, start:]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ({"dim": 6}, torch.float32, "6 channels, no multiple of 4"),
        ({"width": 5}, torch.float32, "a width of 5"),
        ({}, torch.float64, "float64"),
        ({"length": 0}, torch.float32, r"x is \(2, 0, 20\)"),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(sizes: dict[str, int], dtype: torch.dtype, words: str) -> None:
    tensors = {name: t.to(dtype) for name, t in conv_tensors(**sizes).items() if t is not None}
    with pytest.raises(Unsupported, match=words):
        cuda_conv.causal_conv1d(**tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents_on_a_gpu(documents: str, dtype: torch.dtype) -> None:
    tolerance = EXACT if dtype == torch.float32 else BFLOAT16
    check(conv_tensors(dim=64), dtype, tolerance, seq_idx=seq_idx_of(documents), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("without", [(), ("bias",), ("initial_state",)])
def test_documents_of_any_length_on_a_gpu(width: int, without: tuple[str, ...]) -> None:
    tensors = conv_tensors(length=2049, dim=132, width=width, without=without)
    for seq_idx in (None, random_documents(2049), random_documents(2049, seed=1)):
        check(tensors, torch.float32, EXACT, seq_idx=seq_idx, device="cuda")
