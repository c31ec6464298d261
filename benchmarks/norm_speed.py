"""Norms on one GPU, at the sizes of two models: the residual stream's with its addition, and Mamba-2's gated one.

    python benchmarks/norm_speed.py            # one kernel beside PyTorch's; a few seconds
    python benchmarks/norm_speed.py --gated    # ours beside mamba_ssm's

As in training under autocast: a float32 stream, what is added and the norm in bfloat16, a float32 weight; of the gated
norm all but the weight in bfloat16, z a part of in_proj's output. PyTorch's are an addition, F.rms_norm and a cast;
backward is from the gradients of the outputs to all three inputs.
Milliseconds are medians of runs that alternate between two sets of inputs; "bytes" is what they have to read and write
at 4.3 TB/s; "a step" is forward and backward of all layers.

On a CPU, with TRITON_INTERPRET=1 and --tokens 4, everything runs once: that proves the script, not the speed.
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
from torch.nn import functional as F

BANDWIDTH = 4.3e12  # bytes a second, read and written, measured on an H200


class Row(NamedTuple):
    """A model's stream: tokens of a batch, channels, layers."""

    name: str
    tokens: int
    hidden: int
    layers: int
    projection: int = 0  # channels from one token to the next of what is part of a projection


ROWS = (Row("mamba-130m", 8 * 2048, 768, 24), Row("mamba-1.4b", 4 * 2048, 2048, 48))
GATED_ROWS = (Row("mamba2-130m", 8 * 2048, 1536, 24, 3352), Row("mamba2-1.3b", 4 * 2048, 4096, 48, 8512))


class Way(NamedTuple):
    """One way to compute it, and the bytes that it moves for every number of the stream, forward and backward."""

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    bytes: tuple[int, int]


def apart(stream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Addition (10 bytes), norm (8), cast (6); cast (6), norm (12), weight (8), addition (12), cast (6)."""
    total = stream + x
    return F.rms_norm(total, weight.shape, weight, 1e-5).bfloat16(), total


def together(stream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from ssm_tune.kernels.residual_norm_triton import residual_rms_norm

    return residual_rms_norm(stream, x, weight, 1e-5, torch.bfloat16)


WAYS = (Way("PyTorch", apart, (24, 44)), Way("one kernel", together, (12, 16)))


def gated_by_mamba_ssm(y: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor]:
    from ssm_tune.kernels.mamba_ssm_norm import gated_rms_norm

    return (gated_rms_norm(y, z, weight, 1e-5),)


def gated_by_ours(y: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor]:
    from ssm_tune.kernels.triton_gated_norm import gated_rms_norm

    return (gated_rms_norm(y, z, weight, 1e-5),)


# y and z read, the result written; its gradient, y and z read, two gradients written.
GATED_WAYS = (Way("mamba_ssm", gated_by_mamba_ssm, (6, 10)), Way("ours", gated_by_ours, (6, 10)))


def runs(row: Row, way: Way, device: str, seed: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward on inputs of their own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    first, second = normal(row.tokens, row.hidden), normal(row.tokens, row.projection or row.hidden).bfloat16()
    first, second = first.bfloat16() if row.projection else first, second[:, : row.hidden]
    weight = normal(row.hidden)
    leaves = [tensor.requires_grad_() for tensor in (first, second, weight)]
    outputs = way.function(*leaves)
    slopes = [torch.randn_like(output) for output in outputs]
    return (
        lambda: way.function(*leaves),
        lambda: torch.autograd.grad(outputs, leaves, slopes, retain_graph=True),
    )


def line(row: Row, way: Way, device: str) -> str:
    try:
        both = [runs(row, way, device, seed) for seed in (0, 1)]
    except ImportError as error:
        return f"{row.name:12} {way.name:12} {error}"
    times = [milliseconds([pair[direction] for pair in both]) for direction in (0, 1)]
    bound = [row.tokens * row.hidden * size / BANDWIDTH * 1e3 for size in way.bytes]
    cells = [f"{took:.3f} ({least:.3f})" for took, least in zip(times, bound, strict=True)]
    step = f"{row.layers * sum(times):.2f} ({row.layers * sum(bound):.2f})"
    return f"{row.name:12} {way.name:12} {cells[0]:>16} {cells[1]:>16} {step:>16}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gated", action="store_true", help="the gated norm instead")
    parser.add_argument("--tokens", type=int, help="instead of the models' batches")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("norm_speed.py: needs a CUDA GPU (or, to try the script itself, TRITON_INTERPRET=1 and --tokens 4)")
    print(f"{'ms (bytes)':12} {'':12} {'forward':>16} {'backward':>16} {'a step':>16}")
    for row in GATED_ROWS if arguments.gated else ROWS:
        for way in GATED_WAYS if arguments.gated else WAYS:
            print(line(row._replace(tokens=arguments.tokens or row.tokens), way, device), flush=True)


if __name__ == "__main__":
    main()
