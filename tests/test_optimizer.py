"""What decays: matrices do; the recurrence's parameters, norms and biases do not. And clipping in the step itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import TrainerCallback

from ssm_tune import RecipeError, trainer, tune
from ssm_tune.optimizer import clip_in_step, clips_in_step, decayed_parameter_names
from ssm_tune.trainer import SSMTrainer


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


# -- clipping -----------------------------------------------------------------------------------------------------

LARGEST = 0.5  # norm


def weights_and_optimizer() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,))]
    decayed, rest = (
        {"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, (0.1, 0.0), strict=True)
    )
    return weights, torch.optim.AdamW([decayed, rest], lr=0.1, fused=True)


def steps_taken(clip_first: bool, scale: float) -> list[Tensor]:
    """Norm, weights and gradients of a clipped step, and the weights after one that is not clipped."""
    weights, optimizer = weights_and_optimizer()
    norms = []
    for clipped in (True, False):
        torch.manual_seed(2)
        for weight in weights:
            weight.grad = torch.randn(weight.shape) * scale
        if clipped and clip_first:
            norms.append(nn.utils.clip_grad_norm_(weights, LARGEST))
        elif clipped:
            norms.append(clip_in_step(optimizer, weights, LARGEST))
        optimizer.step()
        if clipped:
            norms += [tensor.detach().clone() for weight in weights for tensor in (weight, weight.grad)]
    return [*norms, *(weight.detach() for weight in weights)]


def test_clipping_in_the_step() -> None:
    expected, found = steps_taken(True, 1.0), steps_taken(False, 1.0)
    assert float(expected[0]) > 2 * LARGEST and torch.equal(expected[0], found[0])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_gradients_that_need_no_clipping_are_the_same_to_the_bit() -> None:
    expected, found = steps_taken(True, 0.01), steps_taken(False, 0.01)
    assert float(expected[0]) < LARGEST
    assert all(map(torch.equal, expected, found))


def test_a_norm_that_is_not_finite_is_not_hidden() -> None:
    weights, optimizer = weights_and_optimizer()
    weights[0].grad, weights[1].grad = torch.ones(3, 5), torch.full((7,), float("nan"))
    assert clip_in_step(optimizer, weights, LARGEST).isnan()
    optimizer.step()
    assert all(weight.isnan().all() for weight in weights)


def test_other_optimizers_do_not_clip_in_their_step() -> None:
    weights, fused = weights_and_optimizer()
    assert clips_in_step(fused, weights)
    assert not clips_in_step(torch.optim.AdamW(weights, fused=False), weights)
    assert not clips_in_step(torch.optim.SGD(weights, fused=True), weights)


class Reader(TrainerCallback):
    """Reads the norm of gradients where transformers promises clipped ones, and after the step."""

    def __init__(self, unclipped_will_do: bool) -> None:
        self.unclipped_will_do = unclipped_will_do
        self.before, self.after = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.before.append(norm_of(model))

    def on_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.after.append(norm_of(model))


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


def trained(output: Path, reader: TrainerCallback, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    rows = [{"prompt": "one and one is ", "completion": "2"}] * 4
    own, models = SSMTrainer.__init__, []

    def begin(self, model, *args, callbacks=None, **kwargs) -> None:
        models.append(model)
        own(self, model, *args, callbacks=[*callbacks, reader], **kwargs)

    monkeypatch.setattr(SSMTrainer, "__init__", begin)
    settings = {"max_steps": 3, "max_grad_norm": 0.01, "logging_steps": 1, "learning_rate": 1e-3}
    tune(tiny_model("mamba2"), rows, method="full", tokenizer=tiny_tokenizer(), output_dir=output, **settings)
    monkeypatch.setattr(SSMTrainer, "__init__", own)
    return [parameter.detach() for parameter in models[0].parameters()]


def test_a_run_clips_in_the_step_unless_a_callback_reads_clipped_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless, careful = Reader(unclipped_will_do=True), Reader(unclipped_will_do=False)
    calls = []
    monkeypatch.setattr(trainer, "clip_in_step", lambda *given: calls.append(1) or clip_in_step(*given))
    found = trained(tmp_path / "careless", careless, monkeypatch)
    assert len(calls) == 3
    expected = trained(tmp_path / "careful", careful, monkeypatch)
    assert len(calls) == 3
    assert min(careless.before) > 0.02
    assert careful.before == careful.after == pytest.approx([0.01] * 3, rel=1e-3)
    assert careless.after == pytest.approx([0.01] * 3, rel=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
