"""The tiny models are witnesses: they carry state over the whole row, and the same seed gives the same weights."""

import socket

import pytest
import torch
from tiny import KINDS, MARKED_TEMPLATE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_first_token_moves_the_last(kind: str) -> None:
    model = tiny_model(kind)
    ids = torch.randint(6, 300, (1, 48))
    other = ids.clone()
    other[0, 0] = 299 if ids[0, 0] != 299 else 298
    with torch.no_grad():
        moved = (model(ids).logits - model(other).logits).abs()[0, -1].max()
    assert moved > 1e-3


def test_seed_decides_the_weights() -> None:
    first, second, third = tiny_model("mamba"), tiny_model("mamba"), tiny_model("mamba", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.backbone.embeddings.weight, third.backbone.embeddings.weight)


def test_tokenizer_is_reversible() -> None:
    tokenizer = tiny_tokenizer()
    text = 'Grüße, "x"\n<s>'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 2


def test_marked_template_finds_the_assistant() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    marked = tiny_tokenizer(MARKED_TEMPLATE).apply_chat_template(
        chat, return_assistant_tokens_mask=True, return_dict=True
    )
    plain = tiny_tokenizer().apply_chat_template(chat, return_dict=True)
    assert marked["input_ids"] == plain["input_ids"]
    assert marked["assistant_masks"] == [0, 0, 0, 0, 1, 1, 1]


def test_network_is_blocked() -> None:
    with pytest.raises(RuntimeError, match="without a network"):
        socket.create_connection(("93.184.216.34", 80), timeout=1)
