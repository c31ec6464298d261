"""tune()'s arguments as a recipe, so that a run from Python and one from a file are the same run."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ssm_tune.recipe import AdapterSection, Recipe, RecipeError, recipe_from_dict
from ssm_tune.training_fields import training_fields

METHODS = ("lora", "qlora", "full")


def recipe_from_settings(
    model: str | Path | PreTrainedModel,
    dataset: Any,
    eval_dataset: Any,
    *,
    method: str,
    output_dir: str | Path | None,
    tokenizer: Any,
    resume: bool,
    settings: dict[str, Any],
) -> Recipe:
    """The recipe that says what `tune(...)` was asked for; model and rows that are objects are left out of it.

    Raises:
        RecipeError: an unknown method or setting (with the nearest name), or values that a recipe would refuse.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(str(method), METHODS, n=1)
        raise RecipeError(
            f"tune(): method {method!r} is none of {', '.join(METHODS)}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    adapter_keys = {field.name for field in dataclasses.fields(AdapterSection)} - {"method"}
    known = adapter_keys | set(training_fields())
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise RecipeError(f"tune(): {key} is not a setting." + (f" Did you mean {near[0]}?" if near else ""))
    adapter = {key: value for key, value in settings.items() if key in adapter_keys}
    if method == "full" and adapter:
        raise RecipeError(
            f"tune(): {', '.join(adapter)}: method='full' has no adapter. Use method='lora', or leave it out."
        )
    if method == "qlora" and isinstance(model, PreTrainedModel):
        raise RecipeError(
            "tune(): method='qlora' loads the model in 4 bits: pass its name or folder, not a loaded model."
        )
    if output_dir is None:
        if resume:
            raise RecipeError("tune(): resume=True needs the output_dir of the run to go on with.")
        output_dir = next_output_dir(model, method)
    training = {key: value for key, value in settings.items() if key not in adapter_keys}
    values: dict[str, Any] = {"training": {**training, "output_dir": str(output_dir)}}
    if isinstance(model, (str, Path)):
        values["model"] = {"name": str(model), **({"load_in_4bit": True} if method == "qlora" else {})}
    if isinstance(tokenizer, (str, Path)):
        values["tokenizer"] = {"name": str(tokenizer)}
    data = {
        key: [{"path": str(rows)}]
        for key, rows in (("train", dataset), ("eval", eval_dataset))
        if isinstance(rows, (str, Path))
    }
    if data:
        values["data"] = data
    if method != "full":
        values["adapter"] = {"method": "lora", **adapter}
    complete = isinstance(model, (str, Path)) and isinstance(dataset, (str, Path))
    return recipe_from_dict(values, where="tune()", complete=complete)


def next_output_dir(model: str | Path | PreTrainedModel, method: str) -> Path:
    """runs/<model>-<method>-<n>, with the first n that is free."""
    name = str(model) if isinstance(model, (str, Path)) else (model.config.name_or_path or model.config.model_type)
    stem = f"{Path(name).name or 'model'}-{method}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"
