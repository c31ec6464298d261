"""The public norms: they are the reference on a CPU, and name what does not fit."""

from __future__ import annotations

import pytest
import torch
from comparison import draw

from ssm_tune.kernels import gated_rms_norm, reference, rms_norm


def test_they_are_the_reference() -> None:
    y, z, weight = draw(2, 3, 8).float(), draw(2, 3, 8).float(), draw(8).float()
    assert torch.equal(rms_norm(y, weight, 1e-5), reference.rms_norm(y, weight, 1e-5))
    for settings in ((None, False), (4, False), (2, True)):
        expected = reference.gated_rms_norm(y, z, weight, 1e-5, *settings)
        assert torch.equal(gated_rms_norm(y, z, weight, 1e-5, *settings), expected)


def test_what_does_not_fit_is_named() -> None:
    y, z, weight = torch.ones(2, 3, 8), torch.ones(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"rms_norm: weight is \(8,\), expected \(4,\)"):
        rms_norm(y[..., :4], weight, 1e-5)
    with pytest.raises(ValueError, match=r"z is \(2, 3, 4\), expected \(2, 3, 8\)"):
        gated_rms_norm(y, z[..., :4], weight, 1e-5)
    with pytest.raises(ValueError, match="8 channels are not a multiple of the group size 3"):
        gated_rms_norm(y, z, weight, 1e-5, group_size=3)
