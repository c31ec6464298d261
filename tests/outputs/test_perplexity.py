"""Losses of tokens: in pieces, in windows, in batches, against a reading of everything at once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EOS, tiny_model, tiny_tokenizer

from ssm_tune.mixers import patch_model
from ssm_tune.outputs import token_losses
from ssm_tune.outputs.perplexity import format_perplexity, measure_perplexity, write_perplexity
from ssm_tune.outputs.perplexity_metric import Perplexity, summarise
from ssm_tune.outputs.token_losses import measure_tokens
from ssm_tune.recipe import RecipeError


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def model(request: pytest.FixtureRequest) -> Any:
    return patch_model(tiny_model(request.param))


def documents(*lengths: int) -> list[np.ndarray]:
    chosen = np.random.default_rng(0)
    return [chosen.integers(6, 260, length) for length in lengths]


@torch.no_grad()
def at_once(model: Any, document: np.ndarray) -> np.ndarray:
    """The losses by one plain forward pass."""
    ids = torch.from_numpy(document)[None]
    values = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return -values.gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pieces_give_what_one_reading_gives(model: Any, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_losses, "_LOGITS", 48)  # pieces of 48 and of 16 tokens
    rows = documents(100, 2, 37, 49, 48, 150)
    for got, row in zip(measure_tokens(model, rows, batch_size=batch_size), rows, strict=True):
        assert np.allclose(got, at_once(model, row), atol=2e-5)


def test_never_more_logits_than_allowed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(token_losses, "_LOGITS", 64)
    hook = model.register_forward_hook(lambda *call: sizes.append(call[-1].logits.shape[:2].numel()))
    measure_tokens(model, documents(500, 400), batch_size=2)
    hook.remove()
    assert max(sizes) == 64


@pytest.mark.parametrize(("window", "stride"), [(20, 5), (20, 19), (20, None), (64, 1), (200, 7)])
def test_windows_show_the_model_their_own_tokens_alone(model: Any, window: int, stride: int | None) -> None:
    (row,) = documents(90)
    (got,) = measure_tokens(model, [row], window=window, stride=stride, batch_size=4)
    step = stride or window // 2
    for token in range(1, 90):
        end = min(90, window + step * max(0, -(-(token + 1 - window) // step)))
        begin = max(0, end - window)
        assert token - begin >= min(token, window - step)
        wanted = at_once(model, row[begin:end])[token - begin - 1]
        assert got[token - 1] == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("kind", ["jamba", "zamba2"])
def test_hybrids_in_batches(kind: str) -> None:
    model = patch_model(tiny_model(kind))
    rows = documents(40, 7, 31)
    for got, row in zip(measure_tokens(model, rows, batch_size=3), rows, strict=True):
        assert np.allclose(got, at_once(model, row), atol=2e-4)


def test_the_model_stays_as_it_was(model: Any) -> None:
    model.train()
    measure_tokens(model, documents(5))
    assert model.training
    model.eval()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 1}, "window"),
        ({"stride": 5}, "set window"),
        ({"window": 8, "stride": 8}, "stride"),
        ({"window": 8, "stride": 0}, "stride"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_windows_that_cannot_be(model: Any, settings: dict[str, int], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        measure_tokens(model, documents(5), **settings)


def test_figures_by_position() -> None:
    losses = [np.full(299, 2.0, np.float32), np.concatenate([np.full(127, 1.0), np.full(10, 5.0)]).astype(np.float32)]
    found = summarise(losses, [np.ones(299, bool), np.ones(137, bool)])
    assert [(one["from"], one["to"], one["tokens"]) for one in found["positions"]] == [
        (0, 128, 254),
        (128, 256, 138),
        (256, 512, 44),
    ]
    assert found["positions"][0]["loss"] == pytest.approx(1.5)
    assert found["positions"][1]["loss"] == pytest.approx((128 * 2 + 10 * 5) / 138)
    assert found["tokens"] == 436
    assert found["perplexity"] == pytest.approx(math.exp((299 * 2 + 127 + 50) / 436))


def test_the_metric_reads_texts_as_training_writes_them(model: Any, tmp_path: Path) -> None:
    texts = ["The first text.", "Another, a longer one."]
    metric = Perplexity(cache_dir=str(tmp_path), keep_in_memory=True)
    found = metric.compute(predictions=texts, model=model, tokenizer=tiny_tokenizer())
    rows = [np.array([*tiny_tokenizer()(text)["input_ids"], EOS]) for text in texts]
    wanted = np.concatenate([at_once(model, row) for row in rows])
    assert found["loss"] == pytest.approx(wanted.mean(), abs=1e-5)
    again = measure_perplexity(model, tiny_tokenizer(), [{"text": text} for text in texts])
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-6)
    assert again["tokens"] == found["tokens"] == len(wanted)


def test_of_conversations_the_answers_count(model: Any) -> None:
    rows = [{"question": "How far?", "answer": "Far."}, {"question": "And when?", "answer": "Now and then."}]
    found = measure_perplexity(model, tiny_tokenizer(), rows)
    assert found["tokens"] == len("Far.") + len("Now and then.") + 2  # with eos
    text = "<|u|>How far?<|a|>Far.<e>"
    ids = np.array(tiny_tokenizer()(text)["input_ids"])
    alone = measure_perplexity(model, tiny_tokenizer(), rows, limit=1)
    assert alone["loss"] == pytest.approx(at_once(model, ids)[-5:].mean(), abs=1e-5)


def test_a_text_file_is_one_document_and_a_long_one_is_cut(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefghi" * 30)
    found = measure_perplexity(model, tiny_tokenizer(), file)
    assert (found["documents"], found["parts"], found["tokens"]) == (1, 1, 270)
    cut = measure_perplexity(model, tiny_tokenizer(), file, max_length=100)
    assert (cut["documents"], cut["parts"], cut["tokens"]) == (1, 3, 270)
    ids = np.array([*tiny_tokenizer()("abcdefghi" * 30)["input_ids"], EOS])
    parts = [at_once(model, ids[begin : begin + 100]) for begin in (0, 99, 198)]
    assert cut["loss"] == pytest.approx(np.concatenate(parts).mean(), abs=1e-5)


def test_table_and_picture(model: Any, tmp_path: Path) -> None:
    found = measure_perplexity(model, tiny_tokenizer(), [{"text": "word " * 80}], window=64)
    table, picture = write_perplexity(tmp_path, found)
    assert json.loads(table.read_text()) == json.loads(json.dumps(found))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"perplexity.json", "perplexity.png"}
    text = format_perplexity(found)
    assert "128 to 255" in text and "windows of 64 tokens, moved by 32" in text


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        ("nothing.txt", {}, "nothing.txt"),
        ([{"other": "a"}], {}, "row 0"),
        ([{"text": ""}], {}, "empty"),
        ([{"text": "a\ud800"}], {}, "surrogate"),
        ([{"text": "abc"}], {"max_length": 1}, "max_length"),
        ([{"text": "abc"}], {"limit": 0}, "limit"),
        ([{"text": "abc"}], {"window": 1}, "window"),
    ],
)
def test_what_cannot_be_measured(model: Any, data: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        measure_perplexity(model, tiny_tokenizer(), data, **settings)


@pytest.mark.slow
def test_128k_tokens(model: Any) -> None:
    """By position up to 131,071, in memory for one piece's logits."""
    found = measure_perplexity(model, tiny_tokenizer(), [{"text": "0123456789abcdef" * 8192}])
    assert found["positions"][-1]["to"] == 131_072
    assert found["tokens"] == 131_072
