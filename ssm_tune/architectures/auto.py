"""Our own models in transformers' Auto classes.

Configs are registered when transformers' Auto classes are imported (`ssm_tune.registration`), the models when the first
config of theirs is made: whoever loads or builds a model has made its config before.
"""

from __future__ import annotations

import importlib

# model_type -> the module of its classes, and how their names begin
_HOMES = {
    "mamba3": "Mamba3",
    "mamba_hybrid": "Hybrid",
    "mamba2_hybrid": "Mamba2Hybrid",
    "samba": "Samba",
    "h3": "H3",
}
_MODULES = {"mamba_hybrid": "hybrid"}
_registered: set[str] = set()


def register_configs() -> None:
    """Make AutoConfig know our model types."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from ssm_tune.architectures.configs import CONFIGS

    for model_type, config in CONFIGS.items():
        AutoConfig.register(model_type, config, exist_ok=True)


def register_models(model_type: str) -> None:
    """Make AutoModel and AutoModelForCausalLM know the models of one of our types."""
    if model_type in _registered or model_type not in _HOMES:
        return
    _registered.add(model_type)
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from ssm_tune.architectures.configs import CONFIGS

    register_configs()
    module = importlib.import_module(f"ssm_tune.architectures.{_MODULES.get(model_type, model_type)}")
    name = _HOMES[model_type]
    AutoModel.register(CONFIGS[model_type], vars(module)[f"{name}Model"], exist_ok=True)
    AutoModelForCausalLM.register(CONFIGS[model_type], vars(module)[f"{name}ForCausalLM"], exist_ok=True)
