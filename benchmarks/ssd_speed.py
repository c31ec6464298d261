"""Mamba-2's scan in Triton, ours beside mamba_ssm's, on one GPU at the sizes of three models: time, kernels, error.

    python benchmarks/ssd_speed.py                      # all three; half a minute, most of it tuning mamba_ssm's
    python benchmarks/ssd_speed.py --rows mamba2-1.3b --ways ours --kernels

Inputs are bfloat16; x, B and C are parts of one tensor and dt of another, as in a layer; documents of about 300 tokens.
"call" is the median of runs that alternate between two sets of inputs, through autograd; "kernels" is what the GPU
spends in one run, from the profiler, with the number of launches, and --kernels lists them. Errors are relative, in
norm, against the chunks of matrix products in float32 from the same bfloat16 inputs, on the first row.

On a CPU, with TRITON_INTERPRET=1, --ways ours and --tiny, everything runs once: that proves the script, not the speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from scan_speed import milliseconds
from torch import Tensor


class Row(NamedTuple):
    """A model's scan: rows and tokens of a batch, heads, their channels and states, groups."""

    name: str
    batch: int
    length: int
    heads: int
    head_dim: int
    states: int
    groups: int


ROWS = (
    Row("mamba2-1.3b", 4, 2048, 64, 64, 128, 1),
    Row("mamba2-130m", 8, 2048, 24, 64, 128, 1),
    Row("codestral-7b", 2, 2048, 128, 64, 128, 8),
)
TINY = Row("tiny", 2, 70, 2, 16, 16, 1)
# Triton's interpreter multiplies matrices of bits where they are bfloat16.
KINDS = {"cuda": torch.bfloat16, "cpu": torch.float16}
NAMES = ("x", "dt", "B", "C", "A", "D", "dt_bias")


def ours(**given: Any) -> Tensor:
    from ssm_tune.kernels.triton_ssd import ssd_scan

    return ssd_scan(**given)


def mamba_ssm(**given: Any) -> Tensor:
    from ssm_tune.kernels.mamba_ssm_ssd import ssd_scan

    return ssd_scan(**given)


WAYS: dict[str, Callable[..., Tensor]] = {"ours": ours, "mamba_ssm": mamba_ssm}


class Inputs(NamedTuple):
    """Leaves (xBC, dt, A, D, dt_bias), and the arguments made of them."""

    leaves: list[Tensor]
    given: dict[str, Tensor]
    seq_idx: Tensor


def inputs(row: Row, device: str, seed: int) -> Inputs:
    """Random inputs of the sizes that a trained model has: steps between 0.001 and 0.1, A between -1 and -16."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(KINDS[device])

    dim, state = row.heads * row.head_dim, row.groups * row.states
    xBC = normal(row.batch, row.length, dim + 2 * state)
    projected = normal(row.batch, row.length, 2 * dim + 2 * state + row.heads) * 0.5
    steps = (uniform(row.heads) * 4.6 - 6.9).exp()
    leaves = [xBC, projected, -1 - 15 * uniform(row.heads), uniform(row.heads), steps.expm1().log()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    x, B, C = xBC.split([dim, state, state], dim=-1)
    given = {"x": x.unflatten(-1, (row.heads, row.head_dim)), "dt": projected[..., -row.heads :]}
    given |= {name: t.unflatten(-1, (row.groups, row.states)) for name, t in (("B", B), ("C", C))}
    given |= dict(zip(("A", "D", "dt_bias"), leaves[2:], strict=True))
    starts = torch.rand(row.batch, row.length, generator=torch.Generator().manual_seed(1)) < 1 / min(300, row.length)
    return Inputs(leaves, given, starts.cumsum(1).int().to(device))


def runs(row: Row, way: str, device: str, with_documents: bool) -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward and backward, for two sets of inputs."""
    both = []
    for seed in (0, 1):
        some = inputs(row, device, seed)
        given = some.given | ({"seq_idx": some.seq_idx} if with_documents else {})
        y = WAYS[way](**given)
        dy = torch.randn_like(y)
        tensors = [given[name] for name in NAMES]
        both.append(
            (
                lambda g=given: WAYS[way](**g),
                lambda y=y, t=tensors, dy=dy: torch.autograd.grad(y, t, dy, retain_graph=True),
            )
        )
    return both


def kernels(run: Callable[[], Any]) -> list[tuple[float, str]]:
    """Milliseconds and name of every kernel of one run."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found = [(event.device_time / 1e3, event.name) for event in trace.events() if event.device_time > 0]
    return sorted(found, reverse=True)


def errors(row: Row, way: str, device: str) -> dict[str, float]:
    """Of y and every gradient, on the first row of the batch."""
    from ssm_tune.kernels import ssd_chunked

    some = inputs(row._replace(batch=1), device, seed=0)
    found = []
    for function, wide in ((WAYS[way], False), (ssd_chunked.ssd_scan, True)):
        given = {name: t.detach().float() if wide else t.detach() for name, t in some.given.items()}
        given = {name: t.requires_grad_() for name, t in given.items()}
        y = function(**given, seq_idx=some.seq_idx[:1])
        dy = torch.randn(y.shape, device=device, generator=torch.Generator(device).manual_seed(2)).to(KINDS[device])
        found.append([y, *torch.autograd.grad(y, [given[name] for name in NAMES], dy.to(y.dtype))])
    names = ("y", *(f"d{name}" for name in NAMES))
    pairs = zip(names, *found, strict=True)
    return {name: ((one.float() - true).norm() / true.norm()).item() for name, one, true in pairs}


def report(row: Row, way: str, device: str, list_kernels: bool) -> None:
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors(row, way, device).items())
    print(f"{row.name} {way} errors: {found}", flush=True)
    for title, with_documents in (("documents", True), ("no documents", False)):
        both = runs(row, way, device, with_documents)
        cells = []
        for index, direction in enumerate(("forward", "backward")):
            took = milliseconds([pair[index] for pair in both])
            listed = kernels(both[0][index]) if device == "cuda" else []
            cells.append(f"{direction} call {took:.3f} kernels {sum(t for t, _ in listed):.3f} ({len(listed)})")
            if list_kernels and with_documents:
                for time, name in listed:
                    print(f"    {direction} {time:.4f} {name[:90]}", flush=True)
        print(f"{row.name} {way} {title}, ms: {'; '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--kernels", action="store_true", help="list every kernel with its time")
    parser.add_argument("--tiny", action="store_true", help="one small size instead")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("ssd_speed.py: needs a CUDA GPU (or, to try the script itself, TRITON_INTERPRET=1 and --tiny)")
    for row in (TINY,) if arguments.tiny else [row for row in ROWS if row.name in arguments.rows]:
        for way in arguments.ways:
            report(row, way, device, arguments.kernels)


if __name__ == "__main__":
    main()
