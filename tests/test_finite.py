"""Numbers that are not finite are found: at once on a CPU, two micro-batches later on a GPU, and at the end all."""

from __future__ import annotations

import pytest
import torch

from ssm_tune.finite import LAG, FiniteWatch

NAN, ROWS = torch.tensor(float("nan")), torch.tensor([[3]])


def test_on_a_cpu_at_the_next_batch() -> None:
    watch = FiniteWatch()
    watch.add(1, torch.tensor(2.0))
    assert watch.next_batch() is None
    watch.add(2, NAN, ROWS)
    watch.add(2, torch.tensor(float("inf")))
    found = watch.next_batch()
    assert found.step == 2 and found.rows is ROWS
    assert watch.next_batch() is None  # told once, with all that came with it


def test_the_rest() -> None:
    watch = FiniteWatch()
    watch.add(5, torch.tensor([1.0, float("inf")]))
    assert watch.rest().step == 5
    assert watch.rest() is None


@pytest.mark.gpu
def test_on_a_gpu_when_it_has_gone_on() -> None:
    watch = FiniteWatch()
    watch.next_batch()
    value = NAN.cuda()
    watch.add(1, value, ROWS)
    value.fill_(1.0)  # what counts is what it was
    for _ in range(LAG - 1):
        assert watch.next_batch() is None
    assert watch.next_batch().step == 1
    watch.add(2, NAN.cuda())
    assert watch.rest().step == 2
