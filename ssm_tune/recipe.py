"""What a recipe may say: one dataclass per YAML section, and one error for every mistake in it.

Reading a recipe imports neither torch nor transformers: its mistakes are told in under a second.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ssm_tune.recipe_checks import Rule, check_keys, check_section, check_training, rules_of, show
from ssm_tune.recipe_combinations import check_combinations
from ssm_tune.recipe_paths import locate, resolve_paths
from ssm_tune.recipe_text import (
    Mistakes,
    apply_overrides,
    check_leaves,
    escape_interpolations,
    kind_of,
    read_yaml,
    resolve_interpolations,
)
from ssm_tune.training_fields import training_fields

RESOLVED = "recipe.resolved.yaml"  # in a run folder: the recipe with every default filled in


class RecipeError(ValueError):
    """A user's mistake: where it is, what was expected, what to do. `mistakes` holds one line each."""

    def __init__(self, mistakes: str | Sequence[str]) -> None:
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(mistakes)
        super().__init__("\n".join(self.mistakes))


# What a row's columns may be called, and so what `columns` may map; ssm_tune.data.formatting says what each becomes.
COLUMN_NAMES = (
    *("messages", "conversations", "prompt", "completion", "question", "answer"),
    *("instruction", "input", "output", "text"),
)


# What `kernels.order` may name: sources (mamba-ssm and causal-conv1d as installed; the same prebuilt, from the Hub; our
# own; PyTorch), or single kernels. Of ssm_tune.kernels, which imports torch; a test holds the two together.
KERNELS = (
    *("installed", "hub", "ours", "pytorch"),
    *("causal_conv1d", "chunked", "cuda", "gathered", "mamba_ssm", "numba", "parts", "reference", "triton"),
)


def _setting(default: Any = None, *, annotation: str = "", **rules: Any) -> Any:
    metadata = rules | ({"annotation": annotation} if annotation else {})
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelSection:
    """`name`: a checkpoint (a Hub name or a folder); or `architecture` and the keys below it: from random weights."""

    name: str | None = None
    revision: str | None = None
    dtype: str | None = _setting(choices=("float32", "bfloat16"))
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    attn_implementation: str | None = None
    architecture: str | None = None
    size: str | None = None
    dimensions: dict[str, Any] = _setting({})
    pattern: str | None = None
    attention_ratio: float | None = _setting(interval="[0, 1]")
    mlp_ratio: float | None = _setting(interval="[0, 1]")
    layers: int | None = _setting(interval="[1, inf)")
    attention_every: int | None = _setting(interval="[1, inf)")
    mixer: str | None = None


@dataclass
class TokenizerSection:
    """`name` None: the model's own. `chat_template`: a .jinja file.

    `train`: bpe (or true) makes a byte-level BPE of `vocab_size` from the first 100 million characters of the data.
    """

    name: str | None = None
    chat_template: str | None = None
    train: Any = _setting(False, annotation="bool | Literal['bpe']")
    vocab_size: int | None = _setting(interval="[257, inf)")


@dataclass
class DataSource:
    """One data set: a file, a folder or a Hub name (`owner/name`, or `owner/name:subset` where it has several).

    columns: the role of each column by role, e.g. {prompt: question, completion: answer}; None: recognised by name.
    weight: how often its rows are drawn against the other sources'; None: all rows once.
    """

    path: str = ""
    split: str = "train"
    weight: float | None = _setting(interval="(0, inf)")
    columns: dict[str, str] | None = _setting(keys=COLUMN_NAMES)


@dataclass
class DataSection:
    """What is trained on, and what is held out: `eval`, or the share `eval_fraction` of `train`.

    too_long: rows of more than training.max_length tokens are cut or dropped. isolate False: packed documents see
    each other. batch_tokens: tokens of an optimizer step; sets gradient accumulation.
    streaming: read, tokenised and packed while training, until max_steps; for pretraining. prepared: a folder of tokens
    that `ssm-tune prepare` makes of `train` and `eval`, and that is read in their place, as a stream too.
    """

    train: list[DataSource] = _setting([])
    eval: list[DataSource] | None = None
    eval_fraction: float | None = _setting(interval="(0, 1)")
    too_long: str = _setting("cut", choices=("cut", "drop"))
    isolate: bool = True
    batch_tokens: int | None = _setting(interval="[1, inf)")
    streaming: bool = False
    prepared: str | None = None


@dataclass
class AdapterSection:
    """LoRA and its variants. targets: "all", "portable" or names of projections; train_also: whole SSM parameters."""

    method: str = _setting("lora", choices=("lora", "full"))
    r: int = _setting(16, interval="[1, inf)")
    lora_alpha: float = _setting(32, interval="(0, inf)")
    lora_dropout: float = _setting(0.0, interval="[0, 1)")
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    targets: Any = _setting("all", annotation="str | list[str]")
    train_also: list[str] = _setting([], choices=("A_log", "D", "dt_bias", "conv1d"))


@dataclass
class KernelsSection:
    """order: which kernels are tried, first to last, by source or by name. required: a slow fallback is an error.

    graphs: train batches of one shape by CUDA graphs of the blocks, so that the GPU never waits for launches. null: on
    one GPU, for packed rows of models that are state-space layers only, trained without checkpointing or quantisation.
    Where FSDP2 shards the weights (on request), each GPU keeps the memory of the whole ones, 2 bytes a number in bf16.
    """

    order: list[str] | None = _setting(choices=KERNELS)
    required: bool = False
    self_check: bool = True
    graphs: bool | None = None


@dataclass
class EvaluationSection:
    """What is measured on the finished run: lm-eval tasks, `limit` rows of each, perplexity on a file or data set."""

    tasks: list[str] = _setting([])
    limit: int | None = _setting(interval="[1, inf)")
    perplexity: str | None = None
    allow_code_execution: bool = False


@dataclass
class HubSection:
    """push: upload the adapter, or the merged model, to `repo` when the run is complete. Private unless told."""

    push: str | None = _setting(choices=("adapter", "merged"))
    repo: str | None = None
    private: bool = True


@dataclass
class Recipe:
    """One run. `adapter` None: full fine-tuning. `training`: SFTConfig's fields, only those that were written."""

    model: ModelSection = field(default_factory=ModelSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    data: DataSection = field(default_factory=DataSection)
    adapter: AdapterSection | None = None
    kernels: KernelsSection = field(default_factory=KernelsSection)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    hub: HubSection = field(default_factory=HubSection)
    source: Path | None = field(default=None, compare=False)
    text: str = field(default="", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.source.stem if self.source is not None else "recipe"

    def to_yaml(self) -> str:
        """The recipe with its overrides, defaults and resolved paths; reads back as an equal Recipe."""
        from omegaconf import OmegaConf

        sections = {}
        for section in SECTIONS:
            value = getattr(self, section)
            values = value if isinstance(value, dict) else _written(value)
            if values:
                sections[section] = values
        return OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(sections)))


SECTIONS = {
    "model": ModelSection,
    "tokenizer": TokenizerSection,
    "data": DataSection,
    "adapter": AdapterSection,
    "kernels": KernelsSection,
    "training": None,
    "evaluation": EvaluationSection,
    "hub": HubSection,
}


def load_recipe(
    name_or_path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True, complete: bool = True
) -> Recipe:
    """Read a recipe file, or a shipped one by name, with overrides such as "training.learning_rate=5e-5".

    Paths in it become absolute where the file exists: beside the recipe or in the package; an override's from the
    working directory. check_files False: a data file that has gone since is no mistake. complete False: model and data
    may be missing, as in a run of objects that were given in Python.

    Raises:
        RecipeError: every mistake in the text and the overrides, at once.
    """
    mistakes = Mistakes(str(name_or_path))
    source, text = locate(name_or_path, mistakes)
    if source is None:
        raise RecipeError(mistakes.found)
    values = read_yaml(text, mistakes)
    if mistakes.found and not values:
        raise RecipeError(mistakes.found)
    return _build(values, overrides, mistakes, source=source, text=text, complete=complete, check_files=check_files)


def read_model_section(folder: Path) -> ModelSection:
    """How a run's recipe loaded its model. A folder without a recipe (an adapter from elsewhere) has the defaults.

    Only this section is read: the data that the run was trained on need not be here any more.
    Raises RecipeError if the file is damaged.
    """
    file = folder / RESOLVED
    if not file.exists():
        return ModelSection()
    try:
        return ModelSection(**yaml.safe_load(file.read_text(encoding="utf-8"))["model"])
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise RecipeError(f"{file} is damaged: {error}") from error


def recipe_from_dict(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "recipe", complete: bool = True
) -> Recipe:
    """A recipe from Python values, checked as a file's are; paths are relative to the working directory.

    where: what mistakes are prefixed with. complete False: model and data may be missing (they are given as objects).

    Raises:
        RecipeError: every mistake, at once.
    """
    plain = _plain(values)
    return _build(plain, overrides, Mistakes(where), source=None, text="", complete=complete, check_files=True)


def _build(
    values: dict[str, Any],
    overrides: Sequence[str],
    mistakes: Mistakes,
    *,
    source: Path | None,
    text: str,
    complete: bool,
    check_files: bool,
) -> Recipe:
    from omegaconf import OmegaConf

    apply_overrides(values, overrides, mistakes)
    if check_leaves(values, mistakes):
        values = resolve_interpolations(values, mistakes)
        check_leaves(values, mistakes)  # an environment variable may hold anything
    sections = _check(values, mistakes, complete)
    resolve_paths(sections, source, mistakes, check_files)
    if mistakes.found:
        raise RecipeError(mistakes.found)
    if sections["adapter"].get("method") == "full" or not sections["adapter"]:
        sections["adapter"] = None
    config = OmegaConf.merge(OmegaConf.structured(Recipe), escape_interpolations(sections))
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return dataclasses.replace(recipe, source=source, text=text, overrides=tuple(overrides))


def _check(values: dict[str, Any], mistakes: Mistakes, complete: bool) -> dict[str, Any]:
    """The sections as mappings, {} where absent; what is wrong in them goes to `mistakes`."""
    homes = _homes()
    sections: dict[str, Any] = {}
    top = {section: Rule("dict | None") for section in SECTIONS}
    check_keys(values, "", top, homes, mistakes)
    for section in SECTIONS:
        given = values.get(section)
        if given is not None and not isinstance(given, dict) and not mistakes.told(section):
            mistakes.add(section, f"must be a mapping (key: value), not {kind_of(given)}: {show(given)}")
        sections[section] = given if isinstance(given, dict) else {}
    for section, cls in SECTIONS.items():
        if section == "training":
            check_training(sections[section], homes, mistakes)
        elif section == "data":
            _check_data(sections[section], homes, mistakes)
        else:
            check_section(sections[section], section, rules_of(cls), homes, mistakes)
    check_combinations(values, sections, mistakes, complete)
    return sections


def _check_data(section: dict[str, Any], homes: Mapping[str, str], mistakes: Mistakes) -> None:
    rules = rules_of(DataSection) | {"train": Rule("list[Any]"), "eval": Rule("list[Any] | None")}
    check_section(section, "data", rules, homes, mistakes)
    source_rules = rules_of(DataSource)
    for key in ("train", "eval"):
        entries = section.get(key)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            path = f"data.{key}.{index}"
            if not isinstance(entry, dict):
                mistakes.add(
                    path, f"must be a mapping such as {{path: rows.jsonl}}, not {kind_of(entry)}: {show(entry)}"
                )
                continue
            check_section(entry, path, source_rules, homes, mistakes)
            if "path" not in entry or entry["path"] == "":
                mistakes.add(path, "needs a path: a file, a folder or a Hub name")


def _homes() -> dict[str, str]:
    """Which section a key belongs to, for keys written in another one."""
    homes = dict.fromkeys(training_fields(), "training")
    for section, cls in SECTIONS.items():
        if cls is not None:
            homes |= {item.name: section for item in dataclasses.fields(cls) if item.name != "name"}
    return homes


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _written(section: Any) -> dict[str, Any]:
    """A section's keys as they would be written: without those that are None or empty, which is also their default."""
    if section is None:
        return {}

    def tidy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tidy(entry) for key, entry in value.items() if entry is not None}
        return [tidy(entry) for entry in value] if isinstance(value, list) else value

    values = tidy(dataclasses.asdict(section))
    return {key: value for key, value in values.items() if value not in ({}, [])}
