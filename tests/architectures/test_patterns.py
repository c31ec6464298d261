"""Hybrid patterns: allotted as Megatron-LM allots them, by period, or repeated."""

from __future__ import annotations

import pytest

from ssm_tune.architectures.patterns import allot_layers, attend_every, repeat_pattern

# Megatron-LM's examples/mamba/train.sh and README, which has these for the published 800M and 8B models.
PUBLISHED = {
    48: "M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-",
    56: "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",
}


@pytest.mark.parametrize(("layers", "counts"), [(48, (20, 4, 24)), (56, (24, 4, 28))])
def test_shares_are_allotted_as_megatron_does(layers: int, counts: tuple[int, int, int]) -> None:
    pattern = allot_layers(layers, 0.08, 0.5)
    assert tuple(map(pattern.count, "M*-")) == counts
    assert pattern == PUBLISHED[layers]


def test_other_shares() -> None:
    assert allot_layers(5) == "MMMMM"
    assert allot_layers(9, 0.25) == "MM*MMM*MM"  # two of nine, and mixers at both ends
    assert allot_layers(4, mlp_ratio=0.5) == "M-M-"
    assert allot_layers(4, 0.5, 0.5).count("M") == 0
    with pytest.raises(ValueError, match=r"4 layers cannot be 0\.6 attention and 0\.5 MLP"):
        allot_layers(4, 0.6, 0.5)


def test_by_period() -> None:
    assert attend_every(16, 4) == "M-M-*-M-M-M-*-M-"
    assert attend_every(16, 8) == "M-M-M-M-*-M-M-M-"
    with pytest.raises(ValueError, match="15 layers are odd"):
        attend_every(15, 4)
    with pytest.raises(ValueError, match="none would be attention"):
        attend_every(4, 8)


def test_repeated() -> None:
    assert repeat_pattern("M*M-", 8) == "M*M-M*M-"
    assert repeat_pattern("M*M-", None) == "M*M-"
    with pytest.raises(ValueError, match="has 4 layers, of which 10 is not a multiple"):
        repeat_pattern("M*M-", 10)
    with pytest.raises(ValueError, match="other symbols"):
        repeat_pattern("MX", None)
