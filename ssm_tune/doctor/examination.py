"""The doctor's round: machine, packages, kernels, model; and what follows from what was found."""

from __future__ import annotations

import json
import logging
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ssm_tune
from ssm_tune.doctor.packages import judge_packages, look_at_packages
from ssm_tune.doctor.packed import try_packed_weights
from ssm_tune.doctor.paths import FAILURES, find_paths
from ssm_tune.doctor.report import Advice, ModelReport, PackageReport, Report, kernel_status
from ssm_tune.families import family_of
from ssm_tune.kernels import set_kernel_order
from ssm_tune.kernels.backends import OPERATIONS, KernelTrial, try_kernels
from ssm_tune.kernels.packages import without_downloads
from ssm_tune.recipe import RESOLVED, KernelsSection, ModelSection, RecipeError, load_recipe
from ssm_tune.shipped import shipped_names

_BUILD = "pip install --no-build-isolation 'mamba-ssm>=2.3,<3' 'causal-conv1d>=1.6,<2'"
_SCAN_BUILD = (
    "MAMBA_KEEP_CUDA_BUILD=TRUE pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation "
    "'mamba-ssm>=2.3,<3'"
)


@dataclass
class _Asked:
    """What MODEL turned out to be."""

    name: str
    config: Any
    model: ModelSection
    kernels: KernelsSection


def run_doctor(model: str | None = None, *, as_json: bool = False) -> int:
    """Examine, print, and give the exit code: 0 nothing to repair, 1 a problem (a RecipeError is 2)."""
    for noisy in ("kernels", "bitsandbytes", "transformers"):  # what matters of theirs is in the report
        logging.getLogger(noisy).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = examine(model, say=_Progress())
    print(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    return 0 if report.ok else 1


class _Progress:
    """What is being called, on a terminal: the first call of a kernel on a GPU compiles it, for up to a minute."""

    def __call__(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}" if line else "\r\033[K", end="", file=sys.stderr, flush=True)


def examine(
    model: str | Path | None = None,
    device: str | torch.device | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """What works here, and which paths a model would take. Weights are not read, and no kernel is downloaded.

    Args:
        model: a checkpoint's folder or Hub name (its config alone is read), a run folder, a recipe's file or name.
            Only the kernels of its operations are called then.
        device: that the model would run on; None: the GPU if there is one.
        say: is told what is being called, and "" at the end.

    Raises:
        RecipeError: there is no such model, or its config cannot be read.
    """
    asked = None if model is None else _read_model(str(model))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else (0, 0)
    machine = _describe_machine(place, capability)
    with without_downloads():
        packages = look_at_packages()
        _set_order(asked)
        try:
            say("the model's mixer" if asked is not None else "")
            found = None if asked is None else _describe_model(asked, place)
            used = {path.operation for path in found.paths} if found is not None and found.paths else OPERATIONS
            trials = try_kernels([operation for operation in OPERATIONS if operation in used], say)
            say("packed weights")
            trials += try_packed_weights(packages, place)
        finally:
            say("")
            set_kernel_order(None)
    advice = [*_judge_machine(machine), *judge_packages(packages, capability)]
    advice += _judge_kernels(trials, packages, place)
    if found is not None:
        advice += _judge_model(found, packages)
    return Report(machine, packages, trials, found, list(dict.fromkeys(advice)))


# -- the machine ---------------------------------------------------------------------------------------------------


def _describe_machine(device: torch.device, capability: tuple[int, int]) -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else (f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU")
    if torch.cuda.is_available():
        no_gpu = ""
    elif cuda is None:
        no_gpu = "this PyTorch is built without CUDA"
    else:
        no_gpu = "PyTorch finds none" + ("" if driver.exists() else " (there is no NVIDIA driver)")
    return {
        "ssm_tune": ssm_tune.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_build": build,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "capability": list(capability),
        "gpus": torch.cuda.device_count(),
        "no_gpu": no_gpu,
        "nvidia_driver": driver.exists(),
    }


def _judge_machine(machine: dict[str, Any]) -> list[Advice]:
    if machine["nvidia_driver"] and machine["gpus"] == 0:
        what = f"there is an NVIDIA driver here, but {machine['no_gpu']}: everything would run on the CPU"
        return [Advice("problem", what, "pip install --force-reinstall torch  # a build for CUDA, see pytorch.org")]
    return []


# -- the model -----------------------------------------------------------------------------------------------------


def _read_model(name: str) -> _Asked:
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.suffix in (".yaml", ".yml") or name in shipped_names("recipes")):
        recipe = load_recipe(name, check_files=False)
        return _Asked(name, _config_of(recipe.model, recipe.tokenizer.vocab_size), recipe.model, recipe.kernels)
    resolved = folder / RESOLVED
    if resolved.is_file():
        recipe = load_recipe(resolved, check_files=False, complete=False)
        return _Asked(name, _config_of_run(folder, recipe), recipe.model, recipe.kernels)
    section = ModelSection(name=name)
    return _Asked(name, _config_of(section, None), section, KernelsSection())


def _config_of(section: ModelSection, vocabulary: int | None) -> Any:
    from ssm_tune.model import read_config

    if section.architecture is not None:
        from ssm_tune.architectures import plan_config

        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        return plan_config(section, vocabulary or 1024, tokens)
    assert section.name is not None
    return read_config(section.name, section.revision, local_only=Path(section.name).exists())


def _config_of_run(folder: Path, recipe: Any) -> Any:
    """Of a run's own model, or of the base of its adapter; of a run that has not ended, of what it started from."""
    from ssm_tune.model import read_config

    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        try:
            return read_config(str(folder), local_only=True)
        except RecipeError as error:
            if (folder / "config.json").is_file() or recipe.model.name is None:
                raise
            name = recipe.model.name
            raise RecipeError(
                f"{folder}: its base model {name} is neither here nor in the local cache, and the network is not asked "
                f"for a folder. To look at the base: ssm-tune doctor {name}"
            ) from error
    return _config_of(recipe.model, recipe.tokenizer.vocab_size)


def _set_order(asked: _Asked | None) -> None:
    try:
        set_kernel_order(None if asked is None else asked.kernels.order)
    except ValueError as error:
        raise RecipeError(f"{asked.name if asked else ''}: {error}") from error


def _describe_model(asked: _Asked, device: torch.device) -> ModelReport:
    section = asked.model
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, None: None}
    dtype = names[section.dtype] or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    bits = "in 4 bits" if section.load_in_4bit else "in 8 bits" if section.load_in_8bit else "not quantised"
    attention = (section.attn_implementation or "sdpa") if family_of(asked.config.model_type).hybrid else ""
    paths, error = [], ""
    try:
        paths = find_paths(asked.config, device, dtype)
    except FAILURES as failure:
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
    shown = str(dtype).removeprefix("torch.")
    return ModelReport(asked.name, asked.config.model_type, device.type, shown, bits, attention, paths, error)


# -- what follows --------------------------------------------------------------------------------------------------


def _judge_kernels(trials: list[KernelTrial], packages: list[PackageReport], device: torch.device) -> list[Advice]:
    """Kernels that are there and fail. A package whose import fails has been told of already."""
    broken = {package.name.replace("-", "_") for package in packages if package.status == "broken"}
    found = []
    for trial in trials:
        if kernel_status(trial) != "fails" or trial.package in broken or _not_in_the_cache(trial):
            continue
        found.append(Advice("problem", f"{trial.operation} by {trial.package}: {trial.failure}", _repair_of(trial)))
    if any(_not_in_the_cache(trial) for trial in trials):
        what = "prebuilt kernels are not in the local cache yet: the first run that needs them downloads them"
        found.append(Advice("note", what))
    return found


def _not_in_the_cache(trial: KernelTrial) -> bool:
    return trial.source == "hub" and "not available in the local cache" in (trial.failure or "")


def _repair_of(trial: KernelTrial) -> str:
    failure = trial.failure or ""
    if "selective_scan_cuda is not installed" in failure or "MAMBA_KEEP_CUDA_BUILD" in failure:
        return _SCAN_BUILD
    if trial.package in ("mamba_ssm", "causal_conv1d"):
        name, wanted = {"mamba_ssm": ("mamba-ssm", ">=2.3,<3"), "causal_conv1d": ("causal-conv1d", ">=1.6,<2")}[
            trial.package
        ]
        return f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation '{name}{wanted}'"
    return f"pip install --force-reinstall {trial.package}" if trial.source == "ours" else ""


def _judge_model(model: ModelReport, packages: list[PackageReport]) -> list[Advice]:
    found = []
    if model.error:
        found.append(Advice("problem", f"{model.name}: its mixer does not run on {model.device}: {model.error}"))
    works = {package.name for package in packages if package.status == "works"}
    if model.weights != "not quantised" and "bitsandbytes" not in works:
        found.append(
            Advice(
                "problem",
                f"{model.name} is loaded {model.weights}: that needs bitsandbytes",
                "pip install 'ssm-tune[quant]'",
            )
        )
    slow = [path for path in model.paths if path.cost and path.reason]
    if not slow:
        return found
    operations = ", ".join(dict.fromkeys(path.operation for path in slow))
    costs = "; ".join(dict.fromkeys(path.cost for path in slow))
    reasons = "; ".join(dict.fromkeys(path.reason for path in slow))
    if model.device == "cuda":
        missing = "is not installed" in reasons
        fix = "pip install 'ssm-tune[prebuilt]'  # ready kernels; or compiled here: " + _BUILD if missing else ""
        what = f"{model.name}: {operations} take a slow path ({costs}), because {reasons}"
        found.append(Advice("problem", what, fix))
    else:
        found.append(Advice("note", f"{model.name}: {operations} take a slow path ({costs}), because {reasons}"))
    return found
