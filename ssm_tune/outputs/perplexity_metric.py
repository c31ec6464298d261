"""Perplexity as a metric of the `evaluate` library. The library's own is code that it fetches from a hub."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray

from ssm_tune.outputs.token_losses import measure_tokens
from ssm_tune.recipe import RecipeError

_NO_LOSS = -100
_FIRST_EDGE = 128  # the first range of positions ends here, and each later one is twice as long


class Perplexity(evaluate.Metric):
    """exp of the mean loss of tokens, in all and by their position in their document.

    Configuration "default" takes `predictions`, a list of texts; each is tokenised as a training document is, eos at
    its end. Configuration "tokens" takes documents that are tokens already: `predictions`, and `references`, the same
    with -100 where a token does not count. compute() also takes model and tokenizer ("default" alone needs one), and
    window, stride and batch_size as `measure_tokens` does.

    Example: Perplexity(cache_dir=folder).compute(predictions=texts, model=model, tokenizer=tokenizer)
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name == "tokens":
            tokens = datasets.Sequence(datasets.Value("int64"))
            features = {"predictions": tokens, "references": tokens}
        else:
            features = {"predictions": datasets.Value("string")}
        return evaluate.MetricInfo(
            description="exp of the mean negative log-likelihood of tokens, by their position in their document",
            citation="",
            inputs_description="texts (configuration default), or tokens and labels (configuration tokens)",
            features=datasets.Features(features),
        )

    def _compute(  # type: ignore[override]
        self,
        predictions: Sequence[Any],
        references: Sequence[Sequence[int]] | None = None,
        *,
        model: Any,
        tokenizer: Any = None,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 1,
    ) -> dict[str, Any]:
        """See the class. Raises RecipeError: nothing to measure, an impossible window."""
        if references is None:
            documents = [_as_training_writes(tokenizer, text) for text in predictions]
            learned = [np.ones(len(document), bool) for document in documents]
        else:
            documents = [np.asarray(document, np.int64) for document in predictions]
            learned = [np.asarray(labels, np.int64) != _NO_LOSS for labels in references]
        pairs = [(d, mask) for d, mask in zip(documents, learned, strict=True) if mask[1:].any()]
        if not pairs:
            raise RecipeError("perplexity: there is nothing to measure: no document has two tokens or more.")
        losses = measure_tokens(model, [d for d, _ in pairs], window=window, stride=stride, batch_size=batch_size)
        found = summarise(losses, [mask[1:] for _, mask in pairs])
        return {**found, "window": window, "stride": stride}


def _as_training_writes(tokenizer: Any, text: str) -> NDArray[np.int64]:
    from ssm_tune.data.chat import prompt_ids

    ids = prompt_ids(tokenizer, text.removesuffix(tokenizer.eos_token or ""), chat=False)
    return np.asarray([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])], np.int64)


def summarise(losses: Sequence[NDArray[np.float32]], counted: Sequence[NDArray[np.bool_]]) -> dict[str, Any]:
    """The figures of documents: losses (n - 1,) of their tokens from the second on, and which of those count.

    perplexity, loss (nats a token), tokens, documents; `positions`, for ranges of positions in the document ("from"
    the first to the one before "to", the first token has position 0): the same figures of the tokens there.
    """
    positions = np.concatenate([np.arange(1, len(row) + 1)[mask] for row, mask in zip(losses, counted, strict=True)])
    values = np.concatenate([row[mask] for row, mask in zip(losses, counted, strict=True)]).astype(np.float64)
    ranges, begin, end = [], 0, _FIRST_EDGE
    while begin <= positions.max():
        here = values[(positions >= begin) & (positions < end)]
        if len(here):
            ranges.append({"from": begin, "to": end, **_figures(here)})
        begin, end = end, 2 * end
    return {**_figures(values), "documents": len(losses), "positions": ranges}


def _figures(values: NDArray[np.float64]) -> dict[str, Any]:
    loss = float(values.mean())
    # A loss above 700 nats a token is beyond what a float holds as a perplexity.
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss, "tokens": len(values)}
