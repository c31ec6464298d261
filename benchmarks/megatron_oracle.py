"""Our Megatron files against Megatron-LM's own tool, tensor by tensor.

    python benchmarks/megatron_oracle.py PATH_OF_A_MEGATRON_CHECKOUT

Random models are written for 1, 2, 4 and 8 tensor-parallel ranks and 1 and 2 stages. For each: every tensor is split
and combined by the functions of tools/checkpoint/hybrid_conversion.py and compared to the bit; the tool itself converts
the checkpoint of one rank, and its files are compared with ours, then read and compared with the model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ssm_tune.conversion import convert
from ssm_tune.model import load_model

RANKS, STAGES = (1, 2, 4, 8), (1, 2)
SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "n_groups": 8, "chunk_size": 64}
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "intermediate_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba-2": ("mamba2", {"num_heads": 8, "head_dim": 64, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "Mamba-2, tied": ("mamba2", {"num_heads": 8, "head_dim": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}),
    "hybrid": (
        "nemotron_h",
        {
            **ATTENTION,
            **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "mlp_hidden_act": "gelu"},
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "mlp"],
        },
    ),
}


def load_tool(checkout: Path) -> ModuleType:
    path = checkout / "tools" / "checkpoint" / "hybrid_conversion.py"
    spec = importlib.util.spec_from_file_location("hybrid_conversion", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"{path} is not there.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool_arguments(**changes: Any) -> SimpleNamespace:
    """The tool's command line; `mamba_d_inner` and `mamba2_n_heads` are what its main computes."""
    values = {"d_model": 256, "mamba_version": 2, "mamba_d_state": 128, "mamba2_n_groups": 8, "mamba2_head_dim": 64}
    return SimpleNamespace(**values, mamba_d_inner=512, mamba2_n_heads=8, reset_iterations=False, **changes)


def shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Of each rank's folder its tensors."""
    files = sorted(folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    return {
        file.parent.name: {
            name: tensor for name, tensor in torch.load(file)["model"].items() if not name.endswith("_extra_state")
        }
        for file in files
    }


def compare_functions(tool: ModuleType, whole: dict[str, torch.Tensor], ranks: list[dict[str, torch.Tensor]]) -> int:
    """Split and combined by the tool's functions; how many tensors were compared."""
    tool.args = tool_arguments(target_tp_size=len(ranks))  # one of its functions reads the module's own
    for name, tensor in whole.items():
        dim = tool.get_split_dim(name)
        if dim == -1:
            assert all(torch.equal(rank[name], tensor) for rank in ranks), name
            continue
        split = tool.split_tensor_for_tp(tool.args, name, dim, tensor)
        assert all(torch.equal(rank[name], part) for rank, part in zip(ranks, split, strict=True)), name
        assert torch.equal(tool.combine_tp_tensors(tool.args, name, dim, [rank[name] for rank in ranks]), tensor), name
    return len(whole)


def run_tool(tool: ModuleType, source: Path, target: Path, tp: int, pp: int) -> None:
    tool.args = tool_arguments(load_dir=str(source), save_dir=str(target), target_tp_size=tp, target_pp_size=pp)
    with contextlib.redirect_stdout(io.StringIO()):
        tool.main(tool.args)


def equal_files(one: Path, other: Path) -> int:
    """All ranks' tensors of two checkpoints; how many."""
    left, right = shards(one), shards(other)
    assert left.keys() == right.keys()
    for rank, tensors in left.items():
        assert tensors.keys() == right[rank].keys(), rank
        assert all(torch.equal(tensor, right[rank][name]) for name, tensor in tensors.items()), rank
    return sum(map(len, left.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of Megatron-LM")
    tool = load_tool(parser.parse_args().checkout)
    torch.serialization.add_safe_globals([argparse.Namespace])  # for the tool's own torch.load
    for kind, (model_type, sizes) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **sizes))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder / "hf")
            convert(folder / "hf", folder / "one", to="megatron")
            whole = shards(folder / "one")["mp_rank_00"]
            for tp in RANKS:
                for pp in STAGES:
                    ours = convert(folder / "hf", folder / f"ours-{tp}-{pp}", to="megatron", tp=tp, pp=pp)
                    line = f"{kind:14} TP {tp} PP {pp}: "
                    if pp == 1:
                        count = compare_functions(tool, whole, list(shards(ours).values()))
                        line += f"{count} tensors split and combined; "
                    if pp > 1 and model.config.tie_word_embeddings:
                        continue  # the tool leaves the last stage without its copy of a tied head
                    run_tool(tool, folder / "one", folder / f"theirs-{tp}-{pp}", tp, pp)
                    line += f"{equal_files(ours, folder / f'theirs-{tp}-{pp}')} tensors of the tool's files; "
                    run_tool(tool, ours, folder / f"back-{tp}-{pp}", 1, 1)
                    equal_files(folder / "one", folder / f"back-{tp}-{pp}")
                    loaded = load_model(folder / f"theirs-{tp}-{pp}", dtype="float32", trainable="none")
                    equal = (
                        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
                    )
                    assert all(equal)
                    print(line + "ours and the tool's equal to the bit, both ways", flush=True)


if __name__ == "__main__":
    main()
