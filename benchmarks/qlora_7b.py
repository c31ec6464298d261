"""QLoRA of 7B models on one GPU: peak memory, loss, and whether the packed weights compute what they stand for.

    python benchmarks/qlora_7b.py codestral --rows gsm8k.jsonl      # or falcon; random weights, nothing downloaded
    python benchmarks/qlora_7b.py codestral --layers 2 --narrow --device cpu --steps 2 --rows gsm8k.jsonl   # a trial

Two parts. "paths": a model of the full width and few layers, loaded in 4 and 8 bits by `load_model`, against itself
with its weights turned back into plain ones, in training, in evaluation, and token by token with a cache; beside it,
how far quantisation moved the logits from those of the weights that were loaded. "training": all layers in 4 bits,
rows of 2048 tokens, batch 1, LoRA on every projection, gradient checkpointing, as `tune` does it.

The weights are drawn at random on the device when the loader asks for them, so that no 14 GB lie on a disk; everything
after that is the way of a real checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, DynamicCache

import ssm_tune.model
from ssm_tune import tune
from ssm_tune.kernels.tuning import without_tuning
from ssm_tune.layouts import Checkpoint, StoredTensor, open_checkpoint
from ssm_tune.mixers import patch_model, unpatch_model
from ssm_tune.model import load_model, meta_model, model_report

GIB = 2**30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # mistralai/Mamba-Codestral-7B-v0.1 and tiiuae/falcon-mamba-7b
    "codestral": (
        "mamba2",
        {
            **{"hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "state_size": 128},
            **{"n_groups": 8, "vocab_size": 32768, "chunk_size": 256, "tie_word_embeddings": False},
        },
    ),
    "falcon": (
        "falcon_mamba",
        {
            **{"hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192, "expand": 2, "state_size": 16},
            **{"time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False},
        },
    ),
}
NARROW = {
    "codestral": {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "state_size": 16, "vocab_size": 8192},
    "falcon": {"hidden_size": 128, "intermediate_size": 256, "time_step_rank": 8, "vocab_size": 8192},
}
TOKENIZER = Path(__file__).parents[1] / "recipes" / "models" / "demo-base"  # any one whose tokens fit


class RandomCheckpoint(Checkpoint):
    """A checkpoint whose tensors are drawn when they are read; the same for the same name, whoever asks."""

    device = torch.device("cpu")

    def weights(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(
                shape=tuple(tensor.shape),
                dtype=torch.bfloat16,
                file=Path("random"),
                name=name,
                _read=self._reader(name, tuple(tensor.shape)),
            )
            for name, tensor in meta_model(self.config).state_dict().items()
        }

    def _reader(self, name: str, shape: tuple[int, ...]) -> Any:
        return lambda index: self._draw(name, shape)[index]

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        leaf = name.rpartition(".")[2]

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=generator, device=self.device)

        if leaf == "A_log":
            value = uniform(1, 16).log()
        elif leaf == "dt_bias" or name.endswith("dt_proj.bias"):
            value = torch.expm1(torch.exp(uniform(-6.9, -2.3))).log()  # steps of 1e-3 to 1e-1
        elif leaf == "D" or ("norm" in name and leaf == "weight"):
            value = torch.ones(shape, device=self.device)
        elif leaf == "bias":
            value = torch.zeros(shape, device=self.device)
        else:
            inputs = shape[-1] if len(shape) > 1 else 1
            scale = 0.02 if "embed" in name else inputs**-0.5
            value = torch.randn(shape, generator=generator, device=self.device) * scale
        return value.bfloat16()


@contextmanager
def random_checkpoint(name: str, device: torch.device, layers: int | None, narrow: bool) -> Iterator[str]:
    """A folder with a config alone, which `load_model` takes for a checkpoint."""
    model_type, sizes = SHAPES[name]
    sizes = {**sizes, **(NARROW[name] if narrow else {}), **({"num_hidden_layers": layers} if layers else {})}

    def open_random(*args: Any, **kwargs: Any) -> Checkpoint:
        found = open_checkpoint(*args, **kwargs)
        drawn = RandomCheckpoint(found.source, found.layout, found.config)
        drawn.device = device
        return drawn

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ssm_tune.model, "open_checkpoint", open_random):
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        AutoConfig.for_model(model_type, **{**ids, **sizes}).save_pretrained(folder)
        yield folder


# -- what packed weights compute -----------------------------------------------------------------------------------


def token_by_token(model: nn.Module, tokens: Tensor, prompt: int = 32) -> Tensor:
    """Logits of the tokens after a prompt, one at a time with a cache, as generate computes them."""
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :prompt], cache=cache, use_cache=True)
    logits = []
    for place in range(prompt, prompt + 8):
        logits.append(model(input_ids=tokens[:, place : place + 1], cache=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def logits_on_each_path(model: nn.Module) -> dict[str, Tensor]:
    """In training (with the training kernels), in evaluation, and token by token."""
    device = next(model.parameters()).device
    tokens = torch.randint(3, 8000, (1, 256), generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        found["training"] = model.train()(input_ids=tokens, use_cache=False).logits.float()
    found["evaluation"] = model.eval()(input_ids=tokens, use_cache=False).logits.float()
    found["token by token"] = token_by_token(model.eval(), tokens).float()
    return found


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def compare_paths(name: str, arguments: argparse.Namespace, device: torch.device) -> int:
    """Prints one table; returns how many lines are wrong."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    wrong, rows = 0, []
    with random_checkpoint(name, device, min(arguments.layers or 4, 4), arguments.narrow) as folder:
        exact = logits_on_each_path(load_model(folder, dtype=dtype, trainable="none", device=device))
        for bits in (4, 8):
            keys = {f"load_in_{bits}bit": True}
            model = load_model(folder, dtype=dtype, trainable="none", device=device, **keys)
            packed = logits_on_each_path(model)
            model = patch_model(unpatch_model(model).dequantize(dtype=getattr(torch, dtype)))
            plain = logits_on_each_path(model)
            del model
            for path in exact:
                off, moved = difference(packed[path], plain[path]), difference(plain[path], exact[path])
                # In 8 bits the activations are rounded too, about as much as the weights.
                good = off < (moved if bits == 4 else 3 * moved)
                wrong += not good
                line = f"| {name} | {bits} | {path} | {off:.1e} | {moved:.1e} | {'ok' if good else 'WRONG'} |"
                rows.append(line)
    head = "| model | bits | path | packed against dequantised | dequantised against loaded | |"
    print("\n".join([head, "| --- | --- | --- | --- | --- | --- |", *rows]), flush=True)
    return wrong


# -- training ------------------------------------------------------------------------------------------------------


def train(name: str, arguments: argparse.Namespace, device: torch.device) -> int:
    """Prints the line of one training; returns 1 if it misses what is asked of it."""
    rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()[:2000]]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    with random_checkpoint(name, device, arguments.layers, arguments.narrow) as folder:
        _reset_peak(device)
        begun = time.perf_counter()
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        model = load_model(folder, dtype=dtype, load_in_4bit=True, device=device)
        report, loaded = model_report(model), time.perf_counter() - begun
        print(
            f"{name}: {report.total / 1e9:.2f}B parameters in {report.memory / GIB:.2f} GiB, loaded in {loaded:.0f} s, "
            f"peak {_peak(device):.2f} GiB",
            flush=True,
        )
        _reset_peak(device)
        begun = time.perf_counter()
        run = tune(
            *(model, rows),
            tokenizer=tokenizer,
            output_dir=Path(folder) / "run",
            **{"max_steps": arguments.steps, "max_length": arguments.length, "packing": True, "seed": 0},
            **{"per_device_train_batch_size": 1, "gradient_checkpointing": True, "learning_rate": 1e-3},
            **{"logging_steps": 1, "save_strategy": "no", "warmup_steps": 5, "r": 16, "lora_alpha": 32},
        )
        seconds = time.perf_counter() - begun
        lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    peak = _peak(device)
    good = last < first and not peak >= 12
    print(
        "| model | rows | peak, GiB | loss, first and last tenth | steps | seconds a step | |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        f"| {name} | 1 x {arguments.length} | {peak:.2f} | {first:.3f} -> {last:.3f} | {len(losses)} | "
        f"{seconds / len(losses):.2f} | {'ok' if good else 'MISSED'} |",
        flush=True,
    )
    return int(not good)


def _peak(device: torch.device) -> float:
    """The most that was allocated at once, in GiB."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else float("nan")


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=tuple(SHAPES))
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE.jsonl", help="questions and answers")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="instead of 64")
    parser.add_argument("--narrow", action="store_true", help="a small width, to try the script")
    parser.add_argument("--only", choices=("paths", "training"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    wrong = 0
    with without_tuning():  # memory and loss are measured here, not speed; tuning takes minutes
        for name in arguments.models:
            for part, work in (("paths", compare_paths), ("training", train)):
                if arguments.only in (None, part):
                    wrong += work(name, arguments, device)
                    _reset_peak(device)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
