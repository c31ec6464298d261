"""A training step of ours beside stock's fused one and stock made right: ms, and what activations take. One table.

    python benchmarks/mixer_memory.py                         # on a GPU of 80 GiB or more, about 4 minutes
    python benchmarks/mixer_memory.py --rows mamba-1.4b/full
    python benchmarks/mixer_memory.py --layers 1              # compiles and tunes the kernels, for a run soon after
    python benchmarks/mixer_memory.py --device cpu            # tiny models, to try the script

Random weights of the published shapes in bfloat16 (ours: SSM parameters in float32), AdamW in the weights' dtype, 4
rows of 2048 tokens, whole logits, no gradient checkpointing. "stock" is the fused call, whose adapters on x_proj,
dt_proj and out_proj never train; "switch" is stock with that call off, which is right; "ours, all kept" computes
nothing again in backward; "ours, packed" has eight documents in a row. Memory is the peak less weights, gradients and
the optimizer's state, and what a forward pass leaves for backward. Triton's tuning is printed apart.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ssm_tune.adapter import guard_lifted
from ssm_tune.families import family_of
from ssm_tune.kernels import recompute, set_kernel_order
from ssm_tune.kernels.tuning import keep_tuning, report_tuning
from ssm_tune.mixers import patch_model, unpatch_model

SHAPES: dict[str, dict[str, Any]] = {
    "mamba-1.4b": {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 2048, "num_hidden_layers": 48},
    "mamba2-1.3b": {
        **{"model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2048, "num_hidden_layers": 48},
        **{"state_size": 128, "head_dim": 64, "num_heads": 64, "n_groups": 1, "tie_word_embeddings": True},
    },
}
TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
TINY_HEADS = {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 64}
FUSED = {"mamba": "mamba_inner_fn", "mamba2": "mamba2_split_conv1d_scan_combined"}
VARIANTS = ("stock", "switch", "ours", "ours, all kept", "ours, packed")
ROWS = tuple(f"{shape}/{method}" for shape in SHAPES for method in ("full", "lora"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="timed steps (default 4)")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--order", nargs="+", help="kernels.order of ours: triton, for instance")
    arguments = parser.parse_args()
    set_kernel_order(arguments.order)
    if arguments.device == "cuda":
        keep_tuning()
    lines = []
    for row in arguments.rows:
        lines += measure_row(row, arguments)
    print(f"\n{arguments.batch} x {arguments.length}, {device_name(arguments.device)}, torch {torch.__version__}\n")
    print("| row | variant | ms/step | peak GiB | activations' peak | left by forward | of stock: ms | activations |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 0


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def measure_row(row: str, arguments: argparse.Namespace) -> list[str]:
    """All variants of one model and method, on the same weights."""
    shape, method = row.split("/")
    model = build(shape, method, arguments.device, arguments.layers)
    found: dict[str, dict[str, float]] = {}
    for variant in arguments.variants:
        begin = time.monotonic()
        with prepared(model, variant):
            try:
                found[variant] = measure(model, variant, arguments)
            except torch.OutOfMemoryError as error:
                print(f"{row}, {variant}: {str(error).splitlines()[0]}", flush=True)
                continue
            finally:
                free()
        tuned = report_tuning()
        first = f"first step {found[variant]['first']:.1f} s"
        print(f"{row}, {variant}: {time.monotonic() - begin:.0f} s, {first}. {tuned}", flush=True)
    del model
    free()
    lines = [line(row, variant, result, found.get("stock", result)) for variant, result in found.items()]
    print("\n".join(lines), flush=True)
    return lines


def line(row: str, variant: str, result: dict[str, float], stock: dict[str, float]) -> str:
    memory = " | ".join(f"{result[name]:.2f}" for name in ("peak", "activations", "kept"))
    of_stock = f"{result['ms'] / stock['ms']:.2f} | {result['activations'] / max(stock['activations'], 1e-9):.2f}"
    return f"| {row} | {variant} | {result['ms']:.0f} | {memory} | {of_stock} |"


def build(shape: str, method: str, device: str, layers: int | None) -> Any:
    torch.manual_seed(0)
    dimensions = dict(SHAPES[shape])
    model_type = dimensions.pop("model_type")
    if device == "cpu":
        dimensions |= TINY | (TINY_HEADS if model_type == "mamba2" else {})
    dimensions |= {"num_hidden_layers": layers} if layers else {}
    config = AutoConfig.for_model(model_type, use_cache=False, **dimensions)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if method == "full":
        return model
    family = family_of(model_type)
    settings = LoraConfig(r=16, lora_alpha=32, target_modules=list(family.projections))
    with guard_lifted():
        return get_peft_model(model, settings)


@contextmanager
def prepared(model: Any, variant: str) -> Iterator[None]:
    """The model computes as this variant does."""
    model_type = model.config.model_type
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    fused, devices = vars(module)[FUSED[model_type]], recompute.DEVICES
    family = family_of(model_type)
    own = [p for name, p in model.named_parameters() if family.is_ssm_parameter(name)]
    try:
        if variant == "switch":
            setattr(module, FUSED[model_type], lambda *args, **kwargs: None)
        elif variant != "stock":
            patch_model(model)
            for parameter in own:
                parameter.data = parameter.data.float()
        if variant == "ours, all kept":
            recompute.DEVICES = ()
        yield
    finally:
        setattr(module, FUSED[model_type], fused)
        recompute.DEVICES = devices
        unpatch_model(model)
        for parameter in own:
            parameter.data = parameter.data.bfloat16()
            parameter.grad = None


def measure(model: Any, variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step, and GiB."""
    device, shape = arguments.device, (arguments.batch, arguments.length)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(100, model.config.vocab_size - 100, shape, device=device)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if variant == "ours, packed":
        index = torch.arange(shape[1], device=device).mul(8).div(shape[1], rounding_mode="floor").int()
        inputs["seq_idx"] = index.expand(shape).contiguous()
    kept: list[float] = []

    def step() -> None:
        loss = model(**inputs).loss
        kept.append(allocated(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.monotonic()
    step()
    synchronise(device)
    first = time.monotonic() - begin
    step()
    synchronise(device)
    fixed = allocated(device)  # weights and the optimizer's state
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arguments.steps):
        begin = time.monotonic()
        step()
        synchronise(device)
        times.append(time.monotonic() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained) / 2**30
    return {
        "first": first,
        "ms": statistics.median(times) * 1e3,
        "peak": peak,
        "activations": max(peak - fixed - gradients, 0.0),
        "kept": kept[-1] - fixed,
    }


def allocated(device: str) -> float:
    return torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
