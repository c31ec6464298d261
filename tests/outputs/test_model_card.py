"""The card: valid front matter, the right way to load, nothing of this machine in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from finished import stir
from huggingface_hub import ModelCard
from tiny import tiny_model

from ssm_tune.adapter import apply_adapter, save_adapter
from ssm_tune.outputs.model_card import is_hub_name, write_card, write_merged_card
from ssm_tune.recipe import AdapterSection

MakeRun = Callable[..., tuple[Path, Any]]


def card(folder: Path, **changes: Any) -> ModelCard:
    facts: dict[str, Any] = {
        "model_type": "mamba",
        "base_model": "state-spaces/mamba-130m-hf",
        "task": "sft",
        "command": "ssm-tune sft demo training.max_steps=5",
        "recipe": "model: {name: x}\n# with: a comment\n",
        "data": {"rows": 1234, "padding_share": 0.25, "notes": ["3 rows cut", "a | b"], "dropped": None},
        "metrics": {"loss": 2.123456, "eval_loss": 2.5},
        "versions": {"torch": "2.13.0", "mamba-ssm": None},
    }
    return ModelCard.load(write_card(folder, **{**facts, **changes}))


def adapter(folder: Path, **changes: Any) -> Path:
    model = apply_adapter(tiny_model("mamba"), AdapterSection(r=2, **changes))
    stir(model)
    save_adapter(model, folder)
    return folder


def test_front_matter_is_what_the_hub_reads(tmp_path: Path) -> None:
    written = card(adapter(tmp_path))
    header = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert header["base_model"] == "state-spaces/mamba-130m-hf"
    assert header["library_name"] == "peft"
    assert header["pipeline_tag"] == "text-generation"
    assert {"ssm-tune", "mamba", "sft"} <= set(header["tags"])
    assert written.data.base_model == header["base_model"]


def test_it_tells_how_the_run_was_made(tmp_path: Path) -> None:
    text = card(adapter(tmp_path)).text
    assert "ssm-tune sft demo training.max_steps=5" in text
    assert "# with: a comment" in text
    assert "| rows | 1,234 |" in text
    assert "| padding share | 0.25 |" in text
    assert "3 rows cut; a \\| b" in text
    assert "| loss | 2.123 |" in text
    assert "| torch | 2.13.0 |" in text
    assert "mamba-ssm" not in text
    assert "dropped" not in text
    assert "loss.png" not in text
    (tmp_path / "loss.png").write_bytes(b"")
    assert "(loss.png)" in card(tmp_path).text


def test_plain_adapters_are_loaded_by_plain_peft(tmp_path: Path) -> None:
    text = card(adapter(tmp_path, targets="portable")).text
    assert 'PeftModel.from_pretrained(model, "' in text
    assert "does not load this adapter rightly" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": "all"}, "it adapts dt_proj, out_proj."),
        ({"targets": "portable", "train_also": ["D"]}, "it has SSM parameters of its own"),
        ({"targets": ["layers.1.mixer.out_proj", "in_proj"]}, "it adapts out_proj."),
    ],
)
def test_other_adapters_say_what_to_do(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    text = card(adapter(tmp_path, **changes)).text
    assert f"Plain PEFT does not load this adapter rightly: {said}" in text
    assert f"ssm-tune merge {tmp_path.name}" in text
    assert f'load_model("{tmp_path.name}")' in text


def test_a_local_base_is_no_base_model_of_the_hub_and_its_path_stays_at_home(tmp_path: Path) -> None:
    base = tmp_path / "secret-place" / "my-base"
    base.mkdir(parents=True)
    written = card(adapter(tmp_path / "run"), base_model=str(base))
    assert written.data.base_model is None
    assert "secret-place" not in (tmp_path / "run" / "README.md").read_text()
    assert "my-base" in written.text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("me/x", True),
        ("state-spaces/mamba-130m-hf", True),
        ("/a/b", False),
        ("a", False),
        ("./a/b", False),
        (None, False),
    ],
)
def test_hub_names(name: str | None, is_one: bool) -> None:
    assert is_hub_name(name) == is_one


def test_an_adapter_on_a_model_made_in_memory(tmp_path: Path) -> None:
    written = card(adapter(tmp_path), base_model=None)
    assert "A LoRA adapter for a model that was made in memory (mamba)" in written.text


def test_whole_models_are_loaded_by_plain_transformers(tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(tmp_path)
    written = card(tmp_path, base_model=None, task="pretrain")
    assert written.data.library_name == "transformers"
    assert "AutoModelForCausalLM.from_pretrained" in written.text
    assert "random weights" in written.text


def test_the_merged_card_keeps_the_story_and_changes_the_use(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    card(run)
    (tmp_path / "merged").mkdir()
    merged = ModelCard.load(write_merged_card(tmp_path / "merged", run))
    assert merged.data.library_name == "transformers"
    assert merged.data.base_model == "state-spaces/mamba-130m-hf"
    assert "ssm-tune sft demo" in merged.text
    assert "AutoModelForCausalLM" in merged.text
    assert "Plain PEFT" not in merged.text


def test_a_run_without_a_card_gives_a_short_merged_card(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    assert ModelCard.load(write_merged_card(tmp_path / "merged", tmp_path)).data.library_name == "transformers"
