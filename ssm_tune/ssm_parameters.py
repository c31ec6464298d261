"""SSM parameters trained whole beside an adapter (`adapter.train_also`): found, set trainable, saved and loaded.

PEFT has no place for bare parameters: `modules_to_save: [A_log]` is ignored in silence. They lie in
ssm_parameters.safetensors beside the adapter, in float32, under the names that they have in the base model.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ssm_tune.recipe import RecipeError

SSM_FILE = "ssm_parameters.safetensors"

# What each name of train_also is called in the families: Mamba-1's step bias is the bias of its dt_proj.
_ENDS: dict[str, tuple[str, ...]] = {
    "A_log": ("A_log",),
    "D": ("D",),
    "dt_bias": ("dt_bias", "dt_proj.bias", "dt_proj_bias"),
    "conv1d": ("conv1d.weight", "conv1d.bias"),
}


def find_ssm_parameters(model: nn.Module, train_also: Sequence[str]) -> list[str]:
    """Names, as in the base model, of the parameters that `train_also` means; works on the meta device too.

    Raises:
        RecipeError: a name that is not one of A_log, D, dt_bias, conv1d, or that this model does not have.
    """
    names = list(_base_parameters(model))
    found: list[str] = []
    mistakes: list[str] = []
    for wanted in train_also:
        if wanted not in _ENDS:
            near = get_close_matches(str(wanted), _ENDS, n=1, cutoff=0.5)
            guess = f" Did you mean {near[0]}?" if near else ""
            mistakes.append(f"adapter.train_also: {wanted!r} is not one of {', '.join(_ENDS)}.{guess}")
            continue
        matched = [name for name in names if any(name.endswith(f".{end}") for end in _ENDS[wanted])]
        if not matched:
            mistakes.append(f"adapter.train_also: this {model.config.model_type} model has no {wanted}.")
        found += matched
    if mistakes:
        raise RecipeError(mistakes)
    return list(dict.fromkeys(found))


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The base model's parameters by the names they have without PEFT's wrappers; adapters' own are not among them."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and ".modules_to_save." not in name:
            parameters[base_name(name)] = parameter
    return parameters


def base_name(name: str) -> str:
    """A parameter's name in a PEFT model -> its name in the base model."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")


def train_ssm_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Let gradients reach these parameters, as float32 masters."""
    parameters = _base_parameters(model)
    for name in names:
        parameters[name].data = parameters[name].data.float()
        parameters[name].requires_grad_(True)


def save_ssm_parameters(model: nn.Module, folder: Path, *, state_dict: dict[str, Any] | None = None) -> None:
    """Write the base model's parameters that are being trained to ssm_parameters.safetensors, in float32.

    Without any, nothing is written. `state_dict`: the whole model's, where its parameters are sharded.
    """
    parameters = _base_parameters(model)
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not names:
        return
    tensors = parameters if state_dict is None else {base_name(key): value for key, value in state_dict.items()}
    save_file(
        {name: tensors[name].detach().float().cpu().contiguous() for name in names},
        Path(folder) / SSM_FILE,
        metadata={"format": "pt"},
    )


def load_ssm_parameters(model: nn.Module, folder: Path, *, trainable: bool = True) -> list[str]:
    """Read ssm_parameters.safetensors, if the folder has one, into the model; returns the names in it.

    `trainable`: they become float32 masters that are trained on; otherwise they keep the model's dtype and stay frozen.

    Raises:
        RecipeError: the file is missing though the model trains such parameters; it is damaged; it holds a parameter
            that the model has not, or has in another shape.
    """
    file = Path(folder) / SSM_FILE
    parameters = _base_parameters(model)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if not file.exists() and not trained:
        return []
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        raise RecipeError(f"{file} is missing: the trained SSM parameters are not beside the adapter.") from None
    except SafetensorError as error:
        raise RecipeError(f"{file} is damaged or cut off: {error}") from error
    if missing := sorted(trained - set(tensors)):
        raise RecipeError(f"{file} lacks {missing[0]} ({len(missing)} such), which adapter.train_also trains.")
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            has = f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter"
            raise RecipeError(f"{file} is for another model: {name} {tuple(tensor.shape)}; this one has {has}.")
    if trainable:
        train_ssm_parameters(model, list(tensors))
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return list(tensors)
