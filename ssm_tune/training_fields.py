"""What the `training` section may say: the fields of TRL's SFTConfig, read from its source.

Importing SFTConfig takes seconds and torch; reading its source and that of its bases with `ast` takes hundredths of a
second, and follows whatever version is installed. tests/test_training_fields.py compares the two.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Fields that another section, or the command line, answers for: what to write instead.
OWNED_ELSEWHERE = {
    "push_to_hub": "write hub.push: adapter (or merged)",
    "hub_model_id": "write hub.repo",
    "hub_private_repo": "write hub.private",
    "hub_token": "log in once with `hf auth login`; a token does not belong in a recipe",
    "hub_strategy": "hub.push uploads once, when the run is complete",
    "hub_always_push": "hub.push uploads once, when the run is complete",
    "hub_revision": "hub.push uploads to the repository's main branch",
    "model_init_kwargs": "write model.dtype, model.attn_implementation, model.load_in_4bit or model.revision",
    "trust_remote_code": "code from the Hub is never run; the supported families need none",
    "chat_template_path": "write tokenizer.chat_template",
    "eos_token": "the tokenizer's own eos token is learned; choose the tokenizer with tokenizer.name",
    "pad_token": "a pad token other than eos is chosen for you and stated at start",
    "fsdp": "use the command line: --accelerate fsdp2",
    "fsdp_config": "use the command line: --accelerate FILE, with an accelerate config",
    "deepspeed": "use the command line: --accelerate FILE, with an accelerate config",
    "parallelism_config": "use the command line: --accelerate FILE, with an accelerate config",
    "accelerator_config": "use the command line: --accelerate FILE, with an accelerate config",
    "local_rank": "the launcher sets it: --processes N",
    "resume_from_checkpoint": "use the command line: --resume",
    "do_train": "the command says what is done: ssm-tune sft or pretrain",
    "do_eval": "give data.eval or data.eval_fraction, and training.eval_strategy",
    "do_predict": "use ssm-tune eval or generate on the finished run",
    "dataset_text_field": "name the column in data.train: columns: {text: ...}",
    "dataset_kwargs": "the data section says how rows become tokens",
    "dataset_num_proc": "the data section prepares rows in one process",
    "shuffle_dataset": "rows are shuffled by the trainer, from training.seed",
    "truncation_mode": "write data.too_long: cut or drop",
    "packing_strategy": "packing is best-fit; data.too_long and data.isolate say the rest",
    "padding_free": "write training.packing: true",
    "eval_packing": "evaluation data is packed as training data is: training.packing",
    "pad_to_multiple_of": "rows are padded to the longest of their batch, or to max_length with training.packing",
    "remove_unused_columns": "the data section decides which columns reach the model",
    "label_names": "the data section makes the labels",
    "length_column_name": "the data section measures the rows",
    "use_liger_kernel": "the loss is fused with the head already; kernels.order chooses among the other kernels",
    "liger_kernel_config": "the loss is fused with the head already; kernels.order chooses among the other kernels",
}

# Names of older versions and of other trainers, whose meaning is not the nearest spelling.
RENAMED = {
    "warmup_ratio": "write warmup_steps: a number below 1 is a share of all steps",
    "evaluation_strategy": "write eval_strategy",
    "max_seq_length": "write max_length",
    "max_seq_len": "write max_length",
    "batch_size": "write per_device_train_batch_size",
    "lr": "write learning_rate",
    "epochs": "write num_train_epochs",
    "steps": "write max_steps",
    "group_by_length": "write train_sampling_strategy: group_by_length",
    "overwrite_output_dir": "an existing run folder is only continued, with --resume",
    "logging_dir": "TensorBoard files lie in the run folder's tensorboard/",
    "no_cuda": "write use_cpu",
    "gradient_accumulation": "write gradient_accumulation_steps",
}

# Where values make sense, in interval notation; SFTConfig itself takes any.
RANGES = {
    "per_device_train_batch_size": "[1, inf)",
    "per_device_eval_batch_size": "[1, inf)",
    "gradient_accumulation_steps": "[1, inf)",
    "eval_accumulation_steps": "[1, inf)",
    "num_train_epochs": "(0, inf)",
    "learning_rate": "(0, inf)",
    "warmup_steps": "[0, inf)",
    "weight_decay": "[0, inf)",
    "adam_beta1": "[0, 1)",
    "adam_beta2": "[0, 1)",
    "adam_epsilon": "(0, inf)",
    "max_grad_norm": "[0, inf)",
    "label_smoothing_factor": "[0, 1)",
    "neftune_noise_alpha": "(0, inf)",
    "max_length": "[2, inf)",
    "logging_steps": "(0, inf)",
    "eval_steps": "(0, inf)",
    "eval_delay": "[0, inf)",
    "save_steps": "(0, inf)",
    "save_total_limit": "[1, inf)",
    "seed": "[0, 4294967295]",
    "data_seed": "[0, 4294967295]",
    "dataloader_num_workers": "[0, inf)",
    "dataloader_prefetch_factor": "[1, inf)",
    "torch_empty_cache_steps": "[1, inf)",
    "ddp_timeout": "(0, inf)",
}

_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_CHOICES = {"log_level": _LOG_LEVELS, "log_level_replica": _LOG_LEVELS}
_UNREADABLE = object()


class TrainingField(NamedTuple):
    """A field of SFTConfig: its annotation as written, its default, and the values it may take (empty: any)."""

    annotation: str
    default: Any
    choices: tuple[str, ...] = ()


@cache
def training_fields() -> dict[str, TrainingField]:
    """The fields of the installed SFTConfig by name, inherited ones too.

    A default that is not a literal in the source (there is none in the tested versions) is given as `...`.

    Raises:
        ModuleNotFoundError: trl or transformers is not installed.
        LookupError: their sources are laid out in a way that this reader does not know.
    """
    transformers = _package_folder("transformers")
    enums: dict[str, tuple[str, ...]] = {}
    for name in ("training_args.py", "trainer_utils.py", "debug_utils.py"):
        enums |= _enums(_parse(transformers / name))
    fields: dict[str, TrainingField] = {}
    for tree, class_name in reversed(_ancestry(_package_folder("trl") / "trainer" / "sft_config.py", "SFTConfig")):
        fields |= _fields(_class(tree, class_name), enums)
    return fields


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed; the training section is checked against it", name=name)
    return Path(spec.origin).parent


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"class {name} is not where training_fields looks for it; the installed trl is not a tested one")


def _ancestry(path: Path, name: str) -> list[tuple[ast.Module, str]]:
    """The class and its bases up to TrainingArguments, nearest first, each with the module it is written in."""
    tree = _parse(path)
    found = [(tree, name)]
    for base in _class(tree, name).bases:
        if isinstance(base, ast.Name):
            home = _home_of(tree, base.id, path)
            if home is not None:
                found += _ancestry(home, base.id)
    return found


def _home_of(tree: ast.Module, name: str, path: Path) -> Path | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            if node.level == 1 and node.module:
                return path.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            if node.module == "transformers" and name == "TrainingArguments":
                return _package_folder("transformers") / "training_args.py"
    return None


def _enums(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The values of every string enum of a module, by class name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            values = [_literal(item.value) for item in node.body if isinstance(item, ast.Assign)]
            found[node.name] = tuple(value for value in values if isinstance(value, str))
    return found


def _fields(node: ast.ClassDef, enums: dict[str, tuple[str, ...]]) -> dict[str, TrainingField]:
    names: dict[str, Any] = {}
    fields = {}
    for item in node.body:
        for part in ast.walk(item):
            if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                names[part.targets[0].id] = _literal(part.value)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            annotation = ast.unparse(item.annotation)
            default, choices = _default_and_choices(item.value, names)
            for enum_name, values in enums.items():
                # `list[DebugOption]` takes one string of several options; only plain enums have one value.
                if enum_name in annotation and "list" not in annotation:
                    choices = values
            fields[item.target.id] = TrainingField(annotation, default, _CHOICES.get(item.target.id, choices))
    return fields


def _default_and_choices(value: ast.expr | None, names: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return (... if value is None else _readable(value, names)), ()
    default: Any = ...
    choices: tuple[str, ...] = ()
    for keyword in value.keywords:
        if keyword.arg == "default":
            default = _readable(keyword.value, names)
        elif keyword.arg == "default_factory":
            default = {"list": [], "dict": {}}.get(ast.unparse(keyword.value), ...)
        elif keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            for key, entry in zip(keyword.value.keys, keyword.value.values, strict=True):
                listed = _literal(entry) if key is not None and _literal(key) == "choices" else _UNREADABLE
                if isinstance(listed, list | tuple):
                    choices = tuple(listed)
    return default, choices


def _readable(node: ast.expr, names: dict[str, Any]) -> Any:
    value = names.get(node.id, _UNREADABLE) if isinstance(node, ast.Name) else _literal(node)
    return ... if value is _UNREADABLE else value


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNREADABLE
