"""Decoding beside what a user would run instead: tokens a second, time to the first token, memory; one Markdown table.

    python benchmarks/decode_speed.py                    # mamba-1.4b and mamba2-1.3b, contexts of 2K to 128K
    python benchmarks/decode_speed.py --quick            # fewer lines, untuned prefill: under 3 minutes on one H200
    python benchmarks/decode_speed.py --shapes mamba2-130m --batches 1,8 --contexts 2048

Random weights of the published shapes, bfloat16, greedy, no end token. Beside ours (one CUDA graph a token; states in
float32, and in bfloat16 as mamba_ssm keeps them) stand transformers' generate on its own model, mamba_ssm's generate
with its CUDA graphs, and transformers' generate on a Llama of as many parameters with sdpa. A line is measured by the
difference of two calls, one for a single token and one for many, after a call that compiles and captures; the single
token is the time to the first. "Beside the weights" is the highest use of memory less the weights. What does not fit,
or is not installed, is told as such. Without a GPU tiny shapes are run, to show that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Generate = Callable[[Tensor, int], Any]


@dataclass(frozen=True)
class Shape:
    """A published model's dimensions; the Llama beside it has about as many parameters."""

    model_type: str
    hidden: int
    layers: int
    state: int
    llama_layers: int
    vocabulary: int = 50288
    head_dim: int = 64


SHAPES = {
    "mamba-130m": Shape("mamba", 768, 24, 16, 12),
    "mamba-1.4b": Shape("mamba", 2048, 48, 16, 24),
    "mamba-2.8b": Shape("mamba", 2560, 64, 16, 32),
    "mamba2-130m": Shape("mamba2", 768, 24, 128, 12),
    "mamba2-1.3b": Shape("mamba2", 2048, 48, 128, 24),
    "mamba2-2.7b": Shape("mamba2", 2560, 64, 128, 32),
    "tiny-mamba": Shape("mamba", 64, 2, 8, 2, 304, 16),
    "tiny-mamba2": Shape("mamba2", 64, 2, 16, 2, 304, 16),
}
# A row longer than this meets 32-bit offsets in mamba_ssm's Mamba-2 kernels, which may end the process. Ours are cut.
LONGEST_MAMBA2 = 32_768


# -- the models ------------------------------------------------------------------------------------------------------


def stock_config(shape: Shape) -> Any:
    from transformers import AutoConfig

    keys: dict[str, Any] = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "state_size": shape.state}
    if shape.model_type == "mamba2":
        heads = 2 * shape.hidden // shape.head_dim
        keys |= {"num_heads": heads, "head_dim": shape.head_dim, "n_groups": 1, "tie_word_embeddings": True}
    return AutoConfig.for_model(shape.model_type, vocab_size=shape.vocabulary, **keys)


def new_model(config: Any, device: str, **keys: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **keys)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def ours(shape: Shape, device: str, state_dtype: torch.dtype | None = None) -> tuple[Any, Generate]:
    from ssm_tune.families import family_of
    from ssm_tune.mixers import patch_model
    from ssm_tune.outputs.decoding.choosing import Choice
    from ssm_tune.outputs.decoding.loop import Decoder

    model = new_model(stock_config(shape), device)
    family = family_of(shape.model_type)
    for name, parameter in model.named_parameters():
        if family.is_ssm_parameter(name):  # as load_model has them
            parameter.data = parameter.data.float()
    patch_model(model)
    decoder = Decoder(state_dtype)

    def generate(ids: Tensor, tokens: int) -> None:
        mask = torch.ones_like(ids)
        for _ in decoder.decode(model, ids, mask, Choice(ids, mask, shape.vocabulary), tokens):
            pass

    return model, generate


def by_transformers(shape: Shape, device: str) -> tuple[Any, Generate]:
    model = new_model(stock_config(shape), device)
    return model, partial(transformers_generate, model)


def transformer(shape: Shape, device: str) -> tuple[Any, Generate]:
    from transformers import LlamaConfig

    wide = -(-shape.hidden * 8 // 3 // 128) * 128
    heads = max(1, shape.hidden // 128)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=wide,
        num_hidden_layers=shape.llama_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2**18,
        tie_word_embeddings=True,
    )
    model = new_model(config, device, attn_implementation="sdpa")
    return model, partial(transformers_generate, model)


def transformers_generate(model: Any, ids: Tensor, tokens: int) -> None:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def by_mamba_ssm(shape: Shape, device: str) -> tuple[Any, Generate]:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    layer: dict[str, Any] = {"d_state": shape.state}
    if shape.model_type == "mamba2":
        layer |= {"layer": "Mamba2", "headdim": shape.head_dim}
    config = MambaConfig(
        d_model=shape.hidden,
        n_layer=shape.layers,
        vocab_size=shape.vocabulary,
        ssm_cfg=layer,
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
    )
    model = MambaLMHeadModel(config, device=device, dtype=torch.bfloat16).eval().requires_grad_(False)

    def generate(ids: Tensor, tokens: int) -> None:
        model.generate(ids, max_length=ids.shape[1] + tokens, cg=True)

    return model, generate


CONTESTANTS: dict[str, Callable[[Shape, str], tuple[Any, Generate]]] = {
    "ours": ours,
    "ours, states in bf16": partial(ours, state_dtype=torch.bfloat16),
    "mamba_ssm, CUDA graphs": by_mamba_ssm,
    "transformers": by_transformers,
    "Llama, transformers, sdpa": transformer,
}


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One measurement; times in seconds, memory in bytes beside the weights. `failure`: why there is none."""

    shape: str
    contestant: str
    batch: int
    context: int
    first: float = 0.0
    step: float = 0.0
    memory: int = 0
    failure: str = ""


def timed(generate: Generate, ids: Tensor, tokens: int, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        _wait(ids)
        begin = time.perf_counter()
        generate(ids, tokens)
        _wait(ids)
        best = min(best, time.perf_counter() - begin)
    return best


def _wait(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


def measure(shape_name: str, contestant: str, options: argparse.Namespace) -> Iterator[Line]:
    """The lines of one model: every batch and context that is to be had of it."""
    shape, device = SHAPES[shape_name], options.device
    try:
        model, generate = CONTESTANTS[contestant](shape, device)
    except ImportError as error:
        yield Line(shape_name, contestant, 0, 0, failure=f"not installed: {error}")
        return
    weights = sum(parameter.numel() * parameter.element_size() for parameter in set(model.parameters()))
    foreign = contestant.startswith(("mamba_ssm", "transformers"))
    for batch in options.batches:
        for context in options.contexts:
            if batch * context > options.most or (options.quick and batch > 1 and context > min(options.contexts)):
                continue
            line = partial(Line, shape_name, contestant, batch, context)
            if foreign and shape.model_type == "mamba2" and context > LONGEST_MAMBA2:
                yield line(failure="32-bit offsets in its kernels")
                continue
            ids = torch.randint(5, shape.vocabulary - 20, (batch, context), device=device)
            try:
                generate(ids, options.tokens + 1)  # compiles, tunes, captures
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                first = timed(generate, ids, 1, options.repeats)
                whole = timed(generate, ids, options.tokens + 1, options.repeats)
            except torch.OutOfMemoryError:
                yield line(failure="out of memory")
                _free()
                continue
            memory = torch.cuda.max_memory_allocated() - weights if device == "cuda" else 0
            yield line(first, (whole - first) / options.tokens, memory)
    del model, generate
    _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure_apart(shape: str, contestant: str) -> Iterator[Line]:
    """In a process of its own: a kernel that fails may take the GPU's context with it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", f"{shape}:{contestant}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = [Line(**json.loads(text)) for text in done.stdout.splitlines() if text.startswith("{")]
    yield from found
    if done.returncode:
        yield Line(shape, contestant, 0, 0, failure=f"the process ended with {done.returncode}")


@contextlib.contextmanager
def untuned_prefill() -> Iterator[None]:
    """Inside, Triton times no block sizes, which only prompts are read with: that takes a minute for Mamba-2.

    Kernels that have nothing but their number of warps to choose (mamba_ssm's norms, in every step) are tuned as ever.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    from ssm_tune.kernels.tuning import without_tuning

    tuned = Autotuner.prune_configs
    with without_tuning():
        untuned = Autotuner.prune_configs

        def prune_configs(self: Any, *arguments: Any, **keywords: Any) -> Any:
            found = tuned(self, *arguments, **keywords)
            return untuned(self, *arguments, **keywords) if any(one.kwargs for one in found) else found

        Autotuner.prune_configs = prune_configs
        yield


def as_row(line: Line) -> str:
    name = f"| {line.shape} | {line.contestant} | {line.batch or ''} | {line.context or ''} |"
    if line.failure:
        return f"{name} {line.failure} | | | |"
    rate = line.batch / line.step if line.step > 0 else float("nan")
    return f"{name} {line.first * 1e3:.0f} | {line.step * 1e3:.2f} | {rate:,.0f} | {line.memory / 2**30:.2f} |"


def ratios(lines: list[Line]) -> Iterator[str]:
    """Ours against mamba_ssm with graphs, where both were measured."""
    found = {(line.shape, line.batch, line.context, line.contestant): line.step for line in lines if not line.failure}
    for (shape, batch, context, contestant), step in found.items():
        theirs = found.get((shape, batch, context, "mamba_ssm, CUDA graphs"))
        if contestant.startswith("ours") and theirs:
            yield f"{shape}, batch {batch}, context {context}: {contestant} {theirs / step:.2f} x mamba_ssm's tokens/s"


# -- the command -----------------------------------------------------------------------------------------------------


def read_options(given: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mamba-1.4b,mamba2-1.3b" if cuda else "tiny-mamba,tiny-mamba2")
    parser.add_argument("--contestants", help="names, with semicolons; default: all")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64] if cuda else [1, 3])
    parser.add_argument("--contexts", type=numbers, help="default: 2K to 128K")
    parser.add_argument("--tokens", type=int, help="that are timed")
    parser.add_argument("--repeats", type=int, help="of a measurement; the best counts")
    parser.add_argument("--most", type=int, default=2**20, help="tokens of all rows together; more is left out")
    parser.add_argument("--quick", action="store_true", help="long contexts for one row only, prefill not tuned")
    parser.add_argument("--json", metavar="FILE", help="the lines as JSON too")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.device = "cuda" if cuda else "cpu"
    if options.contexts is None:
        options.contexts = (
            [24, 96] if not cuda else [2048, 32768, 131072] if options.quick else [2048, 8192, 32768, 131072]
        )
    options.tokens = options.tokens or (6 if not cuda else 48 if options.quick else 128)
    options.repeats = options.repeats or (1 if options.quick or not cuda else 3)
    names = list(CONTESTANTS) if options.contestants is None else options.contestants.split(";")
    options.pairs = [(shape, name) for shape in options.shapes.split(",") for name in names]
    for shape, name in options.pairs:
        if shape not in SHAPES or name not in CONTESTANTS:
            parser.error(
                f"{shape}:{name} is not known. Shapes: {', '.join(SHAPES)}. Contestants: {'; '.join(CONTESTANTS)}."
            )
    return options


def main() -> None:
    options = read_options()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.only:
        shape, _, contestant = options.only.partition(":")
        for line in measure(shape, contestant, options):
            print(json.dumps(asdict(line)), flush=True)
        return
    tuning = untuned_prefill() if options.quick else contextlib.nullcontext()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, PyTorch {torch.__version__}, {options.tokens} tokens timed\n")
    print("| shape | what | batch | context | first token, ms | ms/token | tokens/s | GiB beside the weights |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    lines: list[Line] = []
    with tuning:
        for shape, contestant in options.pairs:
            here = options.quick or options.device == "cpu"
            for line in measure(shape, contestant, options) if here else _measure_apart(shape, contestant):
                lines.append(line)
                print(as_row(line), flush=True)
    print("\n".join(["", *ratios(lines)]))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump([asdict(line) for line in lines], file, indent=1)


if __name__ == "__main__":
    main()
