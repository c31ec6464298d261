"""Training speed and memory: ours, stock, and mamba_ssm's own model, side by side on one card.

    python benchmarks/train_speed.py                              # every row; some minutes, part of it Triton's tuning
    python benchmarks/train_speed.py --rows mamba-1.4b-full mamba-1.4b-lora --results speed.json
    python benchmarks/train_speed.py --table speed.json           # the table of what was measured
    python benchmarks/train_speed.py --profile --rows mamba-130m-full  # and where a step's time on the GPU goes
    python benchmarks/train_speed.py --tiny --device cpu          # tries the script itself

Variants of a row, all in one run:
- stock: TRL's SFTTrainer on transformers' model with the fused kernels; with LoRA, PEFT's adapters on all projections.
  Fused, adapters behind the kernel are dead, and documents of a row see each other.
- stock, made right: the same with the fused call switched off, so that adapters learn; documents still leak.
- mamba_ssm: MambaLMHeadModel in a bare loop (full training only).
- ours: this project's trainer and kernels as a recipe with packing has them: documents kept apart, blocks recorded in
  CUDA graphs. Launched: with kernels.graphs: false.
All in bfloat16 with float32 masters for what is trained, torch's fused AdamW, the same batch, no gradient
checkpointing, losses logged at the end. Time is wall-clock over several steps after three; the first step, where Triton
tunes and compiles, is printed apart. Activations: the most memory in use, less weights, optimizer state and finished
gradients; all that a graph keeps for itself counts. MFU: 6 FLOPs a trained parameter and token, 4 a frozen one, over
the card's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed_meter import GIB, Meter, MeterCallback
from speed_profile import StepProfile, profile_text
from speed_rows import (
    MODELS,
    ROWS,
    TARGETS,
    Row,
    fused_call,
    gsm8k_documents,
    new_model,
    pack_documents,
    random_documents,
    their_model,
    tiny_row,
)
from torch import nn

VARIANTS = ("stock", "stock, made right", "mamba_ssm", "ours, launched", "ours")
LORA = {"r": 16, "lora_alpha": 32}
Packed = list[list[np.ndarray]]


class NotApplicable(Exception):
    """A variant that a row has not, with the reason."""


def training_arguments(row: Row, batch: int, device: str, folder: str) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=1000,  # the meter ends it
        max_length=row.length,
        bf16=True,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
        activation_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def train_stock(row: Row, packed: Packed, meter: Meter, arguments: argparse.Namespace, fused: bool) -> nn.Module:
    """Rows of whole length, or padded batches of single documents where the row compares packing with that."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import SFTTrainer

    from ssm_tune.adapter import guard_lifted

    model_type = MODELS[row.model][0]
    model = new_model(row, arguments.device, arguments.tiny)
    if row.method == "lora":
        with guard_lifted():
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS[model_type], **LORA))
    if row.gsm8k:
        rows, batch = [d.tolist() for documents in packed for d in documents], single_documents(row, packed)
    else:
        rows, batch = [np.concatenate(documents).tolist() for documents in packed], row.batch
    with tempfile.TemporaryDirectory() as folder, fused_call(model_type, fused):
        trainer = SFTTrainer(
            model=model,
            args=training_arguments(row, batch, arguments.device, folder),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=padding_tokenizer(),
            callbacks=[MeterCallback(meter)],
        )
        trainer.train()
    return model


def train_ours(row: Row, packed: Packed, meter: Meter, arguments: argparse.Namespace, graphs: bool) -> nn.Module:
    from datasets import Dataset

    from ssm_tune.adapter import apply_adapter
    from ssm_tune.data import Collator
    from ssm_tune.mixers import patch_model
    from ssm_tune.mixers.layer_graphs import layer_graphs
    from ssm_tune.model import set_trainable
    from ssm_tune.recipe import AdapterSection
    from ssm_tune.run_folder import RunFolder
    from ssm_tune.trainer import SSMTrainer

    model = patch_model(new_model(row, arguments.device, arguments.tiny))
    set_trainable(model, "full" if row.method == "full" else "adapter")
    if row.method == "lora":
        model = apply_adapter(model, AdapterSection(method="lora", targets="all", **LORA), seed=0)
    columns = {
        "input_ids": [np.concatenate(documents).tolist() for documents in packed],
        "seq_lengths": [[len(d) for d in documents] for documents in packed],
        "rows": [[i] for i in range(len(packed))],
    }
    columns["labels"] = columns["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        settings = training_arguments(row, row.batch, arguments.device, f"{folder}/run/checkpoints")
        settings.accelerator_config.non_blocking = arguments.device != "cpu"  # as ssm_tune.training_arguments has it
        trainer = SSMTrainer(
            model,
            settings,
            folder=RunFolder.create(f"{folder}/run"),
            tokenizer=padding_tokenizer(),
            train_dataset=Dataset.from_dict(columns),
            eval_dataset=None,
            collator=Collator(0, fixed_length=row.length),
            callbacks=[MeterCallback(meter)],
        )
        with layer_graphs(graphs):
            trainer.train()
    return model


def train_theirs(row: Row, packed: Packed, meter: Meter, arguments: argparse.Namespace) -> nn.Module:
    if row.method != "full" or row.gsm8k or arguments.tiny:
        raise NotApplicable("full training of whole rows only")
    model = their_model(row, arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.from_numpy(np.stack([np.concatenate(documents) for documents in packed])).to(arguments.device)
    for step in range(1000):
        meter.step_begins(model)
        batch = rows[torch.arange(row.batch) + step * row.batch % len(rows)]
        with torch.autocast(arguments.device, torch.bfloat16):
            logits = model(batch).logits
        labels = batch[:, 1:].flatten()
        torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels).backward()
        del logits
        meter.backward_ended()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if meter.step_ended():
            break
    return model


def padding_tokenizer() -> Any:
    """The smallest tokenizer that a trainer accepts; nothing is tokenised with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def single_documents(row: Row, packed: Packed) -> int:
    """Documents of a padded batch: as many as a batch of packed rows holds on average."""
    return max(1, round(row.batch * sum(map(len, packed)) / len(packed)))


def counted_tokens(row: Row, packed: Packed, variant: str) -> float:
    """Tokens of a step that are no padding."""
    tokens = sum(len(d) for documents in packed for d in documents)
    if row.gsm8k and not variant.startswith("ours"):
        return tokens / sum(map(len, packed)) * single_documents(row, packed)
    return tokens / len(packed) * row.batch


def flops_per_token(model: nn.Module) -> int:
    return sum((6 if p.requires_grad else 4) * p.numel() for p in model.parameters())


def measure(row: Row, variant: str, packed: Packed, arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant of a row, as an entry of the results."""
    from ssm_tune.throughput import PEAK_FLOPS

    trainers: dict[str, Callable[[Meter], nn.Module]] = {
        "stock": lambda meter: train_stock(row, packed, meter, arguments, fused=True),
        "stock, made right": lambda meter: train_stock(row, packed, meter, arguments, fused=False),
        "mamba_ssm": lambda meter: train_theirs(row, packed, meter, arguments),
        "ours, launched": lambda meter: train_ours(row, packed, meter, arguments, graphs=False),
        "ours": lambda meter: train_ours(row, packed, meter, arguments, graphs=True),
    }
    step_profile = StepProfile(arguments.device == "cuda") if arguments.profile else None
    meter = Meter(arguments.seconds, most=2 if arguments.tiny else 20, step_profile=step_profile)
    found: dict[str, Any] = {"row": row.name, "variant": variant, "when": time.strftime("%Y-%m-%d %H:%M")}
    try:
        model = trainers[variant](meter)
    except NotApplicable:
        return {}
    except (torch.OutOfMemoryError, ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        traceback.print_exc()
        return found | {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
    rate = counted_tokens(row, packed, variant) / meter.timed
    profiled = {} if step_profile is None else {"profile": step_profile.found}
    return found | {
        "device": name,
        "torch": torch.__version__,
        "ms": meter.timed * 1e3,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(model) / peak if peak else None,
        "peak_gib": meter.peak / GIB,
        "activations_gib": meter.activations / GIB,
        "first_step_seconds": meter.first_step,
        "steps": meter.timed_steps,
        **profiled,
    }


# -- results -------------------------------------------------------------------------------------------------------


def latest(results: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["row"], entry["variant"]): entry for entry in results}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; ratios are against stock (fused) of the same row."""
    lines = [
        "| row | variant | ms/step | tokens/s | MFU | peak GiB | activations GiB | tokens/s over stock "
        "| activations of stock's | first step s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = latest(results)
    for name, row in ROWS.items():
        stock = found.get((name, "stock"), {})
        for variant in VARIANTS:
            entry = found.get((name, variant))
            if entry is None:
                continue
            if "problem" in entry:
                lines.append(f"| {name} | {variant} | {entry['problem']} |" + " |" * 7)
                continue
            ratio = share = ""
            if variant != "stock" and stock.get("tokens_per_second"):
                ratio = f"{entry['tokens_per_second'] / stock['tokens_per_second']:.2f}"
                if variant.startswith("ours") and row.target:
                    ratio += f" (target {row.target})"
                if stock["activations_gib"]:
                    share = f"{entry['activations_gib'] / stock['activations_gib']:.2f}"
            mfu = "" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
            lines.append(
                f"| {name} | {variant} | {entry['ms']:.1f} | {entry['tokens_per_second']:,.0f} | {mfu} "
                f"| {entry['peak_gib']:.1f} | {entry['activations_gib']:.1f} | {ratio} | {share} "
                f"| {entry['first_step_seconds']:.1f} |"
            )
    return "\n".join(lines)


def append(file: Path, entry: dict[str, Any]) -> list[dict[str, Any]]:
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    results.append(entry)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def batches(row: Row, arguments: argparse.Namespace) -> Packed:
    vocabulary = 64 if arguments.tiny else MODELS[row.model][1]["vocab_size"]
    if row.gsm8k and arguments.gsm8k is not None:
        documents = gsm8k_documents(arguments.gsm8k, arguments.tokenizer)
        return pack_documents([document % vocabulary for document in documents], row.length)
    packed = random_documents(row, vocabulary, rows=row.batch * 8)
    if row.gsm8k:  # without the data: documents of about that length
        return pack_documents([d for documents in packed for d in documents], row.length)
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "all"], default=["all"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--results", type=Path, default=Path("train_speed.json"), help="appended to")
    parser.add_argument("--table", type=Path, help="print the table of these results and end")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed steps for each variant, about")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's rows, a .jsonl file with question and answer")
    parser.add_argument("--tokenizer", default="EleutherAI/gpt-neox-20b", help="for GSM8K")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models and rows, to try the script itself")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="then two steps under torch's profiler, of which the second is shown by kernels; it stays attached, so "
        "for times to quote leave it out",
    )
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text(encoding="utf-8"))))
        return
    if arguments.device == "cuda":
        from ssm_tune.kernels.tuning import keep_tuning

        keep_tuning()
    results: list[dict[str, Any]] = []
    for name in ROWS if "all" in arguments.rows else arguments.rows:
        row = tiny_row(ROWS[name]) if arguments.tiny else ROWS[name]
        packed = batches(row, arguments)
        for variant in arguments.variants:
            begin = time.perf_counter()
            entry = measure(row, variant, packed, arguments)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            if entry:
                results = append(arguments.results, entry)
                shown = entry.get("problem") or f"{entry['ms']:.1f} ms, first step {entry['first_step_seconds']:.1f} s"
                print(f"{name}, {variant}: {shown}; {time.perf_counter() - begin:.0f} s in all", flush=True)
            if "profile" in entry:
                print(profile_text(entry["profile"], entry["ms"]), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
