"""The loss of every token of documents of any length, in memory that does not grow with it.

A document is read in pieces, and the state is carried from one to the next, so that each token is predicted from all
tokens before it (or from the last ones alone, where windows are asked for) while the logits of one piece exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from ssm_tune.families import family_of
from ssm_tune.outputs.generate import compute_scope, evaluating
from ssm_tune.recipe import RecipeError

_LOGITS = 1024  # rows of the vocabulary's size that exist at once
_WHOLE_LOGITS = 16_384  # and where a row cannot be read in pieces


def measure_tokens(
    model: nn.Module,
    documents: Sequence[NDArray[np.int64]],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
) -> list[NDArray[np.float32]]:
    """For each document of n tokens the losses, in nats, of its tokens 1 to n - 1.

    Args:
        model: patched, in any mode; it stays in it.
        documents: token numbers, one array each, of at least two tokens.
        window: tokens that the model sees at most, those that it predicts among them; None: all from the beginning.
        stride: tokens of a window that are predicted anew; None: half the window. Each token but the first ones is
            predicted from window - stride tokens or more.
        batch_size: rows read together; their losses are the same whatever it is.

    Raises:
        RecipeError: a window or stride that cannot be; a family whose states cannot be carried, with documents (or a
            window) too long for one reading.
    """
    step = _check(window, stride, batch_size)
    spans = [
        (number, begin, end, fresh)
        for number, document in enumerate(documents)
        for begin, end, fresh in _windows(len(document), window, step)
    ]
    spans.sort(key=lambda span: span[1] - span[2])  # rows of a batch have about the same length, long ones come first
    losses = [np.full(len(document) - 1, np.nan, np.float32) for document in documents]
    with evaluating(model), compute_scope(model), torch.no_grad():
        for first in range(0, len(spans), batch_size):
            batch = spans[first : first + batch_size]
            rows = [documents[number][begin:end] for number, begin, end, _ in batch]
            for (number, begin, end, fresh), row in zip(batch, _measure_rows(model, rows), strict=True):
                # row[k] is the loss of token begin + k + 1; those before `fresh` were predicted by an earlier window
                losses[number][fresh - 1 : end - 1] = row[fresh - begin - 1 :]
    return losses


def _check(window: int | None, stride: int | None, batch_size: int) -> int:
    mistakes = []
    if window is not None and window < 2:
        mistakes.append(f"window: {window!r} must be 2 tokens or more.")
    if window is None and stride is not None:
        mistakes.append("stride: only windows have one; set window as well.")
    if stride is not None and (stride < 1 or (window is not None and stride >= max(2, window))):
        mistakes.append(f"stride: {stride!r} must be from 1 to less than the window.")
    if batch_size < 1:
        mistakes.append(f"batch_size: {batch_size!r} must be 1 or more.")
    if mistakes:
        raise RecipeError(mistakes)
    return stride if stride is not None else max(1, (window or 2) // 2)


def _windows(length: int, window: int | None, stride: int) -> list[tuple[int, int, int]]:
    """Begin and end of each window of a document, and the first token that it is the first to predict."""
    if window is None or length <= window:
        return [(0, length, 1)]
    ends = [*range(window, length, stride), length]
    return [(max(0, end - window), end, 1 if place == 0 else ends[place - 1]) for place, end in enumerate(ends)]


def _measure_rows(model: nn.Module, rows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """The losses of a batch of rows, each of its tokens from the second on."""
    longest = max(map(len, rows))
    in_pieces = family_of(model.config.model_type).exact
    if not in_pieces and longest * len(rows) > _WHOLE_LOGITS:
        raise RecipeError(
            f"perplexity: {model.config.model_type} must read a row at once (its state cannot be carried over by "
            f"transformers' own mixers), and {longest} tokens are too many for that. Set window to "
            f"{_WHOLE_LOGITS // len(rows)} or less."
        )
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.from_numpy(np.asarray(row, np.int64))
        mask[place, : len(row)] = 1
    ids, mask = ids.to(device), mask.to(device)
    ragged = any(len(row) < longest for row in rows)
    size = max(1, _LOGITS // len(rows)) if in_pieces else longest
    cache: Any = None
    losses = []
    for begin in range(0, longest - 1, size):
        end = min(begin + size, longest - 1)  # the last token predicts nothing
        output = model(
            input_ids=ids[:, begin:end],
            attention_mask=mask[:, :end] if ragged else None,
            cache=cache,
            use_cache=in_pieces and end < longest - 1,
        )
        cache = output.cache if in_pieces and end < longest - 1 else None
        targets = ids[:, begin + 1 : end + 1]
        losses.append(F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten(), reduction="none"))
        losses[-1] = losses[-1].view(len(rows), -1).cpu()
    measured = torch.cat(losses, dim=1).numpy()
    return [measured[place, : len(row) - 1] for place, row in enumerate(rows)]
