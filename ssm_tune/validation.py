"""What can be known of a run without a network and without reading weights: `ssm-tune validate`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssm_tune.recipe import DataSection, Recipe, RecipeError


def check_recipe(recipe: Recipe, task: str | None = None) -> list[str]:
    """Look into the files that a recipe names: rows, chat template, the model's config, the adapter's targets.

    `task`: what the recipe is for, sft or pretrain; None: as the command in its first comment says, else sft.

    Returns what was found and what could not be checked here (names on the Hub), a line each.

    Raises:
        RecipeError: every mistake in them, at once.
    """
    mistakes: list[str] = []
    notes: list[str] = [f"{recipe.source or 'recipe'}: the text has no mistake"]
    task = task or _task_of(recipe)
    checks = (
        lambda: _check_data(recipe, task),
        lambda: _check_template(recipe),
        lambda: _check_model(recipe, task),
        lambda: _check_output(recipe),
    )
    for check in checks:
        try:
            notes += check()
        except RecipeError as error:
            mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)
    return notes


def _task_of(recipe: Recipe) -> str:
    """What the recipe says that it is run with: `# ssm-tune pretrain NAME ...`."""
    found = re.search(r"^#.*\bssm-tune (sft|pretrain)\b", recipe.text, re.MULTILINE)
    if found is not None:
        return found[1]
    return "sft" if recipe.data.prepared is None else "pretrain"


def _check_data(recipe: Recipe, task: str) -> list[str]:
    from ssm_tune.data import check_sources

    if recipe.data.prepared is not None:
        from ssm_tune.data.token_shards import INDEX, TokenShards

        folder = Path(recipe.data.prepared)
        if (folder / INDEX).is_file():
            return [f"{folder}: {len(TokenShards(folder).parts)} parts of tokens, of the right size"]
        return [*_check_stream(recipe.data), f"{folder}: not there yet; ssm-tune prepare makes it"]
    if recipe.data.streaming:
        return _check_stream(recipe.data)
    return check_sources(recipe.data, task)


def _check_stream(section: DataSection) -> list[str]:
    """The first documents of what is streamed from here, and everything that is evaluated."""
    from ssm_tune.data import check_sources
    from ssm_tune.data.stream_data import check_stream_sources

    held = dataclasses.replace(section, train=section.eval or [], eval=None)
    return [*check_stream_sources(section), *(check_sources(held, "pretrain") if held.train else [])]


def _check_template(recipe: Recipe) -> list[str]:
    path = recipe.tokenizer.chat_template
    if path is None:
        return []
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    try:
        text = Path(path).read_text(encoding="utf-8")
        render_jinja_template(conversations=[turns], chat_template=text, bos_token="<s>", eos_token="</s>")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"tokenizer.chat_template: {path} cannot be read: {error}") from error
    except TemplateError as error:
        where = f"{path}, line {error.lineno}" if isinstance(error, TemplateSyntaxError) else path
        raise RecipeError(
            f"tokenizer.chat_template: {where}: does not render a question and an answer: {error}"
        ) from error
    return [f"{path}: renders a question and an answer"]


def _check_model(recipe: Recipe, task: str) -> list[str]:
    section = recipe.model
    if section.architecture is not None:
        from ssm_tune.model import plan_model

        return _check_config(recipe, task, plan_model(recipe), "model")
    assert section.name is not None
    if not Path(section.name).exists():
        return [f"{section.name}: on the Hub, not looked into"]
    from ssm_tune.model import read_config

    return _check_config(recipe, task, read_config(section.name, local_only=True), section.name)


def _check_config(recipe: Recipe, task: str, config: Any, name: str) -> list[str]:
    from ssm_tune.families import family_of, refusals

    found = [f"{name}: a {config.model_type}"]
    mistakes = refusals(
        family_of(config.model_type),
        packing=bool(recipe.training.get("packing", task == "pretrain")) and recipe.data.isolate,
        attention=recipe.model.attn_implementation or config._attn_implementation,
    )
    if recipe.adapter is not None:
        from ssm_tune.adapter import check_targets
        from ssm_tune.model import meta_model

        adapter = recipe.adapter
        mistakes += _mistakes_of(lambda: check_targets(meta_model(config), adapter))
        found.append("adapter: every target is there")
    if mistakes:
        raise RecipeError(mistakes)
    return found


def _mistakes_of(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except RecipeError as error:
        return error.mistakes
    return []


def _check_output(recipe: Recipe) -> list[str]:
    folder = Path(recipe.training.get("output_dir") or f"runs/{recipe.name}")
    if folder.exists():
        return [f"{folder}: exists already; a new run needs another training.output_dir, or --resume to continue"]
    return [f"{folder}: will be made"]
