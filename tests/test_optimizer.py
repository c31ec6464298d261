"""What decays: matrices do; the recurrence's parameters, norms and biases do not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from ssm_tune import RecipeError, tune
from ssm_tune.optimizer import decayed_parameter_names


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "codestral", "bamba", "zamba2", "nemotron_h"])
def test_state_space_parameters_norms_and_biases_do_not_decay(kind):
    model = tiny_model(kind)
    decayed = decayed_parameter_names(model)
    spared = [name for name, _ in model.named_parameters() if name not in decayed]
    assert any(name.endswith("A_log") for name in spared) and any(name.endswith(".D") for name in spared)
    assert any("norm_f" in name or "final_layernorm" in name for name in spared)
    for name in decayed:
        assert "norm" not in name and not name.endswith("bias") and "A_log" not in name
    assert any("in_proj.weight" in name for name in decayed) and any("conv1d.weight" in name for name in decayed)
    assert any("embed" in name for name in decayed)


@pytest.mark.skipif(find_spec("lomo_optim") is not None, reason="the package is there")
def test_an_optimizer_whose_package_is_missing(tmp_path: Path) -> None:
    rows = [{"prompt": "one and one is ", "completion": "2"}] * 2
    output = tmp_path / "run"
    with pytest.raises(RecipeError, match=r"training.optim: .*lomo"):
        tune(tiny_model("mamba"), rows, method="full", tokenizer=tiny_tokenizer(), output_dir=output, optim="lomo")
    assert not output.exists()
