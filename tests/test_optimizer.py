"""What decays: matrices do; the recurrence's parameters, norms and biases do not."""

from __future__ import annotations

import pytest
from tiny import tiny_model

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
