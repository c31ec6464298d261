"""The README.md of a run: what it is, how to use it, how to make it again; from plain data, by cards/*.jinja."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from ssm_tune.adapter import CONFIG_FILE, read_adapter_config
from ssm_tune.families import family_of
from ssm_tune.outputs.card_results import read_results, results_table
from ssm_tune.outputs.vllm import vllm_use
from ssm_tune.run_folder import RunFolder
from ssm_tune.ssm_parameters import SSM_FILE

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_USE = re.compile(r"<!-- use -->\n.*?<!-- /use -->", re.DOTALL)
_RESULTS = re.compile(r"<!-- results -->\n.*?<!-- /results -->", re.DOTALL)
_LAST_LINE = "Made with ssm-tune."
# A token of the Hub that somebody wrote into a recipe or a command.
_SECRET = re.compile(r"hf_[A-Za-z0-9_]{8,}")


def write_card(
    folder: str | Path,
    *,
    model_type: str,
    base_model: str | None,
    task: str,
    command: str,
    recipe: str = "",
    data: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    versions: Mapping[str, str | None] | None = None,
) -> Path:
    """Write README.md of a finished run; the adapter or the model must lie in the folder already.

    Args:
        model_type: the config's, for what plain PEFT can load.
        base_model: as the user named it; None: from random weights.
        task: "sft" or "pretrain".
        command: reproduces the run. recipe: the recipe's text.
        data: what was read (rows, tokens, ...). metrics: the last measured values. versions: of packages.
    """
    folder = Path(folder)
    adapted = (folder / CONFIG_FILE).exists()
    missing = _beyond_plain_peft(folder, model_type) if adapted else ""
    use = ("adapter_ours" if missing else "adapter_plain") if adapted else "whole_model"
    environment = _environment()
    text = environment.get_template("model_card.jinja").render(
        title=folder.resolve().name,
        summary=_summary(adapted, base_model, model_type, task),
        use=_use_text(
            environment, use, folder.resolve().name, base_model, missing, _vllm(folder, model_type, base_model)
        ),
        command=_SECRET.sub("hf_...", command),
        recipe=_SECRET.sub("hf_...", recipe.strip()),
        data=_rows(data),
        metrics=_rows(metrics),
        has_plot=(folder / "loss.png").exists(),
        versions=_rows(versions),
    )
    header = _header(base_model, library="peft" if adapted else "transformers", tags=[model_type, task])
    return RunFolder(folder).write_text("README.md", f"---\n{header.to_yaml()}\n---\n\n{text}")


def write_merged_card(folder: Path, run: Path) -> Path:
    """The card of a merged model: the run's, with the way to use it changed. Without a card in the run, a short one."""
    environment = _environment()
    name = run.resolve().name
    use = _use_text(environment, "whole_model", "merged", None, "", _vllm(folder, _model_type(folder), None, "merged"))
    source = run / "README.md"
    if source.exists():
        card = ModelCard(source.read_text(encoding="utf-8"))
        card.data.library_name = "transformers"
        # a replacement string would read backslashes in the text
        text = _USE.sub(lambda _: f"<!-- use -->\n{use}\n<!-- /use -->", card.text)
        text = text.replace("A LoRA adapter for", "Merged with its LoRA adapter:", 1)
        header = card.data
    else:
        text = f"# {name}, merged\n\n{use}\n"
        header = _header(None, library="transformers", tags=[])
    return RunFolder(folder).write_text("README.md", f"---\n{header.to_yaml()}\n---\n{text}")


def add_results(folder: str | Path, source: str | Path | None = None) -> Path | None:
    """Put what was measured into a folder's card: the table, and the front matter's model-index.

    Args:
        source: where eval.json and perplexity.json are; None: in the folder.

    Returns:
        The card; None if there is no card or nothing was measured.
    """
    folder = Path(folder)
    card, results = folder / "README.md", read_results(source or folder)
    if not card.is_file() or not results:
        return None
    found = ModelCard(card.read_text(encoding="utf-8"))
    found.data.model_name = found.data.model_name or Path(source or folder).resolve().name
    found.data.eval_results = results
    block = f"<!-- results -->\n{results_table(results)}\n<!-- /results -->"
    text = found.text
    if _RESULTS.search(text):
        text = _RESULTS.sub(lambda _: block, text)
    elif _LAST_LINE in text:
        before, _, after = text.rpartition(_LAST_LINE)
        text = f"{before}{block}\n\n{_LAST_LINE}{after}"
    else:
        text = f"{text.rstrip()}\n\n{block}\n"
    return RunFolder(folder).write_text("README.md", f"---\n{found.data.to_yaml()}\n---\n{text}")


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("ssm_tune.outputs", "cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )


def _use_text(environment: Environment, use: str, name: str, base_model: str | None, missing: str, vllm: str) -> str:
    text = environment.get_template(f"{use}.jinja").render(name=name, base=_base_name(base_model), missing=missing)
    return f"{text.strip()}\n\n{vllm}".strip()


def _base_name(base_model: str | None) -> str:
    return str(base_model) if is_hub_name(base_model) else "path/to/the/base_model"


def _vllm(folder: Path, model_type: str | None, base_model: str | None, name: str | None = None) -> str:
    if model_type is None:
        return ""
    adapter = read_adapter_config(folder) if (folder / CONFIG_FILE).exists() else None
    more = (folder / SSM_FILE).exists()
    name = folder.resolve().name if name is None else name
    return vllm_use(model_type, name, _base_name(base_model), adapter, more_weights=more)


def _model_type(folder: Path) -> str | None:
    """Of the config in a folder, if there is one."""
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8"))["model_type"] if file.exists() else None


def _summary(adapted: bool, base_model: str | None, model_type: str, task: str) -> str:
    aim = {"sft": "supervised fine-tuning", "pretrain": "training on plain text"}[task]
    if base_model is None and not adapted:
        return f"A model from random weights ({model_type}), by {aim}."
    what = "A LoRA adapter for" if adapted else "A full fine-tuning of"
    if base_model is None:
        base = "a model that was made in memory"
    elif is_hub_name(base_model):
        base = f"[{base_model}](https://huggingface.co/{base_model})"
    else:  # a local path says nothing to a reader, and something about its owner
        base = f"a local model, `{Path(base_model).name}`"
    return f"{what} {base} ({model_type}), by {aim}."


def is_hub_name(name: str | None) -> bool:
    """Whether a model's name is one that others can load: owner/name, and no folder here."""
    return name is not None and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _header(base_model: str | None, *, library: str, tags: list[str]) -> ModelCardData:
    return ModelCardData(
        base_model=base_model if is_hub_name(base_model) else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["ssm-tune", "state-space-model", *tags],
    )


def _beyond_plain_peft(folder: Path, model_type: str) -> str:
    """What keeps plain PEFT from loading this adapter with equal logits; empty if nothing does."""
    config = read_adapter_config(folder)
    leaves = {target.rpartition(".")[2] for target in config.target_modules}
    reasons = []
    if beyond := sorted(leaves - set(family_of(model_type).portable)):
        reasons.append(f"it adapts {', '.join(beyond)}")
    if (folder / SSM_FILE).exists():
        reasons.append(f"it has SSM parameters of its own ({SSM_FILE})")
    return " and ".join(reasons)


def _rows(values: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Table rows; None is left out, numbers are readable, lists are spelt out."""
    rows = []
    for name, value in (values or {}).items():
        if value is None or isinstance(value, Mapping):
            continue
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, int):
            value = f"{value:,}"
        elif isinstance(value, list | tuple):
            value = "; ".join(map(str, value))
        rows.append((name.replace("_", " "), str(value).replace("|", "\\|").replace("\n", " ")))
    return rows
