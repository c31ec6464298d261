"""Where a training step's time on the GPU goes: a step under torch's profiler, its kernels grouped by their work."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

# The first pattern found in a kernel's name decides. Names are CUDA's, with template arguments, or Triton functions'.
GROUPS: tuple[tuple[str, str], ...] = (
    ("copies and casts", r"^Mem(cpy|set)"),
    ("between GPUs", r"^nccl"),
    ("selective scan", r"selective_scan|^scan_(for|back)ward$|^((reverse_)?ends|carry|prepare|(for|back)ward)_kernel$"),
    (
        "SSD",
        r"^_(chunk|state_passing|bmm_chunk)_|"
        r"^(steps|(copied_)?output|states|state_gradients|across_chunks|within_chunk|last_gradients)_kernel$",
    ),
    ("convolution", r"conv1d|conv_depthwise|^conv_(slope_)?kernel$|convolve|fprop|dgrad|wgrad"),
    ("attention", r"flash|fmha|attention"),
    ("norms", r"(layer|rms|add)_?norm|GammaBeta"),
    ("optimizer and clipping", r"multi_tensor_apply|FusedAdam|fused_adam"),
    ("matrix products", r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitK"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy|logsumexp"),
    ("copies and casts", r"copy_kernel|copy_device|CatArray|transpose"),
    ("reductions", r"reduce|triton_(red|per)_"),
    ("other elementwise", r"elementwise|triton_poi_"),
)
REST = "rest"
_ANY_CASE = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in GROUPS)


class Kernel(NamedTuple):
    """One kernel, copy or fill as the GPU ran it; microseconds."""

    name: str
    begin: float
    end: float


class StepProfile:
    """Told where steps end; records the second whole one after `begin`, the first being the profiler's own warm-up."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.running = False
        self.found: dict[str, Any] = {}
        self.on_host = ""  # a table of what the host spent its time with
        self._ended = 0
        # What torch sets for its own CUDA graphs: CUPTI, taken down and started again, crashes with recorded graphs.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")

    def begin(self) -> None:
        self.running = True
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        try:
            self._profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
            self._profiler.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, what was timed must not be lost to it
            self._failed(error)

    def step_ended(self) -> bool:
        """Whether the profile is there, or failed."""
        try:
            self._step_ended()
        except Exception as error:  # noqa: BLE001
            self._failed(error)
        return not self.running

    def _step_ended(self) -> None:
        self._ended += 1
        if self._ended == 1:
            self._now()  # what the GPU still has to do belongs to this step
            self._profiler.step()
            self._clock = self._now()
            return
        wall = self._now() - self._clock
        self._profiler.stop()
        self.running = False
        events = self._profiler.events() or []
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        calls = sum(1 for event in events if event.device_type == DeviceType.CPU and is_launch(event.name))
        self.found = summary(kernels, calls, wall * 1e3)
        averages = self._profiler.key_averages()
        self.on_host = averages.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _failed(self, error: Exception) -> None:
        self.running = False
        self.found = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def is_launch(name: str) -> bool:
    """Whether a call on the host starts kernels: one, or a whole recorded graph."""
    return re.match(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)", name) is not None


def group_of(name: str) -> str:
    return next((group for group, pattern in _ANY_CASE if pattern.search(name)), REST)


def busy_ms(kernels: Iterable[Kernel]) -> float:
    """Milliseconds in which at least one kernel runs."""
    total = reached = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        total += max(0.0, kernel.end - max(kernel.begin, reached))
        reached = max(reached, kernel.end)
    return total / 1e3


def summary(kernels: list[Kernel], launch_calls: int, wall_ms: float, most: int = 12) -> dict[str, Any]:
    """The profile of a step, for the results; kernels that overlap count in full in their groups, once in `busy_ms`."""

    def total(names: dict[str, list[float]]) -> list[dict[str, Any]]:
        found = [{"name": name, "count": len(spans), "ms": sum(spans) / 1e3} for name, spans in names.items()]
        return sorted(found, key=lambda entry: -entry["ms"])

    groups: dict[str, list[float]] = defaultdict(list)
    single: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        groups[group_of(kernel.name)].append(kernel.end - kernel.begin)
        single[kernel.name].append(kernel.end - kernel.begin)
    return {
        "wall_ms": wall_ms,
        "busy_ms": busy_ms(kernels),
        "kernels": len(kernels),
        "launch_calls": launch_calls,
        "groups": total(groups),
        "longest": [{**entry, "name": entry["name"][:80]} for entry in total(single)[:most]],
    }


def profile_text(found: dict[str, Any], timed_ms: float) -> str:
    """A profile for the eye; `timed_ms` is the step's time without the profiler."""
    if "problem" in found:
        return f"  no profile: {found['problem']}"
    if not found["kernels"]:
        return f"  profile: no kernels of a GPU in a step of {found['wall_ms']:.1f} ms"
    lines = [
        f"  profile: GPU busy {found['busy_ms']:.1f} ms of a step of {timed_ms:.1f} ms "
        f"({found['wall_ms']:.1f} ms under the profiler), {found['kernels']} kernels and copies, "
        f"{found['launch_calls']} launch calls"
    ]
    for title in ("groups", "longest"):
        lines.append(f"  {'ms':>9} {'count':>6}  {title}")
        lines += [f"  {entry['ms']:9.2f} {entry['count']:6d}  {entry['name']}" for entry in found[title]]
    return "\n".join(lines)
