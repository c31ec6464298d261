"""The head's chunks of the vocabulary: how wide they are, and that nothing depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model
from trl.trainer import utils

from ssm_tune import head_chunks
from ssm_tune.head_chunks import chunk_width, narrow_chunks


@pytest.mark.parametrize(
    ("vocabulary", "widest", "width", "count"),
    [(50280, 8192, 7296, 7), (32768, 8192, 8192, 4), (65024, 16384, 16256, 4), (300, 8192, 384, 1)],
)
def test_chunks_are_alike(vocabulary: int, widest: int, width: int, count: int) -> None:
    assert chunk_width(vocabulary, widest) == width
    assert -(-vocabulary // width) == count


def test_the_head_takes_them_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba").train()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    vocabulary, function, widths = model.config.vocab_size, utils._ChunkedLogProbFunction, []
    assert vocabulary > 128

    class Watched:
        @staticmethod
        def apply(*given: Any) -> Any:
            widths.append(given[5])
            return function.apply(*given)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Watched)
    ids, found = torch.randint(0, vocabulary, (2, 9)), []
    for widest in (32768, 128):
        monkeypatch.setattr(head_chunks, "WIDEST", widest)
        model.zero_grad()
        with narrow_chunks(vocabulary):
            outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
        outputs.log_probs.sum().backward()
        found.append((outputs.log_probs.detach(), outputs.entropy.detach(), model.lm_head.weight.grad.clone()))
    assert widths == [32768, 128]
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32768
    for wide, narrow in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide)
