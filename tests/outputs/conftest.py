"""Finished run folders, made without training: adapters with random values on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished import stir, write_facts
from tiny import tiny_model

from ssm_tune.adapter import apply_adapter, save_adapter
from ssm_tune.model import load_model
from ssm_tune.outputs.model_card import write_card
from ssm_tune.recipe import AdapterSection


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """make_run(kind, model={config keys}, keys={load_model keys}, adapter keys...) -> (run folder, trained model)."""

    def make(
        kind: str = "mamba",
        *,
        model: dict[str, Any] | None = None,
        keys: dict[str, Any] | None = None,
        full: bool = False,
        **adapter: Any,
    ) -> Any:
        base, folder = tmp_path / "base", tmp_path / "run"
        tiny_model(kind, **(model or {})).save_pretrained(base)
        trained = load_model(base, device="cpu", **(keys or {}))
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
        write_facts(folder, str(base), **(keys or {}))
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
