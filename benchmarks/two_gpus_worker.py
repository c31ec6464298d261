"""The worker of two_gpus.py: some runs of one kind, one after the other in one process group."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from two_gpus_jobs import SHAPES, Job


def work(jobs: list[Job], folder: Path, use_cpu: bool, graphs: bool | None, profiled: int) -> None:
    """graphs: not with checkpointing or offloading; None: as a recipe that leaves it open. profiled: a step, 0: none;
    what rank 0 does in it is written beside the figures, as text."""
    import torch

    rank = int(os.environ.get("RANK", "0"))
    for job in jobs:
        began = time.perf_counter()
        try:
            found = run(job, folder, use_cpu, graphs, profiled if rank == 0 else 0)
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


def run(job: Job, folder: Path, use_cpu: bool, graphs: bool | None, profiled: int) -> dict[str, Any]:
    """Losses and speed of one job."""
    import torch
    from speed_profile import StepProfile, profile_text
    from transformers import TrainerCallback

    from ssm_tune.callbacks import StartAndResume
    from ssm_tune.data import Collator
    from ssm_tune.kernel_settings import choose_graphs
    from ssm_tune.mixers.layer_graphs import layer_graphs
    from ssm_tune.peers import current, join
    from ssm_tune.recipe import KernelsSection, Recipe
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
    profile = StepProfile(not use_cpu)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == job.save_at
            if job.resume and "resume" not in seconds:
                seconds["resume"] = time.perf_counter() - seconds["begun"]
            if profile.running and profile.step_ended():
                text = profile_text(profile.found, profile.found.get("wall_ms", 0.0))
                (folder / f"{job.name}.profile.txt").write_text(f"{text}\n{profile.on_host}")
            if profiled and state.global_step == profiled - 2:
                profile.begin()

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
    is_sharded = sharding is not None
    recipe = Recipe(kernels=KernelsSection(graphs=None if job.checkpointing or job.mode == "offload" else graphs))
    chosen, _ = choose_graphs(recipe, trainer.model, trainer.args, is_packed=True, is_sharded=is_sharded)
    with layer_graphs(chosen):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    history = [line for line in trainer.state.log_history if "tokens_per_second" in line]
    peak = 0.0 if use_cpu else torch.cuda.max_memory_allocated() / 2**30
    peers = current()
    if peers is not None:
        peers.wait()
    return {
        "losses": {line["step"]: line["loss"] for line in history},
        "tokens": statistics.median(line["tokens_per_second"] for line in history[min(2, len(history) - 1) :]),
        "peak": peak,
        "graphs": chosen,
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

    arguments = SFTConfig(
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
        logging_steps=2,  # a log waits for the GPU
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    arguments.accelerator_config.non_blocking = not use_cpu  # as ssm_tune.training_arguments has it
    return arguments


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
