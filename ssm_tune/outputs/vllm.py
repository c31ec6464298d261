"""What vLLM serves of what is trained here: for a model card.

By vLLM's list of supported models (docs/models/supported_models.md) and the classes behind it, in November 2026: which
architectures it has, and which of them take LoRA adapters.
"""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig

WITH_LORA = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "nemotron_h"})
MERGED_ONLY = frozenset({"falcon_mamba", "mamba", "mamba2", "zamba2"})


def vllm_use(model_type: str, name: str, base: str, adapter: LoraConfig | None, *, more_weights: bool = False) -> str:
    """A paragraph of Markdown: how vLLM serves this, or why it does not.

    Args:
        name: of the run or repository. base: of its base model, as a reader can name it.
        adapter: None for a whole model.
        more_weights: there are trained weights beside the adapter, which vLLM does not read.
    """
    if model_type not in WITH_LORA | MERGED_ONLY:
        return f"vLLM has no {model_type} models; `ssm-tune serve {name}` does."
    if adapter is None:
        return f"vLLM serves this model: `vllm serve {name}`."
    merge = f"`ssm-tune merge {name}`, then `vllm serve {Path(name).name}/merged`"
    if model_type in MERGED_ONLY:
        return f"vLLM serves {model_type} models, but none with a LoRA adapter on it. Merge first: {merge}."
    reasons = [
        (more_weights, "SSM parameters of its own"),
        (adapter.use_dora, "DoRA"),
        (bool(adapter.modules_to_save), "modules trained whole"),
        (bool(adapter.target_parameters), "adapters on bare parameters"),
    ]
    held = [text for holds, text in reasons if holds]
    if held:
        return f"vLLM serves {model_type} with plain LoRA; this adapter has {' and '.join(held)}. Merge first: {merge}."
    return (
        f"vLLM serves {model_type} with LoRA adapters: `vllm serve {base} --enable-lora --max-lora-rank "
        f"{max(8, adapter.r)} --lora-modules {Path(name).name}={name}`. Merged it serves it too: {merge}."
    )
