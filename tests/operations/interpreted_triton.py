"""Our Triton kernels in Triton's interpreter against the float64 reference, as JSON: what each case's error was.

Run as a process of its own by `test_triton_kernels.py`: the interpreter is chosen when a kernel is imported. It spends
about a tenth of a second on every token, so that rows are short and pieces shorter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from comparison import (
    ROUNDED,
    assert_equals_reference,
    assert_rounds_as_pytorch,
    conv_tensors,
    gated_norm_tensors,
    norm_tensors,
    residual_norm,
    scan_tensors,
    without_state,
)
from torch import Tensor

from ssm_tune.kernels import (
    gradient_halves,
    part_sums,
    part_sums_triton,
    recompute,
    reference,
    residual_norm_triton,
    triton_conv,
    triton_gated_norm,
    triton_scan,
)

WIDE = ("A", "D", "dt_bias", "initial_state")
# Two documents, padding at both ends, between and inside them; numbers that return.
DOCUMENTS = torch.tensor([[-1, 0, 0, -1, 0, 1, 1, -1, -1, 1, 0, 0, -1], [3] * 12 + [4]], dtype=torch.int32)
PIECES = triton_scan.Arrangement(group=2, piece=8, segment=8)
SPREAD = triton_scan.Arrangement(group=4, piece=8, segment=8, spread=True)


def lose_contiguity(tensor: Tensor) -> Tensor:
    """The same numbers, every second channel of a wider tensor."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def of_a_projection(tensor: Tensor) -> Tensor:
    """The same numbers, the first half of a wider projection: channels side by side, tokens apart."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def scan(
    tensors: dict[str, Tensor | None],
    forward: triton_scan.Arrangement = triton_scan.FORWARD,
    backward: triton_scan.Arrangement = triton_scan.BACKWARD,
    **settings: Any,
) -> None:
    before = triton_scan.FORWARD, triton_scan.BACKWARD
    triton_scan.FORWARD, triton_scan.BACKWARD = forward, backward
    try:
        assert_equals_reference("selective_scan", triton_scan.selective_scan, tensors, **settings)
    finally:
        triton_scan.FORWARD, triton_scan.BACKWARD = before


def conv(tensors: dict[str, Tensor | None], **settings: Any) -> None:
    assert_equals_reference("causal_conv1d", triton_conv.causal_conv1d, tensors, **settings)


def conv_into_a_half() -> None:
    """The gradient by the first half of a tensor, written beside that by the second, is the same to the bit."""
    gradient_halves.DEVICES = ("cpu",)
    weight, wide = torch.randn(5, 4), torch.randn(2, 13, 10, requires_grad=True)
    found = []
    for split in (gradient_halves.split_in_two, lambda t: t.chunk(2, dim=-1)):
        both = [triton_conv.causal_conv1d(half, weight, seq_idx=DOCUMENTS) for half in split(wide * 1)]
        halves = [y.grad_fn.gradient_of_x(y) for y in both]
        assert [half.stride(1) for half in halves] == ([10, 10] if not found else [5, 5])
        found.append(torch.autograd.grad(both[0].sin().sum() + both[1].square().sum(), wide)[0])
    assert torch.equal(*found)


def norm(tensors: dict[str, Tensor | None], given: dict[str, Any] | None = None, **settings: Any) -> None:
    function = residual_norm(residual_norm_triton.residual_rms_norm, **(given or {}))
    assert_equals_reference("residual_rms_norm", function, tensors, **{"tolerance": 1e-6} | settings)


def gated_norm(tensors: dict[str, Tensor | None], **settings: Any) -> None:
    """The norm after the gate, and before it."""
    for norm_before_gate in (False, True):
        given = {"tolerance": 1e-6, "eps": 1e-5, "norm_before_gate": norm_before_gate} | settings
        assert_equals_reference("gated_rms_norm", without_state(triton_gated_norm.gated_rms_norm), tensors, **given)


def gated_norm_into_a_wider_tensor() -> None:
    """The gradient of z goes where it is told, between other numbers that stay; a frozen weight gets none."""
    y, z, weight = (t.float() for t in gated_norm_tensors(length=5, dim=24).values())
    out, scales = triton_gated_norm.normalise(y, z, weight, 1e-5, 12, False)
    wide = torch.full((*z.shape[:2], 40), 7.0)
    given = (torch.ones_like(out), y, z, weight, scales)
    again = torch.full_like(out, 7.0)
    into = {"need_weight": False, "out": again}
    dy, dweight = triton_gated_norm.normalise_backward(*given, wide[..., 8:32], 12, False, **into)
    torch.testing.assert_close(again, out)
    leaves = [t.requires_grad_() for t in (y, z)]
    truth = torch.autograd.grad(reference.gated_rms_norm(*leaves, weight, 1e-5, 12).sum(), leaves)
    torch.testing.assert_close([dy, wide[..., 8:32]], list(truth))
    assert dweight is None
    assert (wide[..., :8] == 7).all() and (wide[..., 32:] == 7).all()


def norm_with_one_reader() -> None:
    """The norm alone is read, or the sum alone; the weight is frozen, or nothing else is trained."""
    tensors = {name: t.float() for name, t in norm_tensors(batch=1, length=3, dim=5).items()}
    for trained in (("stream", "x", "weight"), ("stream", "x"), ("weight",)):
        for read in (0, 1):
            found = []
            for function in (residual_norm_triton.residual_rms_norm, reference.residual_rms_norm):
                leaves = {name: t.clone().requires_grad_(name in trained) for name, t in tensors.items()}
                output = function(**leaves, eps=1e-5)[read]
                if output.requires_grad:
                    output.square().sum().backward()
                found.append([leaves[name].grad for name in tensors])
            for ours, theirs in zip(*found, strict=True):
                assert ours is None or theirs is not None, "a gradient that does not exist"
                torch.testing.assert_close(torch.zeros(1) if ours is None else ours, _or_zero(theirs))


def norm_of_the_rounded_sum() -> None:
    """What is normed is what goes on, not the sum before it is rounded."""
    stream, x, weight = (t.bfloat16() for t in norm_tensors(batch=1, length=9).values())
    y, total = residual_norm_triton.residual_rms_norm(stream, x, weight, 1e-5, torch.float32)
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(y, reference.rms_norm(total.float(), weight, 1e-5), rtol=1e-5, atol=1e-6)


def _or_zero(tensor: Tensor | None) -> Tensor:
    return torch.zeros(1) if tensor is None else tensor


def steps_without_softplus() -> dict[str, Tensor | None]:
    tensors = scan_tensors(batch=1, length=3, dim=3, state=3, without=("z", "D"))
    return tensors | {name: tensors[name].abs() * 0.1 for name in ("dt", "dt_bias")}


def nothing_leaks() -> None:
    """Whatever one document or padding holds, another's outputs and gradients are the same to the bit."""
    tensors = {name: t.float() for name, t in scan_tensors(batch=1, length=9, dim=2, state=2).items()}
    seq_idx = torch.tensor([[0, 0, 0, -1, 1, 1, -1, 1, 1]], dtype=torch.int32)
    clean = triton_scan.selective_scan(**tensors, seq_idx=seq_idx)
    tensors["x"][:, 1] = torch.nan
    for name in ("x", "dt", "B", "C", "z"):
        tensors[name][:, [3, 6]] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    y = triton_scan.selective_scan(**leaves, seq_idx=seq_idx)
    assert torch.equal(y[:, 4:], clean[:, 4:]), "outputs"
    assert y[:, 1:3].isnan().all(), "a nan is hidden"
    for name in ("x", "dt", "B", "C", "z"):
        gradient = torch.autograd.grad(y[:, 4:].sum(), leaves[name], retain_graph=True)[0]
        assert gradient[:, 4:].isfinite().all() and not gradient[:, 6].any(), name
        assert name != "x" or not gradient[:, :4].any()
    weight = torch.randn(2, 4)
    x = torch.randn(1, 9, 2)
    clean = triton_conv.causal_conv1d(x, weight, seq_idx=seq_idx)
    x[:, [3, 6]] = torch.nan
    found = triton_conv.causal_conv1d(x.requires_grad_(), weight, seq_idx=seq_idx)
    gradient = torch.autograd.grad(found[:, 4:].sum(), x)[0]
    assert torch.equal(found, clean) and gradient.isfinite().all() and not gradient[:, :4].any(), "conv"


def recomputed_outputs() -> None:
    """Within a scope of recomputation whoever saves the output gets it again, equal to the bit."""
    recompute.DEVICES = ("cpu",)
    tensors = {name: t.float() for name, t in scan_tensors(length=13, dim=3, state=2).items()}
    found = []
    for inside in (False, True):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        before = triton_scan.FORWARD, triton_scan.BACKWARD
        triton_scan.FORWARD, triton_scan.BACKWARD = PIECES, SPREAD
        kept: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(t), t)[1], lambda t: t)
        try:
            with recompute.recomputed(leaves["x"]) if inside else hooks:
                y = triton_scan.selective_scan(**leaves, seq_idx=DOCUMENTS)
                loss = (y * y).sum()
                address = y.data_ptr()
                if inside:
                    assert recompute._current().find(y) is not None, "no note of the output"
                else:
                    assert address in {t.data_ptr() for t in kept}
                del y
            found.append(torch.autograd.grad(loss, list(leaves.values())))
        finally:
            triton_scan.FORWARD, triton_scan.BACKWARD = before
    for name, once, again in zip(tensors, *found, strict=True):
        assert torch.equal(once, again), name


def sums_over_parts() -> None:
    """More than one launch takes, of more parts than a program has at once, several matrices, a rounded result; by
    programs of few columns and of many."""
    shapes = ((1, 1), (300, 5), (3, 7, 40), (2, 16), (129, 33), (4, 3))
    parts = [torch.randn(shape) for shape in shapes]
    dtypes = [torch.float32] * 5 + [torch.float16]
    for part_sums_triton._WIDEST_NARROW in (40, 39):
        with part_sums.added_together():
            found = [part_sums.add_up(each, dtype) for each, dtype in zip(parts, dtypes, strict=True)]
        for each, total, dtype in zip(parts, found, dtypes, strict=True):
            assert total.dtype == dtype
            torch.testing.assert_close(total, each.double().sum(-2).to(dtype), rtol=1e-5, atol=1e-5)


CASES: dict[str, Callable[[], None]] = {
    "scan: documents": lambda: scan(scan_tensors(length=13, dim=5, state=3), seq_idx=DOCUMENTS),
    "scan: pieces": lambda: scan(scan_tensors(length=13, dim=34, state=4), PIECES, SPREAD, seq_idx=DOCUMENTS),
    "scan: pieces, no documents": lambda: scan(scan_tensors(batch=1, length=16, dim=3, state=2), SPREAD, PIECES),
    "scan: one token": lambda: scan(scan_tensors(length=1, dim=3, state=1)),
    "scan: nothing optional": lambda: scan(
        scan_tensors(batch=1, length=9, dim=3, state=16, without=("D", "z", "dt_bias", "initial_state"))
    ),
    "scan: without softplus": lambda: scan(steps_without_softplus(), dt_softplus=False),
    "scan: not contiguous": lambda: scan(scan_tensors(batch=1, length=3, dim=4, state=2), view=lose_contiguity),
    "scan: part of a projection": lambda: scan(scan_tensors(batch=1, length=3, dim=4, state=2), view=of_a_projection),
    "scan: bfloat16": lambda: scan(
        scan_tensors(length=9, dim=4, state=4), dtype=torch.bfloat16, tolerance=ROUNDED, wide=WIDE
    ),
    "conv: documents": lambda: conv(conv_tensors(length=13, dim=5), seq_idx=DOCUMENTS),
    "conv: no documents": lambda: conv(conv_tensors(batch=1, length=5, dim=130), activation=None),
    "conv: one token": lambda: conv(conv_tensors(length=1, dim=3, width=3)),
    "conv: width 2": lambda: conv(conv_tensors(length=5, dim=3, width=2, without=("bias", "initial_state"))),
    "conv: not contiguous": lambda: conv(conv_tensors(length=5, dim=3), view=lose_contiguity),
    "conv: bfloat16": lambda: conv(conv_tensors(length=9, dim=3), dtype=torch.bfloat16, tolerance=2 * ROUNDED),
    "conv: into a half": conv_into_a_half,
    "norm: many tokens": lambda: norm(norm_tensors()),
    "norm: one token": lambda: norm(norm_tensors(batch=1, length=1, dim=1027)),
    "norm: one channel": lambda: norm(norm_tensors(length=2, dim=1)),
    "norm: nothing added": lambda: norm(norm_tensors(length=5, without=("x",))),
    "norm: not contiguous": lambda: norm(norm_tensors(length=5), view=lose_contiguity),
    "norm: part of a projection": lambda: norm(norm_tensors(length=5), view=of_a_projection),
    "norm: nothing added to a part": lambda: norm(norm_tensors(length=5, without=("x",)), view=of_a_projection),
    "norm: bfloat16": lambda: norm(norm_tensors(length=9), dtype=torch.bfloat16, tolerance=ROUNDED),
    "norm: bfloat16 from a float32 stream": lambda: norm(
        norm_tensors(length=9),
        {"dtype": torch.bfloat16},
        dtype=torch.bfloat16,
        wide=("stream", "weight"),
        tolerance=ROUNDED,
    ),
    "norm: one reader": norm_with_one_reader,
    "norm: of the rounded sum": norm_of_the_rounded_sum,
    # The interpreter cuts what it makes bfloat16 off instead of rounding it.
    "norm: rounded as PyTorch's": lambda: assert_rounds_as_pytorch(residual_norm_triton.residual_rms_norm, slack=2.1),
    "gated norm: many tokens": lambda: gated_norm(gated_norm_tensors(length=9)),
    "gated norm: groups": lambda: gated_norm(gated_norm_tensors(length=3, dim=48), group_size=12),
    "gated norm: one token": lambda: gated_norm(gated_norm_tensors(batch=1, length=1, dim=1027)),
    # Whose norm hardly changes with it: its gradient is what is left of a difference.
    "gated norm: one channel": lambda: gated_norm(gated_norm_tensors(length=2, dim=1), tolerance=1e-2),
    "gated norm: not contiguous": lambda: gated_norm(gated_norm_tensors(length=3), view=lose_contiguity),
    "gated norm: part of a projection": lambda: gated_norm(
        gated_norm_tensors(length=3, dim=24), view=of_a_projection, group_size=8
    ),
    "gated norm: bfloat16": lambda: gated_norm(
        gated_norm_tensors(length=3, dim=40), dtype=torch.bfloat16, tolerance=ROUNDED
    ),
    "gated norm: float16, a float32 weight": lambda: gated_norm(
        gated_norm_tensors(length=3, dim=40), dtype=torch.float16, wide=("weight",), tolerance=ROUNDED / 4
    ),
    "gated norm: into a wider tensor": gated_norm_into_a_wider_tensor,
    "nothing leaks": nothing_leaks,
    "recomputed outputs": recomputed_outputs,
    "sums over parts": sums_over_parts,
}


def main() -> None:
    part_sums.DEVICES = ("cpu",)
    found = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        try:
            case()
            found[name] = ""
        except Exception as error:  # noqa: BLE001  reported by the test of that name
            found[name] = f"{type(error).__name__}: {error}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
