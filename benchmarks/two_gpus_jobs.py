"""The runs of two_gpus.py: shapes of models, methods, modes and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SSD = {"head_dim": 64, "state_size": 128, "chunk_size": 256, "expand": 2}
WIDTHS = {"num_attention_heads": 16, "intermediate_size": 2048}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-1.4b": ("mamba", {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 50280}),
    "mamba2-1.3b": (
        "mamba2",
        {**SSD, "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 50288, "num_heads": 64, "n_groups": 1}
        | {"tie_word_embeddings": True},
    ),
    "codestral-7b": (
        "mamba2",
        {**SSD, "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "num_heads": 128, "n_groups": 8},
    ),
    "mamba": ("mamba", {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}),
    "mamba2": (
        "mamba2",
        {**SSD, "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096, "num_heads": 32, "n_groups": 1},
    ),
    "zamba2": (
        "zamba2",
        {**WIDTHS, "hidden_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096, "n_mamba_heads": 32}
        | {"num_key_value_heads": 16, "mamba_d_state": 64, "mamba_ngroups": 1, "num_mem_blocks": 1}
        | {"layers_block_type": ["linear_attention", "hybrid"] * 3, "adapter_rank": 32, "use_mem_rope": True},
    ),
    "tiny mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "state_size": 8}),
    "tiny mamba2": (
        "mamba2",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "state_size": 16, "num_heads": 4}
        | {"head_dim": 16, "n_groups": 1, "chunk_size": 16},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run. batch: rows of a micro-batch; rows: of a step, over all GPUs; resume: from the checkpoint of a mode."""

    kind: str
    method: str
    mode: str  # alone, ddp, fsdp2, offload (fsdp2 with weights and optimizer in host memory)
    processes: int
    batch: int
    rows: int
    steps: int
    length: int
    save_at: int = 0
    resume: str = ""
    checkpointing: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.method}-{self.mode}-{self.processes}{'-from-' + self.resume if self.resume else ''}"


def plan_two(tiny: bool) -> list[Job]:
    jobs = []
    for kind in ("tiny mamba", "tiny mamba2") if tiny else ("mamba-1.4b", "mamba2-1.3b"):
        size = {"steps": 6, "length": 64, "save_at": 3} if tiny else {"steps": 20, "length": 2048, "save_at": 10}
        for method in ("full", "LoRA"):
            for mode, processes in (("alone", 1), ("ddp", 2), ("fsdp2", 2)):
                saved = size if processes == 2 else {**size, "save_at": 0}
                jobs.append(Job(kind, method, mode, processes, batch=4, rows=8, **saved))
            for mode in ("ddp", "fsdp2"):
                jobs.append(Job(kind, method, "alone", 1, batch=4, rows=8, resume=mode, **{**size, "save_at": 0}))
    if not tiny:
        seven = {"kind": "codestral-7b", "batch": 2, "rows": 4, "length": 2048}
        for mode, processes in (("alone", 1), ("ddp", 2), ("fsdp2", 2)):
            jobs.append(Job(method="LoRA", mode=mode, processes=processes, steps=8, **seven))
        jobs.append(Job(method="full", mode="fsdp2", processes=2, steps=5, checkpointing=True, **seven))
    return jobs


def plan_one(tiny: bool) -> list[Job]:
    kinds = ("tiny mamba", "tiny mamba2") if tiny else ("mamba", "mamba2", "falcon_mamba", "zamba2")
    size = {"steps": 4, "length": 64} if tiny else {"steps": 12, "length": 1024}
    jobs = [
        Job(kind, method, mode, 1, batch=4, rows=4, **size)
        for kind in kinds
        for mode in ("alone", "fsdp2")
        for method in ("full", "LoRA")
    ]
    return [*jobs, Job(kinds[0], "full", "offload", 1, batch=4, rows=4, **size)]
