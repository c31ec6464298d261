"""LoRA adapters on every projection of a state-space model: which modules, how they are added, saved and loaded.

PEFT does the adapting. What is ours: targets by family, checked against the model before weights are loaded; PEFT's
guard against `out_proj`, which is there because stock fused kernels read that weight raw, stepped round in a scope (our
mixers call every projection as a module); and strict loading, where PEFT only warns.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ssm_tune.lora_layers import cast_adapters_only
from ssm_tune.quantization import refuse_dora_in_8_bits
from ssm_tune.recipe import RecipeError
from ssm_tune.ssm_parameters import (
    find_ssm_parameters,
    load_ssm_parameters,
    save_ssm_parameters,
    train_ssm_parameters,
)
from ssm_tune.targets import adapter_targets, ends_with, find_targets, leaf_of, shorten_paths, show_names

if TYPE_CHECKING:
    from ssm_tune.recipe import AdapterSection

__all__ = [
    "adapter_targets",
    "apply_adapter",
    "check_targets",
    "guard_allows",
    "guard_lifted",
    "is_adapted",
    "load_adapter",
    "load_ssm_parameters",
    "read_adapter_config",
    "restore_adapter",
    "save_adapter",
    "save_ssm_parameters",
]

logger = logging.getLogger(__name__)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what PEFT puts before the base model's own names
_GUARD = "_check_target_module_compatiblity"  # PEFT's spelling
_guard_lock = threading.RLock()


# -- adding --------------------------------------------------------------------------------------------------------


@contextmanager
def guard_lifted() -> Iterator[None]:
    """Within this scope, and in this thread only, PEFT accepts `out_proj` of Mamba models as a LoRA target."""
    owner = threading.get_ident()
    original = getattr(LoraModel, _GUARD)

    def check(self: LoraModel, config: Any, model: nn.Module, name: str) -> None:
        if threading.get_ident() != owner:
            original(self, config, model, name)

    with _guard_lock:
        inherited = _GUARD not in vars(LoraModel)
        setattr(LoraModel, _GUARD, check)
        try:
            yield
        finally:
            if inherited:
                delattr(LoraModel, _GUARD)
            else:
                setattr(LoraModel, _GUARD, original)


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a PEFT model round a base model."""
    return isinstance(model, PeftModel)


def guard_allows(model: nn.Module, target: str) -> bool:
    """Whether unpatched PEFT would load a LoRA adapter on a module of this name."""
    config = LoraConfig(target_modules=[target])
    try:
        BaseTuner._check_target_module_compatiblity(None, config, model, target)
    except ValueError:
        return False
    return True


def check_targets(model: nn.Module, section: AdapterSection) -> None:
    """Check an adapter section's names against a model (meta will do). Raises RecipeError with every mistake."""
    mistakes: list[str] = []
    paths: list[str] = []
    try:
        paths = find_targets(model, section.targets).paths
    except RecipeError as error:
        mistakes += error.mistakes
    for check in (
        lambda: find_ssm_parameters(model, section.train_also),
        lambda: _check_modules_to_save(model, section.modules_to_save or [], paths),
    ):
        try:
            check()
        except RecipeError as error:
            mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)


def apply_adapter(
    model: nn.Module, section: AdapterSection, *, base_name: str | None = None, seed: int | None = None
) -> PeftModel:
    """Put a fresh LoRA, rsLoRA or DoRA adapter on a patched model, in place. Adapter weights are float32.

    Args:
        model: the patched base model; everything in it is frozen, except what `train_also` names.
        section: the recipe's adapter section.
        base_name: what adapter_config.json says the base model is; default: the name the model was loaded by.
        seed: for the adapter's random initialisation; the global random state is then left as it was.

    Raises:
        RecipeError: a target, modules_to_save or train_also name that is not in the model, or cannot be trained so.
    """
    if section.use_dora:
        refuse_dora_in_8_bits(model)
    found = find_targets(model, section.targets)
    trained = find_ssm_parameters(model, section.train_also)
    modules = _check_modules_to_save(model, section.modules_to_save or [], found.paths)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=shorten_paths(model, found.paths),
        modules_to_save=modules or None,
    )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []  # others are other processes'
    with torch.random.fork_rng(devices) if seed is not None else nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        peft_model = _put_on(model, config)
    if base_name is not None:  # PEFT fills in the model's own name_or_path
        peft_model.peft_config["default"].base_model_name_or_path = base_name
    _check_placed(peft_model, found.paths)
    _cast_saved_modules(peft_model, torch.float32)
    train_ssm_parameters(peft_model, trained)
    for name, reason in found.left_out.items():
        found.notes.append(f"no adapter on {name}: {reason}.")
    for note in _merge_repeats(found.notes):
        logger.warning("adapter: %s", note)
    return cast_adapters_only(peft_model)


def _put_on(model: nn.Module, config: LoraConfig) -> PeftModel:
    """PEFT's adapter on the model, in place, whichever projections it names."""
    with guard_lifted(), warnings.catch_warnings():
        # PEFT asks for checkpointing by the name of before; nobody who trains can do anything about it.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return get_peft_model(model, config)


def _merge_repeats(notes: list[str]) -> list[str]:
    """One line for notes that differ only in the layer's number."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault("".join("#" if part.isdigit() else part for part in note), []).append(note)
    return [group[0] if len(group) == 1 else f"{group[0]} ({len(group)} such)" for group in groups.values()]


def _check_modules_to_save(model: nn.Module, names: Sequence[str], targets: Sequence[str]) -> list[str]:
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    mistakes: list[str] = []
    for name in names:
        where = f"adapter.modules_to_save: {name!r}"
        matched = [module for module in modules if ends_with(module, name)]
        inside = [target for target in targets if any(f"{target}.".startswith(f"{module}.") for module in matched)]
        if not matched and any(ends_with(parameter, name) for parameter, _ in model.named_parameters()):
            mistakes.append(
                f"{where} is a parameter, which PEFT would ignore in silence. Use adapter.train_also=[{name}]."
            )
        elif not matched:
            near = get_close_matches(str(name), sorted(set(map(leaf_of, modules))), n=1)
            mistakes.append(f"{where} is not in the model" + (f"; did you mean {near[0]}?" if near else "."))
        elif inside:
            mistakes.append(f"{where} holds {inside[0]}, which also gets an adapter. Take one of the two away.")
        elif len({id(model.get_submodule(module)) for module in matched}) < len(matched):
            mistakes.append(f"{where} is one module used by several blocks; PEFT would train a copy for each use.")
    if mistakes:
        raise RecipeError(mistakes)
    return list(names)


def _check_placed(model: PeftModel, paths: Sequence[str]) -> None:
    """PEFT rewrites targets for some architectures: what it adapted must be what was asked for."""
    base = model.get_base_model()
    placed = {name for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    if placed != set(paths):
        differing = show_names(sorted(placed ^ set(paths)))
        raise RecipeError(f"adapter.targets: PEFT did not put adapters where they were asked for: {differing}.")


def _cast_saved_modules(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Copies made for modules_to_save: to `dtype`, or (None) to the dtype of the module they stand for."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            original = next(module.original_module.parameters()).dtype
            module.modules_to_save.to(dtype or original)


# -- saving and loading --------------------------------------------------------------------------------------------


def save_adapter(model: PeftModel, folder: str | Path, *, state_dict: dict[str, Any] | None = None) -> None:
    """Write a standard PEFT adapter, and beside it the SSM parameters that are trained whole.

    Args:
        state_dict: the whole model's, for sharded models whose parameters must be gathered first.
    """
    folder = Path(folder)
    # save_embedding_layers="auto" asks the Hub for the base model's config at every checkpoint
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=state_dict)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty card
    save_ssm_parameters(model, folder, state_dict=state_dict)


def load_adapter(model: nn.Module, folder: str | Path, trainable: bool = False) -> PeftModel:
    """Put a saved adapter, and the SSM parameters beside it, on a patched base model, in place.

    Args:
        trainable: keep training it (float32 masters, gradients on); otherwise everything is frozen.

    Raises:
        RecipeError: files missing, damaged or cut off; an adapter of another model; tensors missing or too many.
    """
    folder = Path(folder)
    config = read_adapter_config(folder)
    shapes = _read_shapes(folder / WEIGHTS_FILE)
    _check_fits(model, shapes, folder)
    if config.use_dora:
        refuse_dora_in_8_bits(model)
    config.inference_mode = not trainable
    name, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT warns when it puts the model's
    try:
        peft_model = _put_on(model, config)
    except ValueError as error:
        raise RecipeError(f"{folder / CONFIG_FILE} does not fit the model: {error}") from error
    config.base_model_name_or_path = name
    restore_adapter(peft_model, folder, trainable=trainable)
    _cast_saved_modules(peft_model, torch.float32 if trainable else None)
    return cast_adapters_only(peft_model)


def restore_adapter(model: PeftModel, folder: str | Path, trainable: bool = True) -> None:
    """Read a saved adapter into a model that has it already (a resumed run). Raises as `load_adapter`."""
    folder = Path(folder)
    shapes = _read_shapes(folder / WEIGHTS_FILE)
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    known = {name.replace(".default.", "."): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = sorted(set(expected) - set(shapes))
    unknown = sorted(name for name in set(shapes) - set(expected) if name not in known)
    unequal = sorted(name for name in shapes if name in expected | known and shapes[name] != (expected | known)[name])
    if missing or unknown or unequal:
        told = [
            f"{label}: {show_names([name.removeprefix(_PREFIX) for name in names])}"
            for label, names in (("missing", missing), ("not in the model", unknown), ("of another shape", unequal))
            if names
        ]
        raise RecipeError(f"{folder / WEIGHTS_FILE} does not fit the model; {'; '.join(told)}.")
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS_FILE))
    load_ssm_parameters(model, folder, trainable=trainable)


def read_adapter_config(folder: Path) -> LoraConfig:
    """The adapter's configuration. Raises RecipeError if it is missing, damaged, or not LoRA."""
    file = folder / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{folder} holds no adapter: {CONFIG_FILE} is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise RecipeError(f"{file} is not a LoRA adapter's configuration (peft_type must be LORA).")
    return LoraConfig.from_pretrained(str(folder))


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RecipeError(f"{file.parent} holds no adapter: {file.name} is missing.") from None
    except SafetensorError as error:
        raise RecipeError(f"{file} is damaged or cut off: {error}") from error


def _check_fits(model: nn.Module, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Every adapted module exists in the model, with the width that the adapter was trained on."""
    modules = dict(model.named_modules())
    for name, shape in shapes.items():
        path, _, rest = name.removeprefix(_PREFIX).partition(".lora_")
        if not rest or rest[0] not in "AB":
            continue
        if path not in modules:
            raise RecipeError(
                f"{folder}: the adapter is for another model: {path} is not in this {model.config.model_type} model."
            )
        module = modules[path]
        if not isinstance(module, nn.Linear):
            continue
        label, theirs, ours = (
            ("inputs", shape[1], module.in_features) if rest[0] == "A" else ("outputs", shape[0], module.out_features)
        )
        if theirs != ours:
            raise RecipeError(
                f"{folder}: the adapter is for another model: its {path} has {theirs} {label}, this model's has {ours}."
            )
