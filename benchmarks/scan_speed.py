"""Our selective scans, in CUDA C++ and in Triton, beside mamba_ssm's on one GPU: time, error, the best arrangement.

    python benchmarks/scan_speed.py            # all, forward and backward; half a minute, most of it compiling
    python benchmarks/scan_speed.py --cuda     # without Triton's: seconds
    python benchmarks/scan_speed.py --sweep    # and arrangements of ours; a minute and a half

Inputs are bfloat16, 4 rows of 2048 tokens, 4096 channels, 16 states, documents of about 300 tokens; mamba_ssm's own
function knows no documents, gets its inputs turned round already, and computes every row as one. Milliseconds are
medians of runs that alternate between two sets of inputs: of the kernels alone, and of forward and backward together
through autograd, with all that a layer waits for. Errors are relative, in norm, against one token at a time in
float32, from the same bfloat16 inputs, on the first 64 channels.

On a CPU, with TRITON_INTERPRET=1 and small sizes, everything runs once: that proves the script, not the speed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
CHECKED = 64  # channels


class Size(NamedTuple):
    """What is computed."""

    batch: int
    length: int
    channels: int
    states: int
    device: str


def inputs(size: Size, seed: int = 0) -> Inputs:
    """Random inputs of the sizes that a trained model has: steps between 0.001 and 0.1, A between -1 and -states."""
    generator = torch.Generator(size.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=size.device, generator=generator).bfloat16()

    wide, narrow = (size.batch, size.length, size.channels), (size.batch, size.length, size.states)
    steps = torch.rand(size.channels, device=size.device, generator=generator) * 4.6 - 6.9  # log of 0.001 to 0.1
    return {
        "x": normal(*wide),
        "dt": normal(*wide) * 0.5,
        "A": -torch.arange(1, size.states + 1, device=size.device).float().repeat(size.channels, 1),
        "B": normal(*narrow),
        "C": normal(*narrow),
        "D": torch.randn(size.channels, device=size.device, generator=generator),
        "z": normal(*wide),
        "dt_bias": steps.exp().expm1().log(),  # the inverse of softplus
    }


def documents(size: Size, mean: int = 300) -> Tensor:
    """seq_idx (batch, length): documents of about `mean` tokens."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(size.batch, size.length, generator=generator) < 1 / min(mean, size.length)
    return starts.cumsum(1).int().to(size.device)


def milliseconds(runs: list[Callable[[], Any]], repeats: int = 24) -> float:
    """The median of `repeats` runs, taken in turn from `runs`, after two of each."""
    on_gpu = torch.cuda.is_available()
    for run in runs if on_gpu else []:
        run(), run()
    times = []
    for run in itertools.islice(itertools.cycle(runs), repeats if on_gpu else 1):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


class Ours:
    """Our kernels in Triton in an arrangement, forward and backward apart, as the autograd function calls them."""

    def __init__(self, given: Inputs, seq_idx: Tensor | None) -> None:
        from ssm_tune.kernels import triton_scan
        from ssm_tune.kernels.triton_scan_documents import find_codes

        self.module, self.given = triton_scan, given
        x, A = given["x"], triton_scan._turn(given["A"])
        codes = find_codes(seq_idx, *x.shape[:2], x.device)
        self.row = triton_scan._Row(x, given["dt"], given["z"], A, given["D"], given["dt_bias"], *codes, True)
        self.dy = torch.randn_like(x)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, arrangement: Any, segment: int, keep: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        BC = self.module._prepare(self.given["B"], self.given["C"], self.row)
        return self.module.run_forward(self.row, BC, self.row.no_state(), keep, arrangement, segment)

    def backward(self, arrangement: Any) -> tuple[Tensor | None, ...]:
        if arrangement.segment not in self.kept:
            kept = self.forward(self.module.FORWARD, arrangement.segment)[1]
            self.kept = {arrangement.segment: (self.module._prepare(self.given["B"], self.given["C"], self.row), kept)}
        BC, kept = self.kept[arrangement.segment]
        return self.module.run_backward(self.row, BC, kept, self.dy, self.row.no_state(), True, arrangement)


def errors(size: Size, seq_idx: Tensor, name: str) -> dict[str, float]:
    """Relative errors of outputs and gradients of a backend of ours, as arranged by default."""
    from ssm_tune.kernels import reference

    ours = importlib.import_module(f"ssm_tune.kernels.{name}_scan").selective_scan
    few = inputs(size._replace(channels=min(CHECKED, size.channels)))
    found, truth = [], []
    for function, into, wide in ((ours, found, False), (reference.selective_scan, truth, True)):
        leaves = {name: (t.float() if wide else t).clone().requires_grad_() for name, t in few.items()}
        y = function(**leaves, seq_idx=seq_idx)
        slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(size.device)
        into.extend([y.detach(), *torch.autograd.grad(y, list(leaves.values()), slope.to(y.dtype))])
    names = ["y", *(f"d{name}" for name in few)]
    return {n: ((f.float() - t).norm() / t.norm()).item() for n, f, t in zip(names, found, truth, strict=True)}


def theirs(size: Size) -> tuple[float, float] | str:
    """mamba_ssm's function, without documents: forward and backward."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError as error:
        return f"mamba_ssm: {error}"

    runs: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
    for seed in (0, 1):
        given = inputs(size, seed)
        turned = {n: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for n, t in given.items()}
        leaves = [turned[name].requires_grad_() for name in NAMES]

        def forward(leaves: list[Tensor] = leaves) -> Tensor:
            return selective_scan_fn(*leaves, delta_softplus=True)

        y = forward()
        dy = torch.randn_like(y)
        backward = lambda y=y, leaves=leaves, dy=dy: torch.autograd.grad(y, leaves, dy, retain_graph=True)  # noqa: E731
        runs.append((forward, backward))
    return milliseconds([f for f, _ in runs]), milliseconds([b for _, b in runs])


def conv_runs(size: Size, seed: int, module: Any, seq_idx: Tensor | None) -> tuple[Callable[[], Any], ...]:
    """Forward and backward of a module's convolution."""
    x = inputs(size, seed)["x"].requires_grad_()
    weight = torch.randn(size.channels, 4, device=size.device).bfloat16().requires_grad_()
    bias = torch.randn(size.channels, device=size.device).bfloat16().requires_grad_()

    def forward() -> Tensor:
        return module.causal_conv1d(x, weight, bias, seq_idx=seq_idx)

    y = forward()
    dy = torch.randn_like(y)
    return forward, lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)


def conv_lines(size: Size) -> list[str]:
    """The causal convolution of the same size, ours and causal_conv1d's: forward and backward through autograd, and the
    kernels alone, since a slow processor may need longer for a call than the GPU."""
    lines, seq_idx = [], documents(size)
    contestants = [(name, index) for name in ("cuda_conv", "triton_conv") for index in (seq_idx, None)]
    for name, index in (*contestants, ("causal_conv1d_cuda", seq_idx)):
        what = f"{name}, {'one a row' if index is None else 'documents'}"
        try:
            module = importlib.import_module(f"ssm_tune.kernels.{name}")
            pairs = [conv_runs(size, seed, module, index) for seed in (0, 1)]
        except (ImportError, RuntimeError) as error:  # no package; no NVRTC's GPU
            lines.append(f"{what}: {error}")
            continue
        times = [milliseconds([pair[i] for pair in pairs]) for i in (0, 1)]
        lines.append(f"{what:30} {times[0]:10.3f} {times[1]:10.3f}")
        if size.device == "cuda":
            for direction, run in zip(("forward", "backward"), pairs[0], strict=True):
                lines.append(f"  {direction}: " + "; ".join(kernel_times(run)))
    return lines


def grid(small: bool) -> tuple[list[Any], list[Any]]:
    """Arrangements of the forward and of the backward pass."""
    from ssm_tune.kernels.triton_scan import Arrangement

    if small:
        return [Arrangement(piece=8, segment=8)], [Arrangement(piece=8, segment=8, spread=True)]
    layouts = (
        (4, 32, False, None),
        (8, 32, False, None),
        (4, 32, False, 96),
        (4, 64, False, None),
        (4, 32, True, None),
    )
    forward = [
        Arrangement(group=group, block=block, spread=spread, registers=registers, piece=piece)
        for (group, block, spread, registers), piece in itertools.product(layouts, (2048, 1024, 512, 256, 128))
    ]
    layouts = (
        (4, True, None, 32), (4, True, 200, 32), (4, True, 168, 32), (4, True, None, 64), (4, True, None, 16),
        (2, True, None, 32), (2, True, 168, 32), (2, True, 128, 32), (4, False, None, 32), (2, False, None, 32),
    )  # fmt: skip
    backward = [
        Arrangement(group=group, spread=spread, registers=registers, segment=segment, piece=piece)
        for (group, spread, registers, segment), piece in itertools.product(layouts, (2048, 1024, 512, 256))
    ]
    return forward, backward


def compile_one(job: tuple[Size, str, Any]) -> str:
    """Compile what an arrangement needs, in a process of its own: it stays in Triton's cache on disk."""
    size, direction, arrangement = job
    try:
        ours = Ours(inputs(size), documents(size))
        ours.forward(arrangement, 32) if direction == "forward" else ours.backward(arrangement)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  one that cannot be compiled is left out and said
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(size: Size, forward: list[Any], backward: list[Any]) -> None:
    """What differs in the length of a piece is the same kernel: one of each, and one of a whole row."""
    jobs, seen = [], set()
    for direction, arrangements in (("forward", forward), ("backward", backward)):
        for arrangement in arrangements:
            key = (direction, arrangement._replace(piece=0), arrangement.piece >= size.length)
            if key not in seen:
                seen.add(key)
                jobs.append((size, direction, arrangement))
    jobs.sort(key=lambda job: job[1])  # the backward kernels take longest
    begin = time.perf_counter()
    workers = min(12, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for job, problem in zip(jobs, pool.imap(compile_one, jobs), strict=True):
            if problem:
                print(f"left out: {job[1]} {job[2]}: {problem}", flush=True)
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)


def sweep(size: Size, both: list[Ours], small: bool) -> None:
    forward, backward = grid(small)
    if size.device == "cuda":
        compile_all(size, forward, backward)
    for direction, arrangements in (("forward", forward), ("backward", backward)):
        found = []
        for arrangement in arrangements:
            runs = [
                (lambda o=ours, a=arrangement: o.forward(a, 32))
                if direction == "forward"
                else (lambda o=ours, a=arrangement: o.backward(a))
                for ours in both
            ]
            try:
                found.append((milliseconds(runs, 8), arrangement))
            except Exception as error:  # noqa: BLE001  an arrangement that does not fit on the card is said
                print(f"{direction} {arrangement}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        found.sort(key=lambda pair: pair[0])
        for took, arrangement in found:
            fields = " ".join(f"{n}={v}" for n, v in arrangement._asdict().items() if n != "warps")
            print(f"sweep {direction:8} {took:7.3f} ms  {fields}", flush=True)


def kernel_times(run: Callable[[], Any]) -> list[str]:
    """Where the time of one run goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = [(event.device_time_total / 1e3, event.key) for event in trace.key_averages()]
    return [f"{took:.3f} ms {name[:60]}" for took, name in sorted(events, reverse=True)[:8] if took > 0]


def triton_lines(size: Size, with_sweep: bool) -> list[str]:
    """Forward, forward keeping states and backward of the kernels in Triton, as arranged by default; after a sweep."""
    seq_idx = documents(size)
    both = [Ours(inputs(size, seed), seq_idx) for seed in (0, 1)]
    if with_sweep:
        sweep(size, both, small=size.device == "cpu")
    module = both[0].module
    segment = module.BACKWARD.segment
    lines = []
    for name, some in (
        ("triton, documents", both),
        ("triton, one a row", [Ours(inputs(size, s), None) for s in (0, 1)]),
    ):
        forward = milliseconds([lambda o=o: o.forward(module.FORWARD, segment, keep=False) for o in some])
        keeping = milliseconds([lambda o=o: o.forward(module.FORWARD, segment) for o in some])
        backward = milliseconds([lambda o=o: o.backward(module.BACKWARD) for o in some])
        lines.append(f"{name:18} {forward:10.3f} {keeping:16.3f} {backward:10.3f}")
    if size.device == "cuda":
        for direction, run in (
            ("forward", lambda: both[0].forward(module.FORWARD, segment)),
            ("backward", lambda: both[0].backward(module.BACKWARD)),
        ):
            print(f"triton {direction}: " + "; ".join(kernel_times(run)), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time arrangements of our kernels")
    parser.add_argument("--cuda", action="store_true", help="the kernels in CUDA C++ alone, beside mamba_ssm's")
    parser.add_argument("--conv", action="store_true", help="the causal convolution instead")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--channels", type=int, default=4096)
    parser.add_argument("--states", type=int, default=16)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("scan_speed.py: needs a CUDA GPU (or, to try the script itself, TRITON_INTERPRET=1 and small sizes)")
    size = Size(arguments.batch, arguments.length, arguments.channels, arguments.states, device)
    if arguments.conv:
        print(f"{'ms':30} {'forward':>10} {'backward':>10}")
        print("\n".join(conv_lines(size)))
        return
    names = ("cuda",) if arguments.cuda else ("cuda", "triton") if device == "cuda" else ("triton",)
    for name in names:
        found = errors(size, documents(size), name).items()
        print(f"errors of {name}:", ", ".join(f"{key} {error:.1e}" for key, error in found), flush=True)
    from scan_speed_cuda import autograd_lines, cuda_lines

    lines = cuda_lines(size) if device == "cuda" else []
    if "triton" in names:
        lines += triton_lines(size, arguments.sweep)
    found = theirs(size) if device == "cuda" else "mamba_ssm: no GPU"
    lines.append(found if isinstance(found, str) else f"{'mamba_ssm':18} {found[0]:10.3f} {'':16} {found[1]:10.3f}")
    print(f"\n{'ms':18} {'forward':>10} {'keeping states':>16} {'backward':>10}")
    print("\n".join(lines), flush=True)
    print("\n".join(autograd_lines(size, names)))


if __name__ == "__main__":
    main()
