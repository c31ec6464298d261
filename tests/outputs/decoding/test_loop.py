"""The loop: prompts in pieces, padded or not, give the same; rows, rules and ends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from finished import stir
from tiny import PURE, tiny_model
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from ssm_tune.adapter import apply_adapter
from ssm_tune.mixers import patch_model
from ssm_tune.outputs.decoding import graphs, loop
from ssm_tune.outputs.decoding.choosing import Choice
from ssm_tune.outputs.decoding.loop import Decoder, NoNumbers, read_prompts
from ssm_tune.recipe import AdapterSection

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def decode(*arguments: Any) -> Any:
    return Decoder().decode(*arguments)


def greedy(ids: torch.Tensor, **rules: Any) -> Choice:
    return Choice(ids, torch.ones_like(ids), 300, **rules)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :], mask[place, longest - len(row) :] = row, 1
    return ids, mask


def states_of(cache: Any) -> list[torch.Tensor]:
    return [state for layer in cache.layers for state in (layer.conv_states[0], layer.recurrent_states[0])]


@pytest.mark.parametrize("kind", PURE)
def test_prompts_in_pieces_and_token_by_token_are_the_whole_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows too: a piece may be nothing but padding for one row."""
    model = patch_model(tiny_model(kind))
    ids, mask = padded([torch.randint(6, 260, (length,)) for length in (41, 3, 17)])
    cache, logits = read_prompts(model, ids, mask)
    for size in (1, 2, 5, 16):
        monkeypatch.setattr(loop, "_PIECE", size)
        monkeypatch.setattr(loop, "_SMALLEST", size)
        again, found = read_prompts(model, ids, mask)
        torch.testing.assert_close(found, logits, rtol=0, atol=2e-5)
        for one, other in zip(states_of(again), states_of(cache), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PURE)
def test_rows_of_a_batch_are_their_single_runs(kind: str, device: str) -> None:
    model = patch_model(tiny_model(kind)).to(device)
    rows = [torch.randint(6, 260, (length,)) for length in (20, 3, 1)]
    ids, mask = (part.to(device) for part in padded(rows))
    together = list(decode(model, ids, mask, greedy(ids), 12))
    for place, row in enumerate(rows):
        single = row[None].to(device)
        alone = list(decode(model, single, torch.ones_like(single), greedy(single), 12))
        assert [tokens[0] for tokens in alone] == [tokens[place] for tokens in together]
    assert len(together) == 12 and len({tuple(said) for said in zip(*together, strict=True)}) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_step_works_on_neither_moves_nor_grows(device: str) -> None:
    model = patch_model(tiny_model("mamba2")).to(device)
    ids = torch.randint(6, 260, (2, 8)).to(device)
    seen: list[list[int]] = []
    step = loop.BatchedStates.step

    def watched(self: Any, tokens: Any) -> Any:
        logits = step(self, tokens)
        seen.append([pool._rows.data_ptr() for pool in self._pools])
        return logits

    loop.BatchedStates.step = watched
    try:
        list(decode(model, ids, torch.ones_like(ids), greedy(ids), 12))
    finally:
        loop.BatchedStates.step = step
    assert len(seen) == 11 and all(places == seen[0] for places in seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_what_is_kept_is_right_for_the_next_call(kind: str, device: str) -> None:
    """Other prompts, fewer and more rows, weights changed in place and replaced, adapters off and on."""
    model = apply_adapter(patch_model(tiny_model(kind)), AdapterSection(r=4, train_also=["A_log", "dt_bias"]))
    stir(model)
    model.eval().to(device)
    decoder = Decoder()

    def check(rows: int) -> list[list[int]]:
        ids = torch.randint(6, 260, (rows, 5 + rows), generator=torch.Generator().manual_seed(rows)).to(device)
        kept = list(decoder.decode(model, ids, torch.ones_like(ids), greedy(ids), 10))
        assert kept == list(decode(model, ids, torch.ones_like(ids), greedy(ids), 10))
        return kept

    first = check(3)
    states = decoder._states
    assert check(3) == first and check(1) and check(2)
    assert decoder._states is states
    assert check(5)
    with model.disable_adapter():
        assert check(3) != first
    assert check(3) == first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter += 1.0
    changed = check(3)
    assert changed != first
    model.get_base_model().lm_head.weight.data = -model.get_base_model().lm_head.weight.data
    assert check(3) != changed


def test_a_second_thread_gets_places_of_its_own() -> None:
    model = patch_model(tiny_model("mamba"))
    ids = torch.randint(6, 260, (1, 6))
    decoder = Decoder()
    expected = list(decode(model, ids, torch.ones_like(ids), greedy(ids), 8))
    one = decoder.decode(model, ids, torch.ones_like(ids), greedy(ids), 8)
    begun = [next(one), next(one)]
    assert list(decoder.decode(model, ids, torch.ones_like(ids), greedy(ids), 8)) == expected
    assert begun + list(one) == expected


def test_nothing_is_computed_after_the_listener_has_gone() -> None:
    model = patch_model(tiny_model("mamba"))
    ids = torch.randint(6, 260, (1, 4))
    asked: list[int] = []
    choice = greedy(ids)
    tokens = decode(model, ids, torch.ones_like(ids), lambda logits: asked.append(1) or choice(logits), 50)
    for _ in range(3):
        next(tokens)
    tokens.close()
    assert len(asked) == 3


def test_logits_that_are_no_numbers_are_told() -> None:
    model = patch_model(tiny_model("mamba"))
    ids = torch.randint(6, 260, (2, 4))

    def break_second(logits: torch.Tensor) -> Any:
        logits[1] = torch.nan
        return greedy(ids)(logits)

    with pytest.raises(NoNumbers, match="row 1"):
        next(decode(model, ids, torch.ones_like(ids), break_second, 5))


def test_the_rules_are_transformers_rules() -> None:
    """And padding does not count as seen, which it does for transformers."""
    prompts = [torch.randint(6, 60, (length,)) for length in (12, 4)]
    ids, mask = padded(prompts)
    choice = Choice(ids, mask, 64, never=[62, 63], repetition_penalty=1.7)
    rules = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), SuppressTokensLogitsProcessor([62, 63])])
    said = [prompt.tolist() for prompt in prompts]
    for _ in range(20):
        logits = 3 * torch.randn(2, 64)
        logits[:, [0, 63]] += 9.0  # the padding's token, and one that may never be
        before = logits.clone()
        expected = [int(rules(torch.tensor([said[row]]), logits[row : row + 1].clone()).argmax()) for row in range(2)]
        tokens, told = choice(logits)
        assert tokens.tolist() == told.tolist() == expected
        assert torch.equal(logits, before)
        for row in range(2):
            said[row].append(expected[row])


@pytest.mark.parametrize(
    "keys", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_tokens_are_drawn_with_transformers_probabilities(keys: dict[str, Any]) -> None:
    rows = 20_000
    logits = torch.linspace(-2, 2, 16)[torch.randperm(16)].expand(rows, 16)
    ids = torch.ones(rows, 1, dtype=torch.long)
    tokens, _ = Choice(ids, ids, 16, never=[3], temperature=1.3, **keys)(logits)
    config = GenerationConfig(do_sample=True, temperature=1.3, suppress_tokens=[3], **{"top_k": 0, **keys})
    model = patch_model(tiny_model("mamba"))
    rules = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    expected = rules(ids[:1], logits[:1].clone()).softmax(1)[0]
    found = tokens.bincount(minlength=16) / rows
    assert found[expected == 0].sum() == 0
    assert (found - expected).abs().max() < 0.015


def test_a_step_that_cannot_be_captured_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", refuse)
    monkeypatch.setattr(graphs, "_said", set())
    for _ in range(2):
        step = graphs.Graphed(lambda ids: ids + 1, torch.device("cpu"))
        step.enabled = True
        for _ in range(2):
            assert step(torch.tensor([1, 2])).tolist() == [2, 3]
        assert not step.enabled
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not permitted" in caplog.text and "slower" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PURE)
def test_a_graph_says_what_the_step_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(tiny_model(kind)).cuda()
    ids, mask = (part.cuda() for part in padded([torch.randint(6, 260, (length,)) for length in (20, 3, 9)]))
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1) or replay(self))
    captured = list(decode(model, ids, mask, greedy(ids), 40))
    assert len(replays) == 38 + 39  # all but the first token, which the prompt gives, and the first step; all choices
    monkeypatch.setattr(graphs.Graphed, "_capture", lambda self, rows, like: None)
    assert captured == list(decode(model, ids, mask, greedy(ids), 40))
    assert len(replays) == 38 + 39


@pytest.mark.gpu
def test_a_seed_says_the_same_with_and_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(tiny_model("mamba")).cuda()
    ids, mask = (part.cuda() for part in padded([torch.randint(6, 260, (length,)) for length in (20, 3, 9)]))
    rules = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2}

    def sampled(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return list(decode(model, ids, mask, Choice(ids, mask, 300, **rules), 40))

    first = sampled(1)
    assert sampled(1) == first != sampled(2)
    monkeypatch.setattr(graphs.Graphed, "_capture", lambda self, rows, like: None)
    assert sampled(1) == first


@pytest.mark.gpu
def test_a_step_that_asks_the_host_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(graphs, "_said", set())
    step = graphs.Graphed(lambda ids: ids * int(ids.sum()), torch.device("cuda"))
    for _ in range(3):
        assert step(torch.tensor([1, 2]).cuda()).tolist() == [3, 6]
    assert caplog.text.count("cannot be captured") == 1
