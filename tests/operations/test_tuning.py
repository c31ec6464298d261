"""Trials do not tune: few configurations inside, none of them remembered outside."""

from __future__ import annotations

import pytest

from ssm_tune.kernels.tuning import without_tuning

autotuner = pytest.importorskip("triton.runtime.autotuner")


class Tuner(autotuner.Autotuner):
    """Triton's own class without a kernel to build: what `prune_configs` gives is what would be timed."""

    def __init__(self) -> None:
        self.configs = [autotuner.Config({"BLOCK": 2**n}) for n in range(6)]
        self.cache = {"before": self.configs[5]}
        self.early_config_prune, self.perf_model, self.nargs = None, None, {}

    def tune(self, key: str) -> int:
        found = self.prune_configs({})
        self.cache[key] = found[0]
        return len(found)


def test_few_configurations_inside_all_of_them_outside() -> None:
    tuner = Tuner()
    with without_tuning():
        assert tuner.tune("inside") == 2
        assert set(tuner.cache) == {"before", "inside"}
    assert set(tuner.cache) == {"before"}
    assert tuner.tune("outside") == 6


def test_the_class_is_left_as_it_was_after_an_error() -> None:
    before = autotuner.Autotuner.prune_configs
    with pytest.raises(ZeroDivisionError), without_tuning():
        raise ZeroDivisionError
    assert autotuner.Autotuner.prune_configs is before
