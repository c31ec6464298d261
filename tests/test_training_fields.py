"""The trainer's settings read from source, against the class itself."""

from __future__ import annotations

import dataclasses
from enum import Enum

import pytest

from ssm_tune.training_fields import OWNED_ELSEWHERE, RANGES, RENAMED, training_fields


def test_fields_come_from_every_base() -> None:
    fields = training_fields()
    assert fields["packing"].annotation == "bool"  # SFTConfig's own
    assert fields["learning_rate"].default == 2e-5  # SFTConfig's, over TrainingArguments' 5e-5
    assert fields["logging_steps"].default == 10  # its base's
    assert fields["adam_beta2"].default == 0.999  # TrainingArguments'
    assert "cosine" in fields["lr_scheduler_type"].choices
    assert fields["loss_type"].choices[:2] == ("nll", "dft")


def test_the_tables_name_fields_that_exist() -> None:
    fields = training_fields()
    assert set(RANGES) <= set(fields)
    assert set(OWNED_ELSEWHERE) <= set(fields)
    assert not set(RENAMED) & set(fields)
    assert not set(RANGES) & set(OWNED_ELSEWHERE)


@pytest.mark.slow  # importing SFTConfig takes seconds
def test_equal_to_sft_config() -> None:
    from trl import SFTConfig

    fields = training_fields()
    real = {field.name: field for field in dataclasses.fields(SFTConfig) if field.init}
    assert set(fields) == set(real)
    for name, field in real.items():
        if field.default is not dataclasses.MISSING:
            default = field.default
        else:
            assert field.default_factory is not dataclasses.MISSING
            default = field.default_factory()
        assert fields[name].default == (default.value if isinstance(default, Enum) else default), name
        assert fields[name].default is not ..., f"the default of {name} was not read"
    for name in ("lr_scheduler_type", "save_strategy", "eval_strategy", "loss_type", "train_sampling_strategy"):
        assert fields[name].default in fields[name].choices
