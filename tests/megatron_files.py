"""Megatron-LM's rank files written by hand from a transformers model, from its own code's description of each tensor.

Nothing here uses `ssm_tune.layouts`: this is what its reader and writer are compared with.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def megatron_arguments(model: Any, **changes: Any) -> dict[str, Any]:
    """As training leaves them (megatron/training/arguments.py), of a Mamba-2 or a Nemotron-H."""
    config = model.config
    hybrid = config.model_type == "nemotron_h"
    symbols = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    pattern = "".join(symbols[kind] for kind in config.layers_block_type) if hybrid else "M" * config.num_hidden_layers
    values = {
        "num_layers": len(pattern),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads if hybrid else 4,
        "group_query_attention": hybrid,
        "num_query_groups": config.num_key_value_heads if hybrid else 1,
        "kv_channels": config.head_dim if hybrid else 8,
        "ffn_hidden_size": config.intermediate_size if hybrid else 64,
        "squared_relu": hybrid,
        "swiglu": False,
        "hybrid_override_pattern": pattern,
        "mamba_state_dim": config.ssm_state_size if hybrid else config.state_size,
        "mamba_head_dim": config.mamba_head_dim if hybrid else config.head_dim,
        "mamba_num_groups": config.n_groups,
        "untie_embeddings_and_output_weights": hybrid or not config.tie_word_embeddings,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "none",
        "params_dtype": torch.float32,
        "exit_signal": Path,  # a class that no reader knows
    }
    return {**values, **changes}


def split_rows(tensor: Tensor, sizes: list[int], rank: int, ranks: int) -> Tensor:
    """Each part of a tensor, of these sizes along its rows, is shared equally; a rank's shares one after the other."""
    return torch.cat([part.chunk(ranks)[rank] for part in tensor.split(sizes)])


def rank_tensors(model: Any, rank: int, ranks: int, layers: range, *, last: bool) -> dict[str, Tensor]:
    """What one rank of one stage holds: see megatron/core/ssm/mamba_mixer.py and transformer/attention.py."""
    state, config = {name: value.detach() for name, value in model.state_dict().items()}, model.config
    prefix = "model." if config.model_type == "nemotron_h" else "backbone."
    tensors: dict[str, Tensor] = {}

    def vocabulary(weight: Tensor) -> Tensor:
        rows = -(-len(weight) // (128 * ranks)) * 128 * ranks
        return torch.cat([weight, weight[-1:].expand(rows - len(weight), -1)]).chunk(ranks)[rank]

    if layers.start == 0:
        tensors["embedding.word_embeddings.weight"] = vocabulary(state[f"{prefix}embeddings.weight"])
    for number, layer in enumerate(layers):
        ours = {name.removeprefix(f"{prefix}layers.{layer}."): value for name, value in state.items()
                if name.startswith(f"{prefix}layers.{layer}.")}  # fmt: skip
        own: dict[str, Tensor] = {}
        if "mixer.A_log" in ours:
            heads, inner = len(ours["mixer.A_log"]), len(ours["mixer.norm.weight"])
            grouped = (len(ours["mixer.conv1d.bias"]) - inner) // 2
            for name in ("A_log", "D", "dt_bias", "norm.weight"):
                own[f"mixer.{name}"] = ours[f"mixer.{name}"].chunk(ranks)[rank]
            sizes = [inner, inner, grouped, grouped, heads]
            own["mixer.in_proj.weight"] = split_rows(ours["mixer.in_proj.weight"], sizes, rank, ranks)
            for name in ("conv1d.weight", "conv1d.bias"):
                own[f"mixer.{name}"] = split_rows(ours[f"mixer.{name}"], sizes[1:4], rank, ranks)
            own["mixer.out_proj.weight"] = ours["mixer.out_proj.weight"].chunk(ranks, dim=1)[rank]
            own["norm.weight"] = ours["norm.weight"]
        elif "mixer.q_proj.weight" in ours:
            groups, size = config.num_key_value_heads, config.head_dim
            q, k, v = (ours[f"mixer.{name}_proj.weight"].view(groups, -1, size, config.hidden_size) for name in "qkv")
            qkv = torch.cat([q, k, v], dim=1).flatten(0, 2)
            own["self_attention.linear_qkv.weight"] = qkv.chunk(ranks)[rank]
            own["self_attention.linear_proj.weight"] = ours["mixer.o_proj.weight"].chunk(ranks, dim=1)[rank]
            own["self_attention.linear_qkv.layer_norm_weight"] = ours["norm.weight"]
        else:
            own["mlp.linear_fc1.weight"] = ours["mixer.up_proj.weight"].chunk(ranks)[rank]
            own["mlp.linear_fc2.weight"] = ours["mixer.down_proj.weight"].chunk(ranks, dim=1)[rank]
            own["mlp.linear_fc1.layer_norm_weight"] = ours["norm.weight"]
        tensors |= {f"decoder.layers.{number}.{name}": value for name, value in own.items()}
    if last:
        tensors["decoder.final_norm.weight"] = state[f"{prefix}norm_f.weight"]
        if not model.config.tie_word_embeddings or layers.start:
            tensors["output_layer.weight"] = vocabulary(state["lm_head.weight"])
    return {name: value.clone() for name, value in tensors.items()}


def write_megatron(
    folder: Path, model: Any, tp: int = 1, pp: int = 1, *, release: bool = False, legacy: bool = False, **changes: Any
) -> Path:
    """A checkpoint folder; `changes` are arguments. `legacy`: the pickles of torch before 1.6."""
    arguments = megatron_arguments(model, **changes)
    per_stage = arguments["num_layers"] // pp
    top = folder / ("release" if release else "iter_0000042")
    for stage in range(pp):
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        for rank in range(tp):
            tensors: OrderedDict[str, Any] = OrderedDict(
                rank_tensors(model, rank, tp, layers, last=stage == pp - 1), **{"decoder.final_norm._extra_state": None}
            )
            content = {
                "args": argparse.Namespace(**arguments, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
                "checkpoint_version": 3.0,
                "iteration": 42,
                "model": tensors,
                "optimizer": {"state": {0: torch.zeros(3)}},
                "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
            }
            path = top / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt", _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if release else "42\n")
    return folder
