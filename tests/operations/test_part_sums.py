"""Sums over the parts that programs leave: when they are there; the kernel itself is interpreted with the others."""

from __future__ import annotations

import pytest
import torch

from ssm_tune.kernels import part_sums

SHAPES = ((1, 1), (264, 4096), (3, 64, 64), (64, 17408), (129, 33), (528, 2048))


def test_sums_are_there_at_once_where_nothing_puts_them_off() -> None:
    parts = torch.randn(2, 3, 5)
    found = [part_sums.add_up(parts)]
    with part_sums.added_together():  # on a CPU
        found.append(part_sums.add_up(parts, torch.bfloat16))
        assert torch.equal(found[0], parts.sum(1)) and torch.equal(found[1], parts.sum(1).bfloat16())


def test_an_error_inside_leaves_nothing_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_sums, "DEVICES", ("cpu",))
    parts = torch.ones(3, 2)
    with pytest.raises(ZeroDivisionError), part_sums.added_together():
        part_sums.add_up(parts)
        raise ZeroDivisionError
    assert torch.equal(part_sums.add_up(parts), torch.full((2,), 3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    parts = [torch.randn(shape, device="cuda") for shape in SHAPES]
    runs = []
    for _ in range(2):
        with part_sums.added_together():
            runs.append([part_sums.add_up(each, dtype) for each in parts])
    for each, first, second in zip(parts, *runs, strict=True):
        assert torch.equal(first, second)
        exact = each.double().sum(-2)
        limit = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(first.double(), exact, rtol=limit, atol=1e-4)
