"""Each row's tokens are chosen by its own rules, as transformers chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssm_tune.outputs.serve.sampling import Chooser, Rules, choose_tokens, measure

CPU = torch.device("cpu")


def logits(seed: int = 0, size: int = 50) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def chooser(prompt: tuple[int, ...] = (), **rules: Any) -> Chooser:
    return Chooser(Rules(**rules), prompt, CPU)


@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 500},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(rules: dict[str, float]) -> None:
    row = logits()
    warpers: list[Any] = [TemperatureLogitsWarper(rules.get("temperature", 1.0))]
    if "top_k" in rules:
        warpers.append(TopKLogitsWarper(int(rules["top_k"])))
    if "top_p" in rules:
        warpers.append(TopPLogitsWarper(rules["top_p"]))
    if "min_p" in rules:
        warpers.append(MinPLogitsWarper(rules["min_p"]))
    wanted = LogitsProcessorList(warpers)(None, row[None].clone()).softmax(-1)[0]
    got = chooser(**rules)._narrow((row - row.max()) / rules.get("temperature", 1.0))
    assert torch.allclose(got / got.sum(), wanted, atol=1e-6)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    row, prompt, answer = logits(), (3, 4, 4, 7), (9, 11)
    one = chooser(prompt, temperature=0.0, repetition_penalty=1.7)
    for token in answer:
        one.take(token)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    wanted = processor(torch.tensor([[*prompt, *answer]]), row[None].clone())[0]
    assert torch.equal(one._penalise(row), wanted)


def test_frequency_and_presence_count_the_answer_alone() -> None:
    row = torch.zeros(10)
    one = chooser((1, 1), temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={2: 1.0, 5: -1.0})
    for token in (2, 2, 3):
        one.take(token)
    wanted = [0, 0, 1 - 2 * 0.5 - 0.25, -0.75, 0, -1, 0, 0, 0, 0]
    assert one._penalise(row).tolist() == wanted
    assert row.tolist() == [0] * 10


def test_a_seed_gives_the_same_tokens_whatever_runs_beside() -> None:
    rows = [logits(seed) for seed in range(20)]
    alone = chooser(seed=7)
    wanted = [choose_tokens([alone], row[None])[0] for row in rows]
    again, other = chooser(seed=7), chooser(seed=8)
    both = [choose_tokens([other, again], torch.stack([row, row])) for row in rows]
    assert [pair[1] for pair in both] == wanted
    assert [pair[0] for pair in both] != wanted


def test_megatrons_top_p_falls_to_its_bound() -> None:
    one = chooser(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3, seed=0)
    seen = []
    for _ in range(4):
        seen.append(one._top_p)
        one.choose(logits())
    assert seen == pytest.approx([0.8, 0.4, 0.3, 0.3])


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
def test_cold_rows_take_the_likeliest(temperature: float) -> None:
    assert chooser(temperature=temperature).choose(logits()) == int(logits().argmax())


def test_top_p_zero_takes_the_likeliest() -> None:
    assert {chooser(top_p=0.0).choose(logits()) for _ in range(20)} == {int(logits().argmax())}


def test_rows_that_are_not_numbers_are_told_apart() -> None:
    rows = torch.stack([logits(), logits().index_fill(0, torch.tensor([3]), torch.nan), logits()])
    assert choose_tokens([chooser(temperature=0.0) for _ in range(3)], rows) == [
        int(logits().argmax()),
        None,
        int(logits().argmax()),
    ]


def test_likelihoods_are_the_models_own() -> None:
    row = logits().index_fill(0, torch.tensor([0]), -torch.inf)
    one = measure(row, 4, 3)
    values = row.log_softmax(0)
    assert one.value == pytest.approx(float(values[4]))
    assert [token for token, _ in one.likeliest] == values.topk(3).indices.tolist()
    assert len(measure(row, 4, 60).likeliest) == 49  # what can never come has no likelihood
