"""Tokens per second, model FLOP utilisation, waiting for data, and the use of device and memory between two logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)
_SAMPLED = 1.0  # seconds between two readings of the device's utilisation

# Dense bf16 peak of the cards people train on, in FLOP/s, from their data sheets (the word is looked for in the
# device's name).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
}


class Throughput:
    """Counts real tokens (no padding) on the device, without waiting for it; makes rates of them when a log is due.

    MFU follows PaLM (Chowdhery et al. 2022, appendix B): 6 FLOPs per parameter and token, 4 where the parameter is
    frozen (no weight gradient), over the card's dense bf16 peak; it is left out on devices whose peak is not known.

    data_wait_share is the share of the time, 0 to 1, in which the training loop was not given its next batch: rows
    read, tokenised or put together then, or on their way from a worker. A GPU has work queued meanwhile, so it idles
    for data at most that long. Near 0 the data keep up; else training.dataloader_num_workers reads further ahead. On
    a GPU without training.dataloader_pin_memory, copies that wait for the GPU count too.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        self.flops_per_token = 6 * trained + 4 * frozen
        self.device = device
        self.peak_flops = self._peak(device)
        self._tokens: torch.Tensor | int = 0
        self._restored = 0
        self._last = (0, 0, time.perf_counter())  # tokens, step, clock at the last log
        self._waited = 0.0  # seconds, for data, since then
        self._busy = Utilization(device)

    @staticmethod
    def _peak(device: torch.device) -> float | None:
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        return next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)

    def start(self, step: int) -> None:
        """Start the clock: at the first step, after what has only to do with starting up."""
        self._last = (self.session_tokens(), step, time.perf_counter())
        self._waited = 0.0

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`; the time that each takes to come is time waited for data."""
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - begin
            yield batch

    def count(self, inputs: dict[str, Any], rows: torch.Tensor | None = None) -> None:
        """Add a batch's real tokens: attention_mask of ones, or seq_idx of at least 0.

        rows: (batch, n), the numbers of the source rows; a row of the batch without any only fills it up.
        """
        real = inputs["seq_idx"] >= 0 if "seq_idx" in inputs else inputs["attention_mask"]
        if rows is not None:
            real = real * (rows >= 0).any(dim=1, keepdim=True)
        self._tokens = self._tokens + real.sum()
        self._busy.sample()

    def session_tokens(self) -> int:
        return int(self._tokens)

    def total_tokens(self) -> int:
        """Tokens of this process since the run's first step, over interruptions."""
        return self._restored + self.session_tokens()

    def restore(self, tokens: int) -> None:
        self._restored = tokens

    def drain(self, step: int) -> dict[str, float]:
        """Rates since the last call. Tokens are this process's own."""
        tokens, clock = self.session_tokens(), time.perf_counter()
        since_tokens, since_step, since_clock = self._last
        waited, self._waited = self._waited, 0.0
        self._last = (tokens, step, clock)
        seconds = max(clock - since_clock, 1e-9)
        rate = (tokens - since_tokens) / seconds
        logs = {
            "num_tokens": float(self.total_tokens()),
            "tokens_per_second": rate,
            "seconds_per_step": seconds / max(step - since_step, 1),
            "data_wait_share": waited / seconds,
        }
        if self.peak_flops:
            logs["mfu"] = rate * self.flops_per_token / self.peak_flops
        if self.device.type == "cuda":
            logs["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            logs["reserved_memory_gib"] = torch.cuda.memory_reserved(self.device) / 2**30
        return logs | self._busy.drain()


def _driver_error() -> type[Exception]:
    try:
        from pynvml import NVMLError
    except ImportError:
        return ImportError
    return NVMLError


class Utilization:
    """The share of time in which a CUDA device was at work, as its driver says (nvidia-smi's number); read each second.

    It needs nvidia-ml-py; without it nothing is measured, which is said once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works = device.type == "cuda"
        self._sampled = 0.0
        self._percent: list[int] = []

    def sample(self) -> None:
        """Read it if the last reading is a second old; the device is not waited for."""
        if not self.works or time.perf_counter() - self._sampled < _SAMPLED:
            return
        self._sampled = time.perf_counter()
        try:
            self._percent.append(torch.cuda.utilization(self.device))
        except (ImportError, RuntimeError, OSError, _driver_error()) as error:
            self.works = False
            logger.info("gpu_utilization is not logged (pip install nvidia-ml-py): %s", error)

    def drain(self) -> dict[str, float]:
        """The mean since the last call, 0 to 1; nothing if there was no reading."""
        percent, self._percent = self._percent, []
        return {"gpu_utilization": sum(percent) / len(percent) / 100} if percent else {}
