"""What `train_speed.py` trains: models of the published shapes with random weights, and batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

MAMBA = {"vocab_size": 50280, "state_size": 16, "use_cache": False}
MAMBA2 = {"vocab_size": 50288, "state_size": 128, "head_dim": 64, "n_groups": 1, "chunk_size": 256, "use_cache": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-130m": ("mamba", {**MAMBA, "hidden_size": 768, "num_hidden_layers": 24}),
    "mamba-1.4b": ("mamba", {**MAMBA, "hidden_size": 2048, "num_hidden_layers": 48}),
    "mamba2-130m": (
        "mamba2",
        {**MAMBA2, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "tie_word_embeddings": True},
    ),
    "mamba2-1.3b": (
        "mamba2",
        {**MAMBA2, "hidden_size": 2048, "num_hidden_layers": 48, "num_heads": 64, "tie_word_embeddings": True},
    ),
    "falcon-mamba-7b": (
        "falcon_mamba",
        {
            **MAMBA, "vocab_size": 65024, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64,
            "tie_word_embeddings": False,
        },
    ),
    "codestral-7b": (
        "mamba2",
        {
            **MAMBA2, "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
            "n_groups": 8, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
TARGETS = {
    "mamba": ["in_proj", "x_proj", "dt_proj", "out_proj"],
    "falcon_mamba": ["in_proj", "x_proj", "dt_proj", "out_proj"],
    "mamba2": ["in_proj", "out_proj"],
}
# What replaces sizes when only the script is to be tried.
TINY = {
    "mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "state_size": 4},
    "mamba2": {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8,
        "n_groups": 1, "chunk_size": 16,
    },
}  # fmt: skip
# In stock's modelling files, the call that fuses convolution, scan and out_proj.
FUSED = {
    "mamba": "mamba_inner_fn",
    "falcon_mamba": "mamba_inner_fn",
    "mamba2": "mamba2_split_conv1d_scan_combined",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, how it is trained, and a batch. `target`: tokens/s over stock's, at least."""

    name: str
    model: str
    method: str
    batch: int
    length: int
    target: float | None = None
    gsm8k: bool = False


ROWS = {
    row.name: row
    for row in (
        Row("mamba-130m-full", "mamba-130m", "full", 8, 2048, 2.0),
        Row("mamba2-130m-full", "mamba2-130m", "full", 8, 2048, 2.0),
        Row("mamba-1.4b-full", "mamba-1.4b", "full", 4, 2048, 1.7),
        Row("mamba2-1.3b-full", "mamba2-1.3b", "full", 4, 2048, 1.6),
        Row("mamba-1.4b-lora", "mamba-1.4b", "lora", 4, 2048, 2.3),
        Row("mamba2-1.3b-lora", "mamba2-1.3b", "lora", 4, 2048, 2.0),
        Row("falcon-mamba-7b-lora", "falcon-mamba-7b", "lora", 2, 2048, 2.3),
        Row("codestral-7b-lora", "codestral-7b", "lora", 2, 2048, 2.0),
        # GSM8K: padded batches of as many examples as packed rows of this size hold on average.
        Row("mamba-130m-gsm8k", "mamba-130m", "full", 8, 2048, gsm8k=True),
        Row("mamba2-130m-gsm8k", "mamba2-130m", "full", 8, 2048, gsm8k=True),
    )
}


def tiny_row(row: Row) -> Row:
    return Row(row.name, row.model, row.method, 2, 32, row.target, row.gsm8k)


def new_model(row: Row, device: str, tiny: bool) -> Any:
    """A transformers model with random weights: float32 where all of it is trained, else bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = MODELS[row.model]
    if tiny:
        sizes = {**sizes, **TINY["mamba2" if model_type == "mamba2" else "mamba"]}
    config = AutoConfig.for_model(model_type, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if row.method == "full" else torch.bfloat16)


def their_model(row: Row, device: str) -> nn.Module:
    """mamba_ssm's own model of the same shape.

    Raises:
        ImportError: mamba_ssm is not there.
    """
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    model_type, sizes = MODELS[row.model]
    layer = {"layer": "Mamba2", "d_state": 128, "headdim": 64} if model_type == "mamba2" else {"layer": "Mamba1"}
    config = MambaConfig(
        d_model=sizes["hidden_size"],
        n_layer=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        ssm_cfg=layer,
        pad_vocab_size_multiple=8,
    )
    torch.manual_seed(0)
    return MambaLMHeadModel(config, device=device, dtype=torch.float32)


@contextmanager
def fused_call(model_type: str, on: bool) -> Iterator[None]:
    """Within, stock models of this kind call their fused kernel or not. Without it, stock is right with LoRA."""
    import importlib

    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    name = FUSED[model_type]
    before = getattr(module, name)
    if on:
        yield
        return
    setattr(module, name, lambda *arguments, **keywords: None)
    try:
        yield
    finally:
        setattr(module, name, before)


# -- batches -------------------------------------------------------------------------------------------------------


def random_documents(row: Row, vocabulary: int, rows: int, mean: int = 300) -> list[np.ndarray]:
    """Packed rows of random tokens: for each, its documents, about `mean` tokens long, `length` in sum."""
    random = np.random.default_rng(0)
    packed = []
    for _ in range(rows):
        cuts = np.flatnonzero(random.random(row.length - 1) < 1 / min(mean, row.length)) + 1
        tokens = random.integers(3, vocabulary, row.length)
        packed.append(np.split(tokens, cuts))
    return packed


def gsm8k_documents(file: Path, tokenizer: str) -> list[np.ndarray]:
    """The tokens of every row: question, answer, end."""
    from transformers import AutoTokenizer

    turn = AutoTokenizer.from_pretrained(tokenizer)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    return [np.asarray([*ids, 2]) for ids in turn(texts)["input_ids"]]


def pack_documents(documents: list[np.ndarray], length: int) -> list[list[np.ndarray]]:
    """Documents into rows of `length`, as the product packs them; each cut to fit."""
    from ssm_tune.data.packing import pack

    documents = [document[:length] for document in documents]
    return [[documents[i] for i in row] for row in pack(np.asarray([len(d) for d in documents]), length, seed=0)]
