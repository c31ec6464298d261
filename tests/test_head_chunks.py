"""The head's chunks of the vocabulary: how wide they are, and that nothing depends on it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import tiny_model
from trl.trainer import utils

from ssm_tune.head_chunks import chunk_width, even_chunks


@pytest.mark.parametrize(
    ("vocabulary", "widest", "width", "count"),
    [(50280, 32768, 25216, 2), (32768, 32768, 32768, 1), (65024, 16384, 16256, 4), (300, 8192, 384, 1)],
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
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", vocabulary - 1)
    ids, found = torch.randint(0, vocabulary, (2, 9)), []
    for context in (nullcontext(), even_chunks(vocabulary)):
        model.zero_grad()
        with context:
            outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
        outputs.log_probs.sum().backward()
        found.append((outputs.log_probs.detach(), outputs.entropy.detach(), model.lm_head.weight.grad.clone()))
    assert widths == [vocabulary - 1, chunk_width(vocabulary, vocabulary - 1)]
    assert widths[1] < vocabulary - 1 == utils._CHUNKED_LOGPROB_CHUNK_SIZE
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
