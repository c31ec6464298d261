"""DDP and FSDP2 over NCCL beside one GPU: losses, speed, memory, checkpoints. Random weights of published shapes.

    python benchmarks/two_gpus.py                  two GPUs (issue's table): about 12 minutes
    python benchmarks/two_gpus.py --plan one-gpu   one GPU: the fsdp2 path beside the plain one, small shapes, 2 minutes
    python benchmarks/two_gpus.py --tiny           the same code on the CPU by gloo, tiny shapes

Every run of a kind and method takes the same global batches of packed rows (bf16 compute, AdamW; full fine-tuning with
float32 masters, LoRA r 16 on a bfloat16 base). Per GPU the micro-batch is the same; one GPU takes twice as many.
Printed: the largest relative difference of the losses from one GPU over all steps, tokens/s per GPU (median of the
steps after the third) and against one GPU, peak memory, seconds to write a checkpoint, and, from it, seconds until one
GPU has taken its next step, with the difference of the losses from then on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
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


# -- a worker: some jobs of one kind, one after the other in one process group ----------------------------------------


def work(jobs: list[Job], folder: Path, use_cpu: bool) -> None:
    import torch

    rank = int(os.environ.get("RANK", "0"))
    for job in jobs:
        began = time.perf_counter()
        try:
            found = run(job, folder, use_cpu)
        except Exception as error:
            if job.processes > 1:
                raise  # the other process waits for this one
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        found["seconds"] = time.perf_counter() - began
        if rank == 0:
            (folder / f"{job.name}.json").write_text(json.dumps(found))
            print(f"{job.name}: {found['seconds']:.0f} s {found.get('error', '')}", file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run(job: Job, folder: Path, use_cpu: bool) -> dict[str, Any]:
    """Losses and speed of one job."""
    import torch
    from transformers import TrainerCallback

    from ssm_tune.callbacks import StartAndResume
    from ssm_tune.data import Collator
    from ssm_tune.peers import current, join
    from ssm_tune.run_folder import RunFolder
    from ssm_tune.sharding import Sharding
    from ssm_tune.trainer import SSMTrainer

    os.environ["SSM_TUNE_SHARDED"] = str(job.mode in ("fsdp2", "offload"))
    os.environ["FSDP_OFFLOAD_PARAMS"] = str(job.mode == "offload")
    sharding = Sharding.from_environment()
    join({"use_cpu": use_cpu}, alone=sharding is not None)
    device = torch.device("cpu") if use_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if not use_cpu:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    checkpoint = folder / f"{job.kind}-{job.method}-{job.resume}-2" / "checkpoints" if job.resume else None
    if checkpoint is not None:
        checkpoint = RunFolder(checkpoint.parent).last_checkpoint()
    output = RunFolder(folder / job.name)
    output.path.mkdir(exist_ok=True)
    seconds: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == job.save_at
            if job.resume and "resume" not in seconds:
                seconds["resume"] = time.perf_counter() - seconds["begun"]

    start = StartAndResume(None if checkpoint is None else str(checkpoint))
    trainer = SSMTrainer(
        make_model(job, device),
        make_arguments(job, output.path, use_cpu),
        folder=output,
        tokenizer=make_tokenizer(),
        train_dataset=make_rows(job),
        eval_dataset=None,
        collator=Collator(0, fixed_length=job.length),
        callbacks=[start, Clock()],
        sharding=sharding,
        checkpoint=checkpoint,
    )
    start.trainer = trainer
    save = trainer._save_checkpoint

    def timed_save(*arguments: Any) -> None:
        began = time.perf_counter()
        save(*arguments)
        seconds["save"] = time.perf_counter() - began

    trainer._save_checkpoint = timed_save
    seconds["begun"] = time.perf_counter()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    history = [line for line in trainer.state.log_history if "tokens_per_second" in line]
    peak = 0.0 if use_cpu else torch.cuda.max_memory_allocated() / 2**30
    peers = current()
    if peers is not None:
        peers.wait()
    return {
        "losses": {line["step"]: line["loss"] for line in history},
        "tokens": statistics.median(line["tokens_per_second"] for line in history[min(3, len(history) - 1) :]),
        "peak": peak,
        **{key: seconds[key] for key in ("save", "resume") if key in seconds},
    }


def make_model(job: Job, device: Any) -> Any:
    """Random weights, made on the device; full fine-tuning in float32, LoRA on bfloat16 (float32 on a CPU)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ssm_tune.adapter import apply_adapter
    from ssm_tune.mixers import patch_model
    from ssm_tune.model import set_trainable
    from ssm_tune.recipe import AdapterSection

    model_type, dimensions = SHAPES[job.kind]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{"initializer_range": 0.02, **ids, **dimensions})
    low = job.method == "LoRA" and device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if low else torch.float32)
    patch_model(model)
    set_trainable(model, "adapter" if job.method == "LoRA" else "full")
    if job.method == "LoRA":
        model = apply_adapter(model, AdapterSection(r=16, lora_alpha=32, targets="all"), base_name="random", seed=0)
    return model


def make_arguments(job: Job, output: Path, use_cpu: bool) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(output / "checkpoints"),
        max_steps=job.steps,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.rows // (job.batch * job.processes),
        learning_rate=1e-4,
        max_length=job.length,
        bf16=not use_cpu,
        use_cpu=use_cpu,
        activation_checkpointing=job.checkpointing,
        ddp_find_unused_parameters=False if job.processes > 1 else None,
        dataloader_pin_memory=not use_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_rows(job: Job) -> Any:
    """Packed rows of random tokens: three documents each, and a pattern that can be learned."""
    import numpy as np
    from datasets import Dataset

    generator = np.random.default_rng(0)
    vocabulary = SHAPES[job.kind][1]["vocab_size"]
    lengths = [job.length // 2, job.length // 4, job.length - job.length // 2 - job.length // 4]
    rows = []
    for number in range(job.rows * job.steps):
        words = generator.integers(3, vocabulary, 64)
        tokens = words[generator.integers(0, 64, job.length)].tolist()
        rows.append({"input_ids": tokens, "labels": tokens, "seq_lengths": lengths, "rows": [number] * 3})
    return Dataset.from_list(rows)


# -- the plan --------------------------------------------------------------------------------------------------------


def execute(jobs: list[Job], folder: Path, use_cpu: bool, limit: float, *, together: bool = False) -> None:
    """Each (kind, processes) in processes of its own, which end with it; checkpoints are deleted when read.

    together: all in one process, which spares starting it.
    """
    if together:
        launch(jobs, folder, use_cpu, limit)
        return
    groups: dict[tuple[str, bool, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.kind, bool(job.resume), job.processes), []).append(job)
    kinds = list(dict.fromkeys(job.kind for job in jobs))
    for key in sorted(groups, key=lambda key: (kinds.index(key[0]), *key[1:])):
        launch(groups[key], folder, use_cpu, limit)
        last = not any(job.kind == key[0] and job.resume for job in jobs) or key[1]
        for path in folder.glob(f"{key[0]}-*/checkpoints") if last else []:
            shutil.rmtree(path)


def launch(jobs: list[Job], folder: Path, use_cpu: bool, limit: float) -> None:
    count = jobs[0].processes
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_CACHE_AUTOTUNING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    environment["CUDA_VISIBLE_DEVICES"] = "" if use_cpu else ",".join(visible)
    starter = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *starter, __file__, "--worker", str(folder), *(["--tiny"] if use_cpu else [])]
    # In a group of its own: what hangs is ended with all its processes.
    process = subprocess.Popen(
        [*command, "--jobs", json.dumps([asdict(job) for job in jobs])], env=environment, start_new_session=True
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        code = f"more than {limit:.0f} s"
    if code:
        print(f"FAILED ({code}): {', '.join(job.name for job in jobs)}", flush=True)


def report(jobs: list[Job], folder: Path) -> int:
    found = {job.name: json.loads((folder / f"{job.name}.json").read_text()) for job in jobs if exists(job, folder)}
    head = (
        "kind",
        "method",
        "mode",
        "GPUs",
        "losses",
        "tok/s/GPU",
        "of one",
        "peak GiB",
        "save s",
        "resume s",
        "after",
    )
    print(" ".join(f"{word:>{width}}" for word, width in zip(head, COLUMNS, strict=True)))
    failed = 0
    for job in jobs:
        if job.resume:
            continue
        ours = found.get(job.name)
        failed += ours is None or "error" in ours
        line = [job.kind, job.method, job.mode, job.processes]
        if ours is None or "error" in ours:
            print(
                " ".join(f"{v!s:>{w}}" for v, w in zip(line, COLUMNS, strict=False)),
                "failed",
                (ours or {}).get("error", ""),
            )
            continue
        one = found.get(Job(**{**asdict(job), "mode": "alone", "processes": 1, "save_at": 0}).name)
        resumed = found.get(Job(**{**asdict(job), "mode": "alone", "processes": 1, "resume": job.mode}).name)
        line += [differ(ours, one), f"{ours['tokens'] / job.processes:,.0f}"]
        line += [f"{ours['tokens'] / job.processes / one['tokens']:.2f}" if one and "error" not in one else "-"]
        line += [f"{ours['peak']:.1f}", f"{ours['save']:.1f}" if "save" in ours else "-"]
        line += [f"{resumed['resume']:.1f}" if resumed and "resume" in resumed else "-", differ(resumed, ours)]
        print(" ".join(f"{value!s:>{width}}" for value, width in zip(line, COLUMNS, strict=True)))
    return failed


COLUMNS = (13, 7, 6, 5, 9, 10, 7, 9, 7, 9, 9)


def exists(job: Job, folder: Path) -> bool:
    return (folder / f"{job.name}.json").exists()


def differ(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """The largest relative difference of the losses of the steps that both took."""
    if not ours or not other or ours is other or "losses" not in ours or "losses" not in other:
        return "-"
    both = ours["losses"].keys() & other["losses"].keys()
    return f"{max(abs(ours['losses'][s] - other['losses'][s]) / other['losses'][s] for s in both):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("two-gpus", "one-gpu"), default="two-gpus")
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--limit", type=float, default=400, help="seconds for the runs of one kind on as many GPUs")
    parser.add_argument("--output", type=Path, help="keep the figures here, one JSON file a run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work([Job(**job) for job in json.loads(arguments.jobs)], arguments.worker, arguments.tiny)
        return 0
    jobs = (plan_one if arguments.plan == "one-gpu" else plan_two)(arguments.tiny)
    jobs = [job for job in jobs if arguments.kinds is None or job.kind in arguments.kinds]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        execute(jobs, folder, arguments.tiny, arguments.limit, together=arguments.plan == "one-gpu")
        return report(jobs, folder)


if __name__ == "__main__":
    sys.exit(main())
