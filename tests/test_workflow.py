"""A run from rows to a run folder: what it gives, what it refuses, how it stops and how it goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_equal_up_to_rounding, tiny_model, tiny_tokenizer

from ssm_tune import RecipeError, Run, load_model, tune
from ssm_tune.recipe import load_recipe
from ssm_tune.run_folder import RunFolder, Stopped
from ssm_tune.trainer import SSMTrainer
from ssm_tune.validation import check_recipe
from ssm_tune.workflow import run

ROWS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(12)]
FAST = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "max_length": 64,
    "save_strategy": "no",
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(3, 40)[None]
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits.float()


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def fit(kind: str, folder: Path, **settings: Any) -> Run:
    torch.manual_seed(0)
    rows = settings.pop("rows", ROWS)
    return tune(tiny_model(kind), rows, tokenizer=tiny_tokenizer(), output_dir=folder, **{**FAST, **settings})


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "codestral"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_reloaded_and_merged_runs_give_equal_logits(kind, method, tmp_path):
    tuned = fit(kind, tmp_path / "run", method=method, eval_dataset=ROWS[:4], eval_strategy="steps", eval_steps=4)
    assert tuned.metrics["eval_loss"] < tuned.metrics["first_eval_loss"]
    ours = logits(tuned.model)
    torch.testing.assert_close(logits(Run.load(tmp_path / "run").model), ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(load_model(tmp_path / "run")), ours, rtol=1e-5, atol=1e-5)
    merged = tuned.merge()
    assert merged == tmp_path / "run" / "merged"
    torch.testing.assert_close(logits(load_model(merged)), ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tuned.model), ours, rtol=0, atol=0)


def test_the_run_folder_is_complete(tmp_path):
    tuned = fit("mamba", tmp_path / "run", save_strategy="steps", save_steps=2, report_to=["tensorboard"])
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert {
        "recipe.yaml",
        "recipe.resolved.yaml",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "environment.json",
        "kernels.json",
        "README.md",
        "checkpoints",
        "run.json",
        "base_model",
    } <= names
    assert not [name for name in names if name.startswith(".")]
    state = RunFolder(tmp_path / "run").read_state()
    assert state["status"] == "complete" and state["metrics"]["steps"] == 4
    assert [folder.name for folder in RunFolder(tmp_path / "run").list_checkpoints()] == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert tuned.generate("What is 3 plus 3?", max_new_tokens=4, temperature=0) is not None


class _Interrupt:
    """Sends this process a signal in the step after `step`, as Ctrl-C or a scheduler does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
        inner = SSMTrainer.compute_loss
        sent = []

        def compute_loss(trainer: SSMTrainer, *args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == step and not sent:
                sent.append(number)
                os.kill(os.getpid(), number)
            return inner(trainer, *args, **kwargs)

        monkeypatch.setattr(SSMTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes_with_the_losses_of_an_unbroken_one(method, number, tmp_path, monkeypatch):
    settings = {"max_steps": 7, "logging_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    if method == "lora":
        settings |= {"lora_dropout": 0.1, "train_also": ["A_log", "D"]}
    fit("mamba", tmp_path / "whole", method=method, **settings)
    with monkeypatch.context() as patch:
        _Interrupt(patch, 3 - 1, number)
        with pytest.raises(Stopped) as stopped:
            fit("mamba", tmp_path / "broken", method=method, **settings)
    assert stopped.value.exit_code == 128 + number
    assert RunFolder(tmp_path / "broken").read_state()["status"] == "stopped"
    with pytest.raises(RecipeError, match="--resume"):
        fit("mamba", tmp_path / "broken", method=method, **settings)
    resumed = fit("mamba", tmp_path / "broken", method=method, resume=True, **settings)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")  # to the bit
    whole = logits(Run.load(tmp_path / "whole").model)
    assert torch.equal(logits(resumed.model), whole)
    assert_equal_up_to_rounding(logits(Run.load(tmp_path / "broken").model), whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, caplog):
    fit("mamba", tmp_path / "whole")
    killed = RunFolder.create(tmp_path / "killed")
    killed.write_state("running", pid=2**22 + 1)
    killed.write_text("metrics.jsonl", '{"step": 1, "loss": 9.0}\n')
    with pytest.raises(RecipeError, match="--resume"):
        fit("mamba", tmp_path / "killed")
    fit("mamba", tmp_path / "killed", resume=True)
    assert "no checkpoint was written yet; the run starts from its beginning" in caplog.text
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_and_names_step_rows_and_checkpoint(tmp_path, monkeypatch):
    inner = SSMTrainer.compute_loss

    def compute_loss(trainer: SSMTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.model.training and trainer.state.global_step == 2:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
        return inner(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SSMTrainer, "compute_loss", compute_loss)
    with pytest.raises(Stopped, match=r"step 3: the loss is nan on dataset.*row \d+.*checkpoint-2") as stopped:
        fit("mamba2", tmp_path / "run", save_strategy="steps", save_steps=1)
    assert stopped.value.exit_code == 3
    assert RunFolder(tmp_path / "run").read_state()["status"] == "stopped"


def test_a_full_disk_leaves_a_resumable_run(tmp_path, monkeypatch):
    inner = torch.save

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(file):
            raise OSError(28, "No space left on device")
        inner(value, file, *args, **kwargs)

    settings = {"save_strategy": "steps", "save_steps": 2}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(Stopped, match=r"disk is full.*checkpoint-2") as stopped:
            fit("mamba", tmp_path / "run", **settings)
    assert stopped.value.exit_code == 3
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert fit("mamba", tmp_path / "run", resume=True, **settings).metrics["steps"] == 4


def test_mistakes_leave_nothing_behind(tmp_path):
    for settings, message in (
        ({"targets": ["q_projj"]}, "q_projj"),
        ({"rows": []}, "row"),
        ({"rows": [{"question": "a"}]}, "column"),
        ({"fp16": True}, "bf16"),
        ({"eval_strategy": "steps"}, "evaluation data"),
        ({"lr_scheduler_type": "cosin"}, "cosin"),
        ({"learning_rat": 1e-3}, "learning_rate"),
        ({"r": 0}, "r"),
        ({"method": "lore"}, "lora"),
        ({"train_also": ["conv2d"]}, "conv1d"),
    ):
        with pytest.raises(RecipeError, match=message):
            fit("mamba", tmp_path / "runs" / "run", **settings)
        assert list(tmp_path.iterdir()) == [], settings


def test_packed_and_unpacked_runs_are_the_same_run(tmp_path):
    """All documents in one optimizer step: the same gradients, whether packed into a row or a row each."""
    settings = {"method": "full", "max_steps": 3, "rows": ROWS[:3], "max_length": 128}
    packed = fit("mamba2", tmp_path / "packed", packing=True, per_device_train_batch_size=1, **settings)
    alone = fit("mamba2", tmp_path / "alone", per_device_train_batch_size=3, **settings)
    assert packed.metrics["num_tokens"] == alone.metrics["num_tokens"]
    pairs = zip(losses(tmp_path / "packed").values(), losses(tmp_path / "alone").values(), strict=True)
    assert all(ours == pytest.approx(theirs, rel=1e-4) for ours, theirs in pairs)


def test_an_attention_that_lets_packed_documents_see_each_other_is_refused(tmp_path):
    """The recipe's own, and that of a model in memory; before anything is made."""
    tiny_model("bamba").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{name: {tmp_path / 'model'}, attn_implementation: flash_attention_2}}\n"
        f"data: {{train: [{{path: {tmp_path / 'rows.jsonl'}}}]}}\n"
        f"training: {{output_dir: {tmp_path / 'run'}, packing: true, max_length: 64, max_steps: 1}}\n"
    )
    for go in (lambda recipe: run(recipe, "sft"), check_recipe):
        with pytest.raises(RecipeError, match="flash_attention_2 is not known to keep"):
            go(load_recipe(str(tmp_path / "recipe.yaml"), []))
    model = tiny_model("bamba")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(RecipeError, match="flash_attention_2 is not known to keep"):
        tune(model, ROWS, tokenizer=tiny_tokenizer(), output_dir=tmp_path / "run", **FAST, packing=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["granitemoehybrid", "jamba", "zamba2", "bamba"])
def test_hybrids_train(kind, tmp_path):
    assert fit(kind, tmp_path / kind, packing=True).metrics["steps"] == 4


def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * (1 + 7 * n)} for n in range(5)]
    found = [
        fit("mamba", tmp_path / str(size), eval_dataset=rows, max_steps=1, per_device_eval_batch_size=size).metrics
        for size in (1, 3)
    ]
    assert found[0]["first_eval_loss"] == pytest.approx(found[1]["first_eval_loss"], rel=1e-5)


def test_a_recipe_for_a_gpu_runs_on_a_cpu(tmp_path):
    tiny_model("mamba2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    overrides = [
        f"model.name={tmp_path / 'model'}",
        "tokenizer.chat_template=null",
        f"data.train.0.path={tmp_path / 'rows.jsonl'}",
        f"training.output_dir={tmp_path / 'run'}",
        "training.max_steps=2",
        "training.max_length=64",
        "evaluation.tasks=[]",
        "hub.push=null",
    ]
    recipe = load_recipe("codestral-lora", overrides)
    assert recipe.model.dtype == "bfloat16"
    tuned = run(recipe, "sft")
    dtypes = {name: parameter.dtype for name, parameter in tuned.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name or name.endswith("A_log")} == {torch.float32}
    assert dtypes["base_model.model.backbone.embeddings.weight"] == torch.bfloat16
    torch.testing.assert_close(logits(Run.load(tmp_path / "run").model), logits(tuned.model))


def test_a_recipe_and_python_are_the_same_run(tmp_path):
    tiny_model("mamba").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {key: value for key, value in FAST.items() if key != "report_to"} | {"report_to": []}
    python = tune(tmp_path / "model", tmp_path / "rows.jsonl", output_dir=tmp_path / "python", **settings)
    recipe = load_recipe(tmp_path / "python" / "recipe.resolved.yaml", [f"training.output_dir={tmp_path / 'file'}"])
    file = run(recipe, "sft")
    assert losses(tmp_path / "python") == losses(tmp_path / "file")
    assert torch.equal(logits(python.model), logits(file.model))
    assert not (tmp_path / "file" / "base_model").exists()


@pytest.mark.parametrize(
    ("header", "task", "refused"), [("pretrain", None, True), ("sft", None, False), ("sft", "pretrain", True)]
)
def test_validate_looks_at_rows_as_the_task_does(header, task, refused, tmp_path):
    """Questions and answers are rows of sft, not of pretrain, which takes text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        f"# one line\n#   ssm-tune {header} recipe.yaml\nmodel: {{architecture: mamba, size: 130m}}\n"
        f"tokenizer: {{train: true, vocab_size: 300}}\ndata: {{train: [{{path: rows.jsonl}}]}}\n"
        f"training: {{output_dir: run, max_steps: 1}}\n"
    )
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), [])
    if refused:
        with pytest.raises(RecipeError, match="pretrain"):
            check_recipe(recipe, task)
    else:
        assert any("1 rows are usable" in line for line in check_recipe(recipe, task))
