"""Rows that come and go decode as each of them does alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rows import relative_error
from serving import serving
from tiny import HYBRID, PURE, tiny_model
from tiny_models import make_model

from ssm_tune.mixers import patch_model
from ssm_tune.outputs.decoding.states import BatchedStates, SingleStates, make_states

LENGTHS = (5, 17, 3, 30, 1, 8)
STEPS = 12
# a number: that row comes; None: a step; -1: the first row leaves; -2: the last one does
PLAN = (0, 1, 2, None, 3, None, -1, 4, None, 5, None, -2, None, None, -1, None, -1, -1, None, -1, 1, None)


@torch.no_grad()
def prompts_and_answers(model: Any) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Prompts, tokens that follow them, and the logits after each of those tokens when a row decodes alone."""
    device = model.get_input_embeddings().weight.device
    prompts = [torch.randint(6, 260, (1, length)).to(device) for length in LENGTHS]
    tokens = torch.randint(6, 260, (len(LENGTHS), STEPS)).to(device)
    alone = []
    for prompt, row in zip(prompts, tokens, strict=True):
        cache, logits = model(prompt, use_cache=True).cache, []
        for token in row:
            logits.append(model(token.view(1, 1), cache=cache, use_cache=True).logits[0, -1])
        alone.append(torch.stack(logits))
    return prompts, tokens, alone


@torch.no_grad()
def largest_error(model: Any, make: Any) -> tuple[Any, float]:
    prompts, tokens, alone = prompts_and_answers(model)
    states, rows, place, worst = None, [], {}, 0.0
    for event in PLAN:
        if event is None:
            if not rows:
                continue
            logits = states.step([int(tokens[row, place[row]]) for row in rows])
            for got, row in zip(logits, rows, strict=True):
                worst = max(worst, relative_error(got, alone[row][place[row]]))
                place[row] += 1
        elif event >= 0:
            cache = model(prompts[event], use_cache=True).cache
            states = make(model, cache) if states is None else states
            states.add(cache, LENGTHS[event])
            rows.append(event)
            place[event] = 0
        else:
            leaving = 0 if event == -1 else len(rows) - 1
            states.remove(leaving)
            rows[leaving] = rows[-1]
            rows.pop()
    return states, worst


@pytest.mark.parametrize("kind", [*PURE, *HYBRID])
def test_rows_that_come_and_go_decode_as_alone(kind: str) -> None:
    states, worst = largest_error(patch_model(tiny_model(kind)), make_states)
    assert isinstance(states, BatchedStates)
    assert worst < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PURE)
def test_rows_on_a_gpu_decode_as_alone(kind: str) -> None:
    states, worst = largest_error(patch_model(tiny_model(kind)).cuda(), make_states)
    assert isinstance(states, BatchedStates)
    assert worst < 2e-3  # Triton's products in TF32


@pytest.mark.gpu
def test_a_gpu_answers_as_it_does_alone() -> None:
    with serving(patch_model(tiny_model("mamba")).cuda()) as served, ThreadPoolExecutor(8) as threads:
        prompts = ["the state " * number for number in range(1, 17)]
        fields = {"max_tokens": 8, "temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 2}
        alone = [served.complete(prompt=prompt, **fields) for prompt in prompts]
        together = list(threads.map(lambda prompt: served.complete(prompt=prompt, **fields), prompts))
    assert [a["choices"][0]["text"] for a in alone] == [a["choices"][0]["text"] for a in together]


OWN = ("mamba3", "mamba3_hybrid", "mamba_hybrid", "mamba2_hybrid", "h3", "h3_hybrid", "samba")


@pytest.mark.parametrize("kind", OWN)
def test_rows_of_our_own_architectures_decode_as_alone(kind: str) -> None:
    """Samba's window of attention is not joined: its rows keep caches of their own."""
    states, worst = largest_error(make_model(kind, vocab_size=300), make_states)
    assert isinstance(states, SingleStates if kind == "samba" else BatchedStates)
    assert worst < 1e-5


def test_rows_with_caches_of_their_own_decode_as_alone() -> None:
    _, worst = largest_error(patch_model(tiny_model("mamba")), lambda model, cache: SingleStates(model))
    assert worst < 1e-5


def test_a_cache_that_cannot_be_joined_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mamba")
    assert isinstance(make_states(model, object()), SingleStates)
    assert "no faster" in caplog.text


def test_room_grows_by_doubling_and_is_kept() -> None:
    """What a step works on does not move as long as no more rows come than ever came."""
    model = patch_model(tiny_model("mamba"))
    with torch.no_grad():
        cache = model(torch.tensor([[7, 8]]), use_cache=True).cache
    states = BatchedStates(model, cache)
    for _ in range(5):
        states.add(cache, 2)
    pools = [pool._rows for pool in states._pools]
    assert {pool.shape[0] for pool in pools} == {8}
    for _ in range(5):
        states.remove(0)
    for _ in range(8):
        states.add(cache, 2)
    assert all(pool._rows is before for pool, before in zip(states._pools, pools, strict=True))
