"""How much memory `ssm-tune convert` takes for a model of 2.8 billion numbers.

    python benchmarks/convert_memory.py FOLDER             # needs 25 GB there; all of it is removed again

Writes a random model of the published 2.8B's shape as sharded bfloat16 safetensors, runs the command for each target,
and prints the most anonymous memory (RssAnon: what no file backs) that the process had.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from ssm_tune.model import meta_model

SHARD = 2 * 2**30
SHAPES = {
    "mamba": {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
    "mamba2": {
        **{"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80, "head_dim": 64},
        **{"n_groups": 2, "tie_word_embeddings": True},
    },
}
RUNS = (
    ("mamba", ["--to", "state-spaces"]),
    ("mamba", ["--to", "state-spaces", "--dtype", "float16"]),
    ("mamba", ["--to", "hf", "--dtype", "float32"]),
    ("mamba2", ["--to", "megatron", "--tp", "2", "--pp", "2"]),
)


def write_model(folder: Path, config: PreTrainedConfig) -> int:
    """Random numbers, one block of them again and again. Returns how many."""
    folder.mkdir(parents=True)
    block = torch.randn(2**24).bfloat16()
    weights = {name: value for name, value in meta_model(config).state_dict().items() if name != "lm_head.weight"}
    shards: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        file = f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shards[-1], file))
        shards[-1] = {}

    for name, value in weights.items():
        count = value.numel()
        tensor = block.repeat(-(-count // len(block)))[:count].reshape(value.shape).clone()
        if size + tensor.nbytes > SHARD:
            flush()
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + count
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.save_pretrained(folder)
    return total


def measure(command: list[str]) -> tuple[int, float]:
    """The most anonymous memory of a process, in bytes, and how long it ran."""
    started, peak = time.time(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        except OSError:
            break
        peak = max(peak, 1024 * int(found[1])) if found else peak
        time.sleep(0.05)
    if process.wait():
        sys.exit(f"{' '.join(command)} failed.")
    return peak, time.time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder / "convert_memory"
    try:
        for model_type, shape in SHAPES.items():
            total = write_model(folder / model_type, AutoConfig.for_model(model_type, **shape))
            for kind, options in RUNS:
                if kind == model_type:
                    source, target = str(folder / model_type), str(folder / "new")
                    peak, seconds = measure([sys.executable, "-m", "ssm_tune", "convert", source, target, *options])
                    numbers = f"{total / 1e9:.2f} billion numbers"
                    print(
                        f"{kind}, {numbers}, {' '.join(options)}: {peak / 2**30:.2f} GiB, {seconds:.0f} s", flush=True
                    )
                    shutil.rmtree(target)
            shutil.rmtree(folder / model_type)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
