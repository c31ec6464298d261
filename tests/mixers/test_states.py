"""A row gives the same logits whole, in pieces and token by token, whatever is padded round it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import make_documents, padded, relative_error, worst_gradient
from tiny import KINDS, tiny_config, tiny_model

from ssm_tune.families import family_of
from ssm_tune.mixers import patch_model

EXACT = [kind for kind in KINDS if family_of(tiny_config(kind).model_type).exact]
TOLERANCE = 1e-5
LENGTH = 24  # more than a chunk of 16 tokens


def feed(model: Any, ids: torch.Tensor, sizes: list[int], masks: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of rows fed in pieces of these sizes through one cache; with masks, positions count real tokens."""
    cache, logits, begin = None, [], 0
    with torch.no_grad():
        for size in sizes:
            inputs = {"input_ids": ids[:, begin : begin + size]}
            if masks is not None:
                inputs["attention_mask"] = masks[:, : begin + size]
                inputs["position_ids"] = (masks.cumsum(1) - 1).clamp(min=0)[:, begin : begin + size]
            output = model(**inputs, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
            begin += size
    assert begin == ids.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", EXACT)
def test_pieces_give_the_logits_of_the_whole(kind: str) -> None:
    model = tiny_model(kind)
    ids = torch.randint(6, 260, (2, LENGTH))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    patch_model(model)
    for training in (False, True):
        model.train(training)
        for sizes in ([LENGTH], [1] * LENGTH, [1, 7, 9, 2, 1, 4], [19, 1, 1, 3]):
            assert relative_error(feed(model, ids, sizes), wanted) < TOLERANCE, f"{sizes}, training {training}"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", EXACT)
def test_padded_prompts_are_continued_as_if_unpadded(kind: str, side: str) -> None:
    """Right pads too: the state and the window that go into the cache are those after the last real token."""
    model = tiny_model(kind)
    documents = make_documents((10, 3, 1))
    more = torch.randint(6, 260, (3, 6))
    whole = [torch.cat([document, tail])[None] for document, tail in zip(documents, more, strict=True)]
    with torch.no_grad():
        wanted = torch.cat([model(ids, use_cache=False).logits[:, -6:] for ids in whole])
    layout = padded(documents, side)
    ids = torch.cat([layout.inputs["input_ids"], more], dim=1)
    mask = torch.cat([layout.inputs["attention_mask"], torch.ones_like(more)], dim=1)
    patch_model(model)
    for sizes in ([10], [4, 6], [1] * 10):
        got = feed(model, ids, [*sizes, 4, 1, 1], mask)[:, -6:]
        assert relative_error(got, wanted) < TOLERANCE, sizes


@pytest.mark.parametrize("kind", EXACT)
def test_generating_in_a_left_padded_batch_is_generating_alone(kind: str) -> None:
    model = tiny_model(kind)
    documents = make_documents((11, 3, 1))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = torch.cat([model.generate(document[None], **settings)[:, -5:] for document in documents])
    batch = padded(documents, "left").inputs
    patch_model(model)
    assert torch.equal(model.generate(**batch, **settings)[:, -5:], wanted)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(**batch, **settings, **static)[:, -5:], wanted)
    for size in (1, 4, 100):
        assert torch.equal(model.generate(**batch, **settings, prefill_chunk_size=size)[:, -5:], wanted)


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_a_prompt_is_read_in_pieces_of_the_size_that_is_asked_for(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: read.append(ids[0].shape[1]))
    ids = torch.randint(6, 260, (2, 9))
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None, prefill_chunk_size=4)
    assert read == [4, 4, 1, 1]


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_h1", "zamba"])
def test_beams_take_their_states_along(kind: str) -> None:
    model = tiny_model(kind)
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.randint(6, 260, (2, 9))
    wanted = model.generate(ids, **settings)
    assert torch.equal(patch_model(model).generate(ids, **settings), wanted)


@pytest.mark.parametrize("kind", ["mamba2", "codestral"])
def test_decoding_clamps_step_sizes_as_the_scan_does(kind: str) -> None:
    model = tiny_model(kind, time_step_limit=(0.005, 0.01))
    ids = torch.randint(6, 260, (2, LENGTH))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    got = feed(patch_model(model), ids, [8] + [1] * (LENGTH - 8))
    assert relative_error(got, wanted) < TOLERANCE


@pytest.mark.parametrize("kind", EXACT)
def test_bfloat16_generates(kind: str) -> None:
    """Weights in bf16, SSM parameters in float32: the states are float32, and prefill and steps agree."""
    model = patch_model(tiny_model(kind))
    for name, parameter in model.named_parameters():
        if not family_of(model.config.model_type).is_ssm_parameter(name):
            parameter.data = parameter.data.bfloat16()
    ids = torch.randint(6, 260, (2, 10))
    with torch.no_grad():
        output = model(ids, use_cache=True)
        wanted = model(ids, use_cache=False).logits
    states = [layer.recurrent_states[0] for layer in output.cache.layers if hasattr(layer, "recurrent_states")]
    assert states and all(state.dtype == torch.float32 for state in states if state is not None)
    assert relative_error(feed(model, ids, [5] + [1] * 5), wanted) < 0.05
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 12)


@pytest.mark.parametrize("kind", EXACT)
def test_a_cache_can_be_trained_through(kind: str) -> None:
    """The gradient through a cache continued twice is the gradient of the whole row."""
    model = patch_model(tiny_model(kind))
    ids = torch.randint(6, 260, (1, 24))
    model(ids, use_cache=False).logits[:, 16:].square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache = model(ids[:, :9], use_cache=True).cache
    cache = model(ids[:, 9:16], cache=cache, use_cache=True).cache
    model(ids[:, 16:], cache=cache, use_cache=True).logits.square().sum().backward()
    error, name = worst_gradient({name: p.grad for name, p in model.named_parameters()}, wanted)
    assert error < TOLERANCE, name
