"""Tiny random models of every supported kind, and a byte-level tokenizer, built offline.

Import it from any test with ``from tiny import tiny_model, tiny_tokenizer`` (conftest.py puts this folder on the path).

Freshly initialised models are poor witnesses: with a step size of 0.7 the state forgets everything within a few
tokens, and with a convolution bias of zero padding cannot leak. `carry_state` gives the weights that real
checkpoints have: step sizes in [1e-3, 0.1], biases, skips and norms that are not constants.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 300
PAD, BOS, EOS = 0, 1, 2

_IDS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_ATTENTION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SSD: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_ALTERNATING = ["linear_attention", "hybrid", "linear_attention", "hybrid"]

# kind -> (model_type, config). "codestral" is mamba2 with several groups and an untied head, as Codestral has.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "tie_word_embeddings": True,
        },
    ),
    "codestral": (
        "mamba2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 8,
            "chunk_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    "jamba": (
        "jamba",
        dict(
            **_ATTENTION,
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
    ),
    "zamba": (
        "zamba",
        {
            **_ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "layers_block_type": _ALTERNATING,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **_ATTENTION,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "layers_block_type": _ALTERNATING,
            "use_mem_rope": True,
            "adapter_rank": 4,
        },
    ),
    "bamba": ("bamba", dict(**_ATTENTION, **_SSD, num_hidden_layers=3, attn_layer_indices=[1])),
    "falcon_h1": ("falcon_h1", dict(**_ATTENTION, **_SSD, num_hidden_layers=2, mamba_d_ssm=64)),
    "nemotron_h": (
        "nemotron_h",
        dict(
            **_ATTENTION,
            head_dim=8,
            layers_block_type=["linear_attention", "full_attention", "linear_attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=16,
        ),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(
            **_ATTENTION,
            **_SSD,
            shared_intermediate_size=48,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=0,
            num_experts_per_tok=0,
        ),
    ),
    "lfm2": (
        "lfm2",
        dict(**_ATTENTION, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    ),
}

# Widths that every kernel takes, stock's calls of them included: in_proj's output is a multiple of eight.
EIGHT_HEADS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba2": {"n_mamba_heads": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
}

PURE = ("mamba", "falcon_mamba", "mamba2", "codestral")
HYBRID = tuple(kind for kind in _CONFIGS if kind not in PURE)
KINDS = PURE + HYBRID


def tiny_config(kind: str, **changes: Any) -> Any:
    """The config of a tiny model of this kind; `changes` are its config's own keys."""
    from transformers import AutoConfig

    model_type, dimensions = _CONFIGS[kind]
    return AutoConfig.for_model(model_type, **{**_IDS, **dimensions, **changes})


def tiny_model(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny stock (unpatched) causal language model of this kind, in eval mode, with weights that carry state.

    The same kind, changes and seed give the same weights in every process. With a lower-precision `dtype` every
    parameter is cast, the SSM parameters too, as stock `from_pretrained(dtype=...)` does.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
        carry_state(model)
    return model.to(dtype).eval()


def save_stock(kind: str, folder: Path, **changes: Any) -> Any:
    """A model as transformers saves it; gives the model."""
    model = tiny_model(kind, **changes)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def carry_state(model: torch.nn.Module) -> None:
    """Give every weight a value that a mistake would show through (uses torch's current random state)."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.normal_(std=module.embedding_dim**-0.5)
        elif isinstance(module, torch.nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
        elif isinstance(module, torch.nn.Conv1d):
            module.weight.normal_(std=module.kernel_size[0] ** -0.5)
            if module.bias is not None:
                module.bias.normal_(std=0.5)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if "norm" in name and leaf == "weight":
            parameter.uniform_(0.7, 1.3)
        elif leaf == "D":
            parameter.uniform_(0.5, 1.5)
        elif leaf == "A_log":
            parameter.copy_(torch.empty_like(parameter).uniform_(1.0, 8.0).log())
        elif leaf in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
            parameter.copy_(_inverse_softplus(_log_uniform(parameter, 3e-3, 3e-2)))
        elif leaf in ("x_proj_weight", "dt_proj_weight"):
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        if leaf == "dt_proj_weight" or name.endswith("dt_proj.weight"):
            parameter.mul_(0.5)  # keeps nearly all step sizes within [1e-3, 0.1]


def _log_uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.empty_like(like).uniform_(math.log(low), math.log(high)).exp()


def _inverse_softplus(value: torch.Tensor) -> torch.Tensor:
    return value + torch.log(-torch.expm1(-value))


MARKED_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|a|>{% generation %}{{ message['content'] }}<e>{% endgeneration %}"
    "{% elif message['role'] == 'system' %}<|s|>{{ message['content'] }}"
    "{% else %}<|u|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
PLAIN_TEMPLATE = MARKED_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tiny_tokenizer(template: str | None = PLAIN_TEMPLATE) -> Any:
    """A byte-level tokenizer: 262 tokens, one a byte, pad 0, bos 1, eos 2, none of them added to plain text.

    `template`: PLAIN_TEMPLATE (no generation markers, as most published templates), MARKED_TEMPLATE, or None.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "<e>", "<|s|>", "<|u|>", "<|a|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<e>",
        additional_special_tokens=special[3:],
        model_max_length=1_000_000,
    )
    tokenizer.chat_template = template
    return tokenizer


def assert_equal_up_to_rounding(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Of a model and the same model read from files: products round by whether a weight needs a gradient, and on some
    processors by where it lies in memory."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
