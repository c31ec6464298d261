"""examples/compare.py: several architectures on one recipe, in a table and a plot."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from ssm_tune.architectures import plan_config
from ssm_tune.recipe import load_recipe

SCRIPT = str(Path(__file__).parents[1] / "examples" / "compare.py")
compare = runpy.run_path(SCRIPT)
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


@pytest.mark.parametrize("name", compare["MODELS"])
def test_the_models_are_of_one_size(name: str) -> None:
    """Beside the embedding of 50,304 x 768: from nine to eleven tenths of the Transformer's 85 million."""
    from ssm_tune.model import meta_model

    recipe = load_recipe("compare-130m", compare["MODELS"][name])
    model = meta_model(plan_config(recipe.model, 50277, TOKENS))
    embedding = model.get_input_embeddings().weight
    inside = sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()
    if model.get_output_embeddings().weight is not embedding:
        inside -= embedding.numel()
    assert 0.9 <= inside / 85e6 <= 1.15, inside


@pytest.mark.slow
def test_two_models_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n}"}) + "\n" for n in range(400)))
    words = [
        "compare-130m",
        *("model.size=null", "model.dimensions.hidden_size=64", "model.dimensions.num_hidden_layers=2"),
        *("tokenizer.name=null", "tokenizer.train=bpe", "tokenizer.vocab_size=300"),
        *(f"data.train.0.path={tmp_path / 'rows.jsonl'}", "data.eval_fraction=0.1", "data.batch_tokens=null"),
        *("training.max_steps=4", "training.logging_steps=1", "training.eval_strategy=epoch", "training.bf16=false"),
        *("training.max_length=64", "training.per_device_train_batch_size=2", "training.dataloader_num_workers=0"),
        f"training.output_dir={tmp_path / 'out'}",
    ]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--models", "transformer", "mamba2"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert not end.value.code
    table = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table] == ["| model", "| ---", "| transformer", "| mamba2"]
    assert (tmp_path / "out" / "compare.png").stat().st_size > 5000
    lines = [json.loads(line) for line in (tmp_path / "out" / "mamba2" / "metrics.jsonl").read_text().splitlines()]
    last = [line["loss"] for line in lines if "loss" in line][-1]
    assert f"{last:.4f}" in table[3]
    assert "compare.png" in capsys.readouterr().out
