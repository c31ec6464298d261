"""Which adapters learn: LoRA, rsLoRA and DoRA on every projection of every family, here and in transformers + PEFT.

    python benchmarks/adapters_alive.py                    # every family; a minute on a GPU, some on a CPU
    python benchmarks/adapters_alive.py mamba bamba --device cpu

One training step of a small random model, forward and backward, on the kernels that the device has. An adapter lives
if both of its halves get a gradient that is not zero. "stock" is the same model with the same adapters without this
project's forwards, PEFT's refusal of `out_proj` stepped round; it says nothing of the adapters that it never trains.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ssm_tune.adapter import apply_adapter, guard_lifted
from ssm_tune.families import OWN_FAMILIES, family_of
from ssm_tune.kernels.backends import recorded_calls
from ssm_tune.kernels.tuning import without_tuning
from ssm_tune.mixers import patch_model
from ssm_tune.recipe import AdapterSection

IDS = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SSD = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64}
MIXED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
OURS = {**ATTENTION, "state_size": 64, "mamba_head_dim": 64, "num_hidden_layers": 4}
# Sizes that every GPU kernel takes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"hidden_size": 128, "num_hidden_layers": 2}),
    "falcon_mamba": ("falcon_mamba", {"hidden_size": 128, "num_hidden_layers": 2}),
    "mamba2": ("mamba2", {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "state_size": 64, "n_groups": 1}),
    "codestral": ("mamba2", {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 8, "state_size": 64}),
    "jamba": (
        "jamba",
        {
            **ATTENTION,
            **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2},
        },
    ),
    "zamba": (
        "zamba",
        {
            **ATTENTION,
            **{"num_hidden_layers": 4, "n_mamba_heads": 2, "layers_block_type": MIXED},
            **{"attention_hidden_size": 256, "attention_head_dim": 64},
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **ATTENTION,
            **{"num_hidden_layers": 4, "n_mamba_heads": 4, "mamba_d_state": 64, "mamba_ngroups": 1},
            **{"num_mem_blocks": 1, "layers_block_type": MIXED, "use_mem_rope": True, "adapter_rank": 8},
        },
    ),
    "bamba": ("bamba", {**ATTENTION, **SSD, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**ATTENTION, **SSD, "num_hidden_layers": 2, "mamba_d_ssm": 256}),
    "nemotron_h": (
        "nemotron_h",
        {
            **ATTENTION,
            **{"head_dim": 32, "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]},
            **{"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1},
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **{**ATTENTION, **SSD, "shared_intermediate_size": 256, "num_hidden_layers": 3},
            **{"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0},
        },
    ),
    "lfm2": ("lfm2", {**ATTENTION, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "mamba3": ("mamba3", {**OURS, "pattern": "MM-*"}),
    "mamba2_hybrid": ("mamba2_hybrid", {**OURS, "pattern": "MM*-", "rotary_dim": 16}),
    "samba": ("samba", {**OURS, "state_size": 16, "num_hidden_layers": 6}),
    "h3": ("h3", {**OURS, "pattern": "M-*-"}),
}
METHODS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
SECONDS = 120  # for one family


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A family that hangs does not hold up the others."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_model(name: str, device: torch.device) -> nn.Module:
    """A random model, its frozen weights in bfloat16 on a GPU, the recurrence's own in float32."""
    model_type, sizes = FAMILIES[name]
    if model_type in OWN_FAMILIES:
        import ssm_tune.architectures.auto  # noqa: F401  (its models are known to transformers then)

        sizes = {
            key: value
            for key, value in sizes.items()
            if key != "mamba_head_dim" or model_type.startswith(("mamba2", "mamba3"))
        }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **IDS, **sizes)).to(device)
    family = family_of(model_type)
    for parameter_name, parameter in model.named_parameters():
        if device.type == "cuda" and not family.is_ssm_parameter(parameter_name):
            parameter.data = parameter.data.bfloat16()
    return model


def step(model: nn.Module, device: torch.device) -> None:
    """Both halves of every adapter away from zero, then forward and backward as a trainer does it."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(3, 512, (2, 128), device=device)
    model.train()
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()


def live(model: nn.Module) -> dict[str, list[bool]]:
    """For each leaf name of an adapted module, which of its adapters got a gradient in both halves."""
    halves: dict[str, list[bool]] = {}
    for name, parameter in model.named_parameters():
        module, _, rest = name.partition(".lora_")
        if rest and parameter.requires_grad:
            alive = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
            halves.setdefault(module, []).append(alive)
    found: dict[str, list[bool]] = {}
    for module, alive in halves.items():
        found.setdefault(module.rpartition(".")[2], []).append(all(alive))
    return found


def count(found: dict[str, list[bool]]) -> str:
    flat = [alive for leaf in found.values() for alive in leaf]
    dead = [leaf for leaf, alive in found.items() if not all(alive)]
    return f"{sum(flat)} of {len(flat)}" + (f" (dead: {', '.join(dead)})" if dead else "")


def measure_ours(name: str, device: torch.device) -> tuple[dict[str, str], list[str], str]:
    """Live adapters by method, the adapted paths, and the kernels that served."""
    lines, paths, served = {}, [], ""
    for method, keys in METHODS.items():
        model = apply_adapter(patch_model(make_model(name, device)), AdapterSection(r=8, lora_alpha=16, **keys))
        with recorded_calls() as calls:
            step(model, device)
        lines[method] = count(live(model))
        base = model.get_base_model()
        paths = [path.partition(".lora_A")[0] for path, _ in base.named_modules() if path.endswith(".lora_A")]
        served = ", ".join(dict.fromkeys(call.backend for call in calls))
    return lines, paths, served


def measure_stock(name: str, paths: list[str], device: torch.device) -> str:
    """The same adapters by PEFT on the model as transformers has it."""
    from peft import LoraConfig, get_peft_model

    if FAMILIES[name][0] in OWN_FAMILIES:
        return "-"
    with guard_lifted():
        model = get_peft_model(make_model(name, device), LoraConfig(r=8, target_modules=paths))
    try:
        step(model, device)
    except Exception as error:  # noqa: BLE001  (whatever stock does is the finding)
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return count(live(model))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    logging.getLogger("ssm_tune.adapter").setLevel(logging.ERROR)  # what gets no adapter, and why
    rows, failed = [], 0
    for name in arguments.families or FAMILIES:
        begun = time.perf_counter()
        try:
            with limited(SECONDS), without_tuning():
                lines, paths, served = measure_ours(name, device)
                stock = measure_stock(name, paths, device)
        except Exception as error:  # noqa: BLE001  (the other families are measured all the same)
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        failed += any("dead" in line for line in lines.values())
        rows.append(f"| {name} | {lines['lora']} | {lines['rslora']} | {lines['dora']} | {stock} | {served} |")
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
    print("\n| family | LoRA | rsLoRA | DoRA | stock, LoRA | kernels here |\n| --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    print("every adapter lives" if not failed else f"{failed} FAILED")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
