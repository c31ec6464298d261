"""The card: valid front matter, the right way to load, nothing of this machine in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from finished import stir
from huggingface_hub import ModelCard
from tiny import tiny_model

from ssm_tune.adapter import apply_adapter, save_adapter
from ssm_tune.families import FAMILIES
from ssm_tune.outputs.model_card import add_results, is_hub_name, write_card, write_merged_card
from ssm_tune.outputs.vllm import MERGED_ONLY, WITH_LORA, vllm_use
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


RESULTS = {
    "results": {
        "piqa": {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": 0.08, "acc_norm,none": 0.5},
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"},
        "letters": {"alias": "letters", "acc,none": float("nan")},
    },
    "configs": {
        "piqa": {"dataset_path": "baber/piqa", "test_split": None, "validation_split": "validation"},
        "gsm8k": {"dataset_path": "openai/gsm8k", "dataset_name": "main", "test_split": "test"},
        "letters": {"dataset_path": "json"},
    },
    "n-shot": {"piqa": 0, "gsm8k": 5},
    "config": {"limit": 200},
}


def test_results_are_in_the_table_and_in_the_model_index(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    card(run)
    assert add_results(run) is None
    (run / "eval.json").write_text(json.dumps(RESULTS))
    perplexity = {"perplexity": 12.5, "loss": 2.5, "data": str(tmp_path / "my" / "text.txt"), "window": 64}
    (run / "perplexity.json").write_text(json.dumps(perplexity))
    for _ in range(2):  # the second time in the place of the first
        add_results(run)
    written = ModelCard.load(run / "README.md")
    found = {(one.dataset_name, one.metric_name): one for one in written.data.eval_results}
    assert {key: one.metric_value for key, one in found.items()} == {
        ("piqa", "acc"): 0.625,
        ("piqa", "acc_norm"): 0.5,
        ("gsm8k", "exact_match (strict-match)"): 0.25,
        ("text.txt", "perplexity per token"): 12.5,
    }
    strict = found["gsm8k", "exact_match (strict-match)"]
    assert (strict.dataset_type, strict.dataset_config, strict.dataset_split) == ("openai/gsm8k", "main", "test")
    assert strict.dataset_args == {"num_few_shot": 5, "limit": 200}
    assert written.data.model_name == "run" and written.data.base_model == "state-spaces/mamba-130m-hf"
    assert written.text.count("| gsm8k | exact_match (strict-match) | 0.25 | num few shot 5, limit 200 |") == 1
    assert written.text.rstrip().endswith("Made with ssm-tune.")
    assert str(tmp_path) not in (run / "README.md").read_text()
    header = yaml.safe_load((run / "README.md").read_text().split("---")[1])
    assert {"name", "results"} == set(header["model-index"][0])


def test_a_merged_card_has_the_results_of_its_run(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    card(run)
    (run / "eval.json").write_text(json.dumps(RESULTS))
    (run / "merged").mkdir()
    write_merged_card(run / "merged", run)
    add_results(run / "merged", run)
    merged = ModelCard.load(run / "merged" / "README.md")
    assert len(merged.data.eval_results) == 3 and merged.data.library_name == "transformers"
    assert not (run / "merged" / "eval.json").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mamba", {}, "none with a LoRA adapter on it. Merge first: `ssm-tune merge run`"),
        ("mamba2", {}, "none with a LoRA adapter on it."),
        ("zamba", {}, "vLLM has no zamba models"),
        ("bamba", {"targets": ["in_proj"]}, "`vllm serve state-spaces/mamba-130m-hf --enable-lora --max-lora-rank 8"),
        ("bamba", {"train_also": ["D"]}, "this adapter has SSM parameters of its own. Merge first"),
        ("falcon_h1", {"use_dora": True, "targets": ["in_proj"]}, "this adapter has DoRA"),
    ],
)
def test_cards_say_what_vllm_serves(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = apply_adapter(tiny_model(kind), AdapterSection(r=2, **changes))
    save_adapter(model, tmp_path / "run")
    assert said in card(tmp_path / "run", model_type=kind).text


def test_every_family_has_its_word_about_vllm() -> None:
    """vLLM's list of supported models, of November 2026."""
    known = WITH_LORA | MERGED_ONLY
    assert not WITH_LORA & MERGED_ONLY
    assert set(FAMILIES) - known == {"zamba"}
    for kind in FAMILIES:
        assert ("vllm serve x" in vllm_use(kind, "x", "b", None)) == (kind in known)


def test_tokens_in_recipes_and_commands_stay_out_of_the_card(tmp_path: Path) -> None:
    secret = "hf_AbCdEfGhIjKlMnOp"
    text = card(adapter(tmp_path), command=f"HF_TOKEN={secret} ssm-tune sft x", recipe=f"# {secret}\nmodel: {{}}").text
    assert secret not in text and "HF_TOKEN=hf_... ssm-tune sft x" in text
