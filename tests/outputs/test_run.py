"""Run: opened from its folder it is what was trained; what is no finished run is refused with the way out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import logits
from tiny import assert_equal_up_to_rounding, tiny_model
from transformers import AutoModelForCausalLM

from ssm_tune.mixers import is_patched
from ssm_tune.outputs.finished_run import open_finished_run
from ssm_tune.outputs.generate import generate_text
from ssm_tune.outputs.merge import merge_run
from ssm_tune.outputs.run import Run, load_source
from ssm_tune.recipe import RecipeError

MakeRun = Callable[..., tuple[Path, Any]]


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "codestral"])
def test_a_loaded_run_is_what_was_trained(kind: str, make_run: MakeRun) -> None:
    folder, trained = make_run(kind, train_also=["A_log"])
    run = Run.load(folder)
    assert_equal_up_to_rounding(logits(run.model), logits(trained))
    assert is_patched(run.model)
    assert not any(parameter.requires_grad for parameter in run.model.parameters())
    assert run.output_dir == folder
    assert run.metrics == {"step": 2, "loss": 2.5, "eval_loss": 2.75}
    assert len(run.tokenizer) == 262


def test_a_full_run_loads_too(make_run: MakeRun) -> None:
    folder, trained = make_run("mamba2", full=True)
    assert_equal_up_to_rounding(logits(Run.load(folder).model), logits(trained))


def test_generate_puts_the_prompt_as_the_run_was_trained(make_run: MakeRun) -> None:
    folder, trained = make_run("mamba")
    run = Run.load(folder)
    answer = run.generate("Why?", max_new_tokens=8)
    assert answer == generate_text(trained, run.tokenizer, "Why?", max_new_tokens=8)
    with pytest.raises(RecipeError, match="temperature"):
        run.generate("Why?", temperature=-1)


def test_merge_leaves_the_model_as_it_is(make_run: MakeRun, tmp_path: Path) -> None:
    folder, _ = make_run("mamba")
    run = Run.load(folder)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    said = logits(run.model)
    merged = AutoModelForCausalLM.from_pretrained(run.merge())
    assert (logits(merged) - said).abs().max() <= 1e-5
    assert run.merge(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    after = run.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_keys_of_load_model_take_the_place_of_the_recipes(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    assert Run.load(folder, dtype="bfloat16").model.get_base_model().lm_head.weight.dtype == torch.bfloat16


def change_state(folder: Path, **changes: Any) -> None:
    state = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**state, **changes}))


def other_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def test_a_run_that_is_still_running_is_refused(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    process = other_process()
    try:
        change_state(folder, status="running", pid=process.pid, host=socket.gethostname())
        with pytest.raises(RecipeError, match=f"not ended yet.*{process.pid}"):
            Run.load(folder)
    finally:
        process.communicate()
    with pytest.raises(RecipeError, match=r"broken off before its end\. Resume"):
        Run.load(folder)


def test_a_stopped_run_says_how_to_resume_and_where_its_weights_are(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    checkpoint = folder / "checkpoints" / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    change_state(folder, status="stopped", pid=os.getpid())
    with pytest.raises(RecipeError, match="--resume") as error:
        Run.load(folder)
    assert "checkpoint-7" in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "run.json").unlink(), "not a run folder"),
        (lambda folder: (folder / "run.json").write_text("{"), "run.json is damaged"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "neither an adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12"), "damaged or cut off"),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"loss": 1}\n{"lo'), "metrics.jsonl, line 2"),
        (lambda folder: (folder / "recipe.resolved.yaml").write_text("a: [b"), "recipe.resolved.yaml is damaged"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer files \(tokenizer.json"),
    ],
)
def test_what_is_no_whole_run_is_refused(spoil: Callable[[Path], Any], said: str, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    spoil(folder)
    with pytest.raises(RecipeError, match=said):
        Run.load(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such folder"):
        Run.load(tmp_path / "nowhere")


def test_a_base_model_that_is_gone_is_named(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    base = Path(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    base.rename(base.with_name("moved"))
    with pytest.raises(RecipeError, match="base"):
        Run.load(folder)


@pytest.mark.parametrize("where", [".", "checkpoints/checkpoint-3"])
def test_a_base_that_the_run_keeps_is_found_after_a_move(where: str, make_run: MakeRun, tmp_path: Path) -> None:
    folder, trained = make_run("mamba")
    (tmp_path / "base").rename(folder / "base_model")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(folder / "base_model")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    moved = folder.rename(tmp_path / "moved")
    if where != ".":
        (moved / where).mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (moved / name).rename(moved / where / name)
        merged = AutoModelForCausalLM.from_pretrained(merge_run(moved / where, tmp_path / "merged"))
        assert (logits(merged) - logits(trained)).abs().max() <= 1e-5
    else:
        assert_equal_up_to_rounding(logits(Run.load(moved).model), logits(trained))


def test_metrics_are_the_summary_of_the_run(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    change_state(folder, metrics={"loss": 1.5, "steps": 2})
    assert Run.load(folder).metrics == {"loss": 1.5, "steps": 2}


def test_the_recipes_revision_leads_to_the_base(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    recipe = json.loads((folder / "recipe.resolved.yaml").read_text())
    recipe["model"]["revision"] = "refs/pr/1"
    (folder / "recipe.resolved.yaml").write_text(json.dumps(recipe))
    assert open_finished_run(folder).revision == "refs/pr/1"


def test_a_base_that_was_only_in_memory_is_told(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(RecipeError, match="in memory"):
        Run.load(folder)


def test_a_source_is_a_run_or_any_model(make_run: MakeRun, tmp_path: Path) -> None:
    folder, trained = make_run("mamba")
    model, tokenizer = load_source(folder)
    assert_equal_up_to_rounding(logits(model), logits(trained))
    assert len(tokenizer) == 262
    plain = tmp_path / "plain"
    tiny_model("mamba2").save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    model, _ = load_source(plain)
    assert (logits(model) - logits(tiny_model("mamba2"))).abs().max() <= 1e-5
