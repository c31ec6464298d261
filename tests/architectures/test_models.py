"""What every model of our own does: documents, padding, caches, saving, generation and checkpointing change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_equal_up_to_rounding
from tiny_models import CONFIGS, IDS, make_config, make_model
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

KINDS = tuple(CONFIGS)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = (5, 1, 7)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [torch.randint(3, IDS["vocab_size"], (1, length)) for length in lengths]


def pack(texts: list[Tensor]) -> dict[str, Tensor]:
    """One row with two tokens of padding at its end, as the trainer gives it."""
    ids = torch.cat([*texts, torch.zeros(1, 2, dtype=torch.long)], dim=1)
    numbers = [torch.full((1, text.shape[1]), n) for n, text in enumerate(texts)]
    seq_idx = torch.cat([*numbers, torch.full((1, 2), -1)], dim=1).int()
    positions = torch.cat([torch.arange(text.shape[1]) for text in [*texts, torch.zeros(1, 2)]])[None]
    return {"input_ids": ids, "seq_idx": seq_idx, "position_ids": positions}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_each_alone(kind: str, training: bool) -> None:
    model = make_model(kind).train(training)
    texts = documents()
    batch = pack(texts)
    packed = model(**batch, use_cache=False).logits[0]
    expected = torch.cat([model(text, use_cache=False).logits[0] for text in texts])
    torch.testing.assert_close(packed[: len(expected)], expected, **CLOSE)
    for borders in ("seq_idx", "position_ids"):  # one of them is enough
        logits = model(batch["input_ids"], **{borders: batch[borders]}, use_cache=False).logits[0]
        torch.testing.assert_close(logits[: len(expected)], expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_a_packed_row_are_those_of_its_documents(kind: str) -> None:
    model = make_model(kind).train()
    texts = documents()
    batch = pack(texts)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    counts = [text.shape[1] - 1 for text in texts]
    losses = [model(text, labels=text, use_cache=False).loss * n for text, n in zip(texts, counts, strict=True) if n]
    expected = sum(losses) / sum(counts)
    packed = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    torch.testing.assert_close(packed, expected, **CLOSE)
    wanted, got = gradients(expected), gradients(packed)
    for name in wanted:
        assert wanted[name].any(), name
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_recomputes_the_same(kind: str) -> None:
    model = make_model(kind).train()
    batch = pack(documents())

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for got, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str, side: str) -> None:
    model = make_model(kind)
    text = documents((6,))[0]
    widths = (3, 0) if side == "left" else (0, 3)
    padded = torch.nn.functional.pad(text, widths)
    mask = torch.nn.functional.pad(torch.ones_like(text), widths)
    got = model(padded, attention_mask=mask, use_cache=False).logits[mask == 1]
    torch.testing.assert_close(got, model(text, use_cache=False).logits[0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_stand_anywhere(kind: str) -> None:
    """Within documents and between them, whichever way the borders come, and with no word about caches."""
    model = make_model(kind)
    texts = documents((9, 6, 12))
    index = torch.tensor([[0] * 4 + [-1] * 3 + [0] * 5 + [-1] * 2 + [1] * 6 + [2] * 12])
    ids = torch.zeros_like(index)
    ids[index >= 0] = torch.cat(texts, dim=1)[0]
    positions = torch.tensor([[*range(4), 0, 0, 0, *range(4, 9), 0, 0, *range(6), *range(12)]])
    mask = (index >= 0).long()
    for borders in ({"seq_idx": index}, {"position_ids": positions, "attention_mask": mask}):
        logits = model(ids, **borders).logits
        for number, text in enumerate(texts):
            torch.testing.assert_close(logits[index == number], model(text).logits[0], **CLOSE)
    logits = model(ids[:, :12], attention_mask=mask[:, :12]).logits
    torch.testing.assert_close(logits[index[:, :12] == 0], model(texts[0]).logits[0], **CLOSE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if make_config(kind).has_attention])
def test_packed_rows_that_attention_would_leak_in_are_refused(kind: str) -> None:
    model = make_model(kind)
    batch = pack(documents())
    assert model(**batch).cache is None
    with pytest.raises(ValueError, match="cannot be cached"):
        model(**batch, use_cache=True)
    with pytest.raises(ValueError, match="documents by seq_idx"):
        model(batch["input_ids"], attention_mask=torch.ones(1, 1, 15, 15, dtype=torch.bool).tril())
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        model(**batch, use_cache=False)


@pytest.mark.parametrize("sizes", [(13,), (6, 7), (7, *[1] * 6), (1,) * 13])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_a_cache_in_pieces_equals_the_row(kind: str, sizes: tuple[int, ...]) -> None:
    model = make_model(kind)
    text = torch.cat(documents((13,)), dim=1)
    expected = model(text, use_cache=False).logits
    cache, pieces = None, []
    for piece in text.split(list(sizes), dim=1):
        output = model(piece, cache=cache, use_cache=True)
        cache = output.cache
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("name", ["past_key_values", "cache_params"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_may_be_called_as_it_was(kind: str, name: str) -> None:
    """Passed over in silence, it would leave every token to be decoded from nothing."""
    model = make_model(kind)
    text = torch.cat(documents((13,)), dim=1)
    cache = model(text[:, :12], use_cache=True).cache
    with pytest.warns(FutureWarning, match=f"`{name}` is deprecated"):
        last = model(text[:, 12:], **{name: cache}).logits
    torch.testing.assert_close(last[:, 0], model(text, use_cache=False).logits[:, 12], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_and_in_a_padded_batch_equals_generation_alone(kind: str) -> None:
    model = make_model(kind)
    texts = documents((3, 7))
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    padded = torch.cat([torch.nn.functional.pad(text, (7 - text.shape[1], 0)) for text in texts])
    mask = (torch.arange(7) >= torch.tensor([[4], [0]])).long()
    together = model.generate(padded, attention_mask=mask, **settings)[:, 7:]
    assert torch.equal(model.generate(padded, attention_mask=mask, prefill_chunk_size=3, **settings)[:, 7:], together)
    for row, text in enumerate(texts):
        alone = model.generate(text, attention_mask=torch.ones_like(text), **settings)[:, text.shape[1] :]
        slow = model.generate(text, attention_mask=torch.ones_like(text), use_cache=False, **settings)
        assert torch.equal(alone, slow[:, text.shape[1] :])
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_equal_to_the_bit(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    text = documents((6,))[0]
    assert_equal_up_to_rounding(loaded.eval()(text).logits, model(text).logits)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone.eval()(text).last_hidden_state, model.backbone(text).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(kind: str) -> None:
    model = make_model(kind)
    text = documents((12,))[0]
    expected = model(text, use_cache=False).logits.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.train()(text, labels=text, use_cache=False)
    output.loss.backward()
    mixed = output.logits.detach()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    low = make_model(kind).to(torch.bfloat16)(text, use_cache=False).logits
    scale = expected.abs().max()
    assert mixed.dtype == low.dtype == torch.float32
    assert (mixed - expected).abs().max() / scale < 0.05
    assert (low - expected).abs().max() / scale < 0.1
