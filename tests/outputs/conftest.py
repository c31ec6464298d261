"""Finished run folders, made without training: adapters with random values on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished import stir
from tiny import tiny_model, tiny_tokenizer

from ssm_tune.adapter import apply_adapter, save_adapter
from ssm_tune.mixers import patch_model
from ssm_tune.outputs.model_card import write_card
from ssm_tune.recipe import AdapterSection
from ssm_tune.run_folder import COMPLETE, RunFolder


def write_facts(folder: Path, model: str, status: str = COMPLETE, template: str | None = None, **keys: Any) -> None:
    """What a run folder has beside its weights."""
    run = RunFolder(folder)
    recipe = {"model": {"name": model, **keys}, "data": {"train": [{"path": "rows.jsonl"}]}}
    run.write_text("recipe.yaml", json.dumps(recipe))  # JSON is YAML
    run.write_text("recipe.resolved.yaml", json.dumps(recipe))
    run.write_text("metrics.jsonl", '{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.5, "eval_loss": 2.75}\n')
    tiny_tokenizer(template).save_pretrained(folder)
    run.write_state(status)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """make_run(kind, model={config changes}, adapter keys...) -> (run folder, the model as it was trained)."""

    def make(kind: str = "mamba", *, model: dict[str, Any] | None = None, full: bool = False, **adapter: Any) -> Any:
        base, folder = tmp_path / "base", tmp_path / "run"
        tiny_model(kind, **(model or {})).save_pretrained(base)
        trained = patch_model(tiny_model(kind, **(model or {})))
        folder.mkdir()
        if full:
            stir(trained)
            trained.save_pretrained(folder)
        else:
            trained = apply_adapter(
                trained, AdapterSection(**{"r": 4, "lora_alpha": 8, **adapter}), base_name=str(base)
            )
            stir(trained)
            save_adapter(trained, folder)
        write_facts(folder, str(base))
        write_card(
            folder,
            model_type=trained.config.model_type,
            base_model=str(base),
            task="sft",
            command="ssm-tune sft recipe.yaml",
            recipe=(folder / "recipe.yaml").read_text(),
            metrics={"loss": 2.5},
        )
        return folder, trained.eval()

    return make
