"""Do packed rows train as their documents do? Loss curves of the real trainer, packed and not; prints one table.

    python benchmarks/packed_curve.py --data rows.jsonl               # question and answer rows; a GPU: one minute
    python benchmarks/packed_curve.py --data rows.jsonl --device cpu --models mamba --steps 5

Every optimizer step has the same documents in three runs of the same small random model: padded, in one batch; padded,
in another order and accumulated over two batches (what that changes is the noise of the precision); and packed
best-fit into two rows. The table has the largest relative differences of the loss over all steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from ssm_tune.data.collator import Collator
from ssm_tune.data.packing import pack
from ssm_tune.mixers import patch_model
from ssm_tune.recipe import Recipe
from ssm_tune.run_folder import RunFolder
from ssm_tune.trainer import SSMTrainer
from ssm_tune.training_arguments import build_arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from spared_tuning import spare_tuning
from tiny import EOS, VOCAB_SIZE, carry_state, tiny_tokenizer

DOCUMENTS = 8  # in an optimizer step
_IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_chunk_size": 64}
# Heads as in equivalence.py: whichever runs second finds its Triton kernels compiled.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"hidden_size": 256, "num_hidden_layers": 4}),
    "mamba2": (
        "mamba2",
        {
            **{"hidden_size": 128, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 32, "state_size": 64},
            **{"n_groups": 1, "chunk_size": 64},
        },
    ),
    "bamba": (
        "bamba",
        {
            **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"num_hidden_layers": 4, "attn_layer_indices": [1], **_HEADS},
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--characters", type=int, default=600, help="longest document, a token each (default 600)")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    if arguments.device == "cuda":
        spare_tuning()
    documents = read_documents(arguments.data, arguments.steps, arguments.characters)
    rows = []
    for name in arguments.models:
        begin = time.monotonic()
        curves = {
            kind: train(name, arrange(documents, kind), kind, arguments.device)
            for kind in ("padded", "again", "packed")
        }
        noise, difference = (largest_difference(curves[kind], curves["padded"]) for kind in ("again", "packed"))
        first, last = curves["padded"][0], curves["padded"][-1]
        rows.append(
            f"| {name} | {first:.3f} to {last:.3f} | {difference:.1e} | {noise:.1e} | {difference / noise:.2f} |"
        )
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    precision = "bfloat16 autocast" if arguments.device == "cuda" else "float32"
    print(f"\n{len(documents)} steps of {DOCUMENTS} documents, {precision}, {arguments.device}\n")
    print("| model | loss | packed - padded | noise | ratio |\n|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


def read_documents(path: Path, steps: int, longest: int) -> list[list[dict[str, Any]]]:
    """For each step the documents, tokens and labels, that fit into two rows of one length and not into one."""
    tokenizer = tiny_tokenizer()
    found: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("question", "answer"))
            ids = [*(prompt + answer)[: longest - 1], EOS]
            labels = ([-100] * len(prompt) + ids[len(prompt) :])[: len(ids)]
            if len(prompt) < longest - 1:
                waiting.append({"input_ids": ids, "labels": labels, "seq_lengths": [len(ids)], "rows": [number]})
            if len(waiting) == DOCUMENTS:
                if len(packed_rows(waiting, capacity(longest))) == 2:
                    found.append(waiting)
                waiting = []
            if len(found) == steps:
                return found
    raise SystemExit(f"{path} holds documents for {len(found)} of {steps} steps")


def capacity(longest: int) -> int:
    """The length of packed rows."""
    return longest * DOCUMENTS // 2


def packed_rows(documents: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    import numpy as np

    rows = []
    for members in pack(np.array([len(document["input_ids"]) for document in documents]), length, seed=0):
        row: dict[str, Any] = {"input_ids": [], "labels": [], "seq_lengths": [], "rows": []}
        for member in members:
            for key, values in documents[member].items():
                row[key] = row[key] + values
        rows.append(row)
    return rows


def arrange(documents: list[list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    """The rows of all steps, one after the other."""
    longest = max(len(document["input_ids"]) for step in documents for document in step)
    rows = []
    for number, step in enumerate(documents):
        if kind == "packed":
            step = packed_rows(step, capacity(longest))
        elif kind == "again":
            step = random.Random(number).sample(step, len(step))
        rows += step
    return rows


def train(name: str, rows: list[dict[str, Any]], kind: str, device: str) -> list[float]:
    """The loss of every step."""
    model_type, dimensions = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_IDS, **dimensions))
    carry_state(model)
    batch, accumulation = {"padded": (DOCUMENTS, 1), "again": (DOCUMENTS // 2, 2), "packed": (2, 1)}[kind]
    training = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": len(rows) // (batch * accumulation),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
    }
    longest = max(len(row["input_ids"]) for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        settings, _ = build_arguments(Recipe(training=training), "sft", Path(scratch), has_eval=False)
        trainer = SSMTrainer(
            patch_model(model),
            settings,
            folder=RunFolder(Path(scratch)),
            tokenizer=tiny_tokenizer(),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=None,
            collator=Collator(0, fixed_length=longest if kind == "packed" else None),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def largest_difference(curve: list[float], of: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(curve, of, strict=True))


if __name__ == "__main__":
    sys.exit(main())
