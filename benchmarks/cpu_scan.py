"""The CPU kernels beside what a user would run instead: forward and backward, time and memory, as one Markdown table.

    python benchmarks/cpu_scan.py               # 512 and 2048 tokens; a few minutes, nearly all of them transformers'
    loop python benchmarks/cpu_scan.py --skip-slow   # without that loop: half a minute

Each line is measured in a process of its own, on the same inputs: batch 2, 512 channels, float32. Time is the best of
several runs (the slow loop runs once), after a first call on a few tokens that compiles what there is to compile.
Memory is what the process grows by from before the forward to the highest point of the first run, gradients included.
Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BATCH, CHANNELS, STATES, HEADS, HEAD_STATES, WIDTH = 2, 512, 16, 8, 64, 4
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
Inputs = dict[str, Tensor]


class Variant(NamedTuple):
    """One implementation of one operation."""

    make: Callable[[int], Inputs]
    run: Callable[[Inputs], Tensor]
    slow: bool = False


def scan_inputs(tokens: int) -> Inputs:
    """Mamba-1: x, dt, z (batch, tokens, channels), B, C (batch, tokens, states)."""
    wide, narrow = (BATCH, tokens, CHANNELS), (BATCH, tokens, STATES)
    return {
        **{name: torch.randn(wide) for name in ("x", "dt", "z")},
        **{name: torch.randn(narrow) for name in ("B", "C")},
        "A": -torch.arange(1, STATES + 1).float().repeat(CHANNELS, 1),
        "D": torch.ones(CHANNELS),
        "dt_bias": torch.full((CHANNELS,), -4.0),
    }


def ssd_inputs(tokens: int) -> Inputs:
    """Mamba-2: x (batch, tokens, heads, head_dim), dt (batch, tokens, heads), B, C (batch, tokens, 1, states)."""
    return {
        "x": torch.randn(BATCH, tokens, HEADS, CHANNELS // HEADS),
        "dt": torch.randn(BATCH, tokens, HEADS),
        **{name: torch.randn(BATCH, tokens, 1, HEAD_STATES) for name in ("B", "C")},
        "A": -torch.rand(HEADS) * 15 - 1,
        "D": torch.ones(HEADS),
        "dt_bias": torch.full((HEADS,), -4.0),
    }


def conv_inputs(tokens: int) -> Inputs:
    """The causal convolution: x (batch, tokens, channels)."""
    return {
        "x": torch.randn(BATCH, tokens, CHANNELS),
        "weight": torch.randn(CHANNELS, WIDTH),
        "bias": torch.randn(CHANNELS),
    }


def ours(operation: str) -> Callable[[Inputs], Tensor]:
    """This project's kernel."""

    def run(inputs: Inputs) -> Tensor:
        from ssm_tune import kernels

        return vars(kernels)[operation](**inputs)

    return run


def mambapy_scan(t: Inputs) -> Tensor:
    """mambapy's parallel scan, used as its own Mamba block uses it."""
    from mambapy.pscan import pscan

    step = F.softplus(t["dt"] + t["dt_bias"])
    decay = torch.exp(step[..., None] * t["A"])
    states = pscan(decay, step[..., None] * t["B"][:, :, None] * t["x"][..., None])
    y = (states @ t["C"][..., None]).squeeze(3) + t["D"] * t["x"]
    return y * F.silu(t["z"])


def transformers_scan(t: Inputs) -> Tensor:
    """What transformers runs for Mamba on a CPU."""
    from transformers.models.mamba import modeling_mamba

    x, dt, B, C, z = (t[name].transpose(1, 2) for name in ("x", "dt", "B", "C", "z"))
    return modeling_mamba.mamba_selective_scan(x, dt, t["A"], B, C, t["D"], z, t["dt_bias"], delta_softplus=True)


def transformers_ssd(t: Inputs) -> Tensor:
    """What transformers runs for Mamba-2 on a CPU."""
    from transformers.models.mamba2 import modeling_mamba2

    tensors = [t[name] for name in ("x", "dt", "A", "B", "C")]
    return modeling_mamba2.mamba2_chunk_scan(*tensors, 256, D=t["D"], dt_bias=t["dt_bias"], dt_softplus=True)


def transformers_conv(t: Inputs) -> Tensor:
    """What transformers runs for the convolution on a CPU."""
    from transformers.models.mamba import modeling_mamba

    return modeling_mamba.causal_conv1d_fn(t["x"].transpose(1, 2), t["weight"], t["bias"], activation="silu")


VARIANTS = {
    "Mamba-1 scan": {
        "ssm-tune": Variant(scan_inputs, ours("selective_scan")),
        "mambapy": Variant(scan_inputs, mambapy_scan),
        "transformers": Variant(scan_inputs, transformers_scan, slow=True),
    },
    "Mamba-2 scan": {
        "ssm-tune": Variant(ssd_inputs, ours("ssd_scan")),
        "transformers": Variant(ssd_inputs, transformers_ssd),
    },
    "convolution": {
        "ssm-tune": Variant(conv_inputs, ours("causal_conv1d")),
        "transformers": Variant(conv_inputs, transformers_conv),
    },
}


class PeakMemory:
    """The highest resident memory, in MiB above that at the start, seen by a thread that looks every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB


def run_once(variant: Variant, inputs: Inputs) -> tuple[float, float]:
    """Seconds of forward and backward, and the norm of x's gradient, which all variants must agree on."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    begun = time.perf_counter()
    variant.run(leaves).square().mean().backward()
    return time.perf_counter() - begun, leaves["x"].grad.norm().item()


def measure(operation: str, name: str, tokens: int, threads: int) -> dict[str, float]:
    """Everything about one line of the table, in this process."""
    torch.set_num_threads(threads)
    variant = VARIANTS[operation][name]
    run_once(variant, variant.make(2))  # imports and compiles
    torch.manual_seed(0)
    inputs = variant.make(tokens)
    with PeakMemory() as memory:
        seconds, norm = run_once(variant, inputs)
    best, spent = seconds, seconds
    while not variant.slow and spent < 4:
        seconds, _ = run_once(variant, inputs)
        best, spent = min(best, seconds), spent + seconds
    return {"seconds": best, "mib": memory.peak - memory.start, "norm": norm}


def measure_apart(*arguments: str | int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_table(lengths: list[int], threads: int, skip_slow: bool) -> None:
    """All variants, each beside ours."""
    print(f"Forward and backward, batch {BATCH}, {CHANNELS} channels, float32, {threads} threads.\n")
    print("| operation | tokens | | time, s | memory, MiB | time, ours = 1 | memory, ours = 1 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for operation, variants in VARIANTS.items():
        for tokens in lengths:
            base = None
            for name, variant in variants.items():
                if variant.slow and skip_slow:
                    continue
                found = measure_apart(operation, name, tokens, threads)
                base = base or found
                if abs(found["norm"] - base["norm"]) > 1e-3 * base["norm"]:
                    raise SystemExit(f"{operation}: {name} computes something else: {found} against {base}")
                times, memories = found["seconds"] / base["seconds"], found["mib"] / base["mib"]
                line = f"| {operation} | {tokens} | {name} | {found['seconds']:.4f} | {found['mib']:.0f} "
                print(f"{line}| {times:.1f} | {memories:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--skip-slow", action="store_true", help="leave out transformers' token-by-token loop")
    parser.add_argument(
        "--measure", nargs=4, metavar=("OPERATION", "NAME", "TOKENS", "THREADS"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.measure:
        operation, name, tokens, threads = arguments.measure
        print(json.dumps(measure(operation, name, int(tokens), int(threads))))
    else:
        print_table(arguments.tokens, arguments.threads, arguments.skip_slow)


if __name__ == "__main__":
    main()
