"""Measuring a training run from outside: time per step, and memory without weights, gradients and optimizer state."""

from __future__ import annotations

import time
from typing import Any

import torch
from speed_profile import StepProfile
from torch import nn
from transformers import TrainerCallback

GIB = 2**30


class GraphMemory:
    """What CUDA graphs keep for themselves: all of it counts as activations, whether a tensor is in it at the moment or
    not, and although the gradients of the graph's parameters end in it.

    total: bytes of it; live: of tensors in it, which the allocator counts too.
    """

    def __init__(self) -> None:
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
        self.total = sum(segment["total_size"] for segment in segments)
        self.live = sum(segment["allocated_size"] for segment in segments)
        self._ranges = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]

    def bytes_outside(self, gradient: torch.Tensor) -> int:
        """Bytes of a gradient, 0 if a graph has it."""
        inside = any(begin <= gradient.data_ptr() < end for begin, end in self._ranges)
        return 0 if inside else gradient.numel() * gradient.element_size()


class Meter:
    """Told where steps begin and end; times some after the first few, then looks at memory in one more.

    Memory is taken in a step of its own, in which every gradient that is finished ends a stretch: what was allocated
    at most in a stretch, less the gradients that were there, less what stays between steps, is activations. A profile,
    if one is wanted, is taken after all that.
    """

    def __init__(self, seconds: float, warm: int = 3, most: int = 20, step_profile: StepProfile | None = None) -> None:
        self.seconds, self.warm, self.most = seconds, warm, most
        self.step_profile = step_profile
        self.on_gpu = torch.cuda.is_available()
        self.begin = time.perf_counter()
        self.first_step = self.timed = 0.0
        self.steps = self.timed_steps = 0
        self.wanted: int | None = None
        self.peak = self.activations = 0
        self.watching = self.watched = False
        self._handles: list[Any] = []
        self._clock = 0.0

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def step_begins(self, model: nn.Module) -> None:
        if self.steps == 0:
            self._clock = self._now()
        timed = self.wanted is not None and self.timed_steps >= self.wanted
        if timed and self.on_gpu and not self.watched:
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        torch.cuda.synchronize()
        self.watching = True
        self._pools = GraphMemory()
        self._resident, self._gradients = torch.cuda.memory_allocated() - self._pools.live, 0
        torch.cuda.reset_peak_memory_stats()

        def finished(parameter: torch.Tensor) -> None:
            self._stretch()
            self._gradients += self._pools.bytes_outside(parameter.grad)

        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(finished))

    def _stretch(self) -> None:
        highest = torch.cuda.max_memory_allocated() - self._pools.live
        self.peak = max(self.peak, highest + self._pools.total)
        self.activations = max(self.activations, highest - self._resident - self._gradients)
        torch.cuda.reset_peak_memory_stats()

    def backward_ended(self) -> None:
        if self.watching:
            self._stretch()

    def step_ended(self) -> bool:
        """Whether everything is measured."""
        self.steps += 1
        if self.step_profile is not None and self.step_profile.running:
            return self.step_profile.step_ended()
        if self.watching:
            self._stretch()
            self.activations += self._pools.total
            for handle in self._handles:
                handle.remove()
            self.watching, self.watched = False, True
            return self._measured()
        if self.steps == 1:
            self.first_step = self._now() - self._clock
        if self.steps == self.warm - 1:
            self._clock = self._now()
        if self.steps == self.warm:
            one = self._now() - self._clock
            self.wanted = max(2, min(self.most, int(self.seconds / max(one, 1e-6))))
            self._clock = self._now()
        elif self.wanted is not None:
            self.timed_steps += 1
            if self.timed_steps == self.wanted:
                self.timed = (self._now() - self._clock) / self.wanted
                return not self.on_gpu and self._measured()
        return False

    def _measured(self) -> bool:
        """Begins the profile; whether there is none to wait for."""
        if self.step_profile is None:
            return True
        self.step_profile.begin()
        return not self.step_profile.running


class MeterCallback(TrainerCallback):
    """A meter told by a trainer."""

    unclipped_will_do = True  # it reads no gradients

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step_begins(kwargs["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.backward_ended()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter.step_ended():
            control.should_training_stop = True
