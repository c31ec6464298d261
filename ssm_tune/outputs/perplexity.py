"""`ssm-tune eval RUN --perplexity FILE|DATASET`: how well a model predicts texts, in all and by position."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ssm_tune.recipe import DataSource, RecipeError
from ssm_tune.run_folder import RunFolder

if TYPE_CHECKING:
    from ssm_tune.data.sources import Source
    from ssm_tune.data.tokens import Documents

LONGEST = 131_072  # tokens of a document that are read as one


def measure_perplexity(
    model: nn.Module,
    tokenizer: Any,
    data: Any,
    *,
    split: str = "train",
    window: int | None = None,
    stride: int | None = None,
    max_length: int = LONGEST,
    limit: int | None = None,
    batch_size: int = 1,
) -> dict[str, Any]:
    """The perplexity of a model on data, and of the tokens at each range of positions.

    What counts is what training would learn: every token of plain text, the answers alone of prompts and
    conversations. So the loss is that of evaluation in training, on the same rows.

    Args:
        data: a file, a folder or a Hub name, as `data.train` in a recipe has them; or rows in memory. A .txt file is
            one document.
        split: of a data set or folder.
        window, stride: how many tokens the model sees at most, and how many of them are predicted anew in each
            window; None: each document from its beginning.
        max_length: tokens; longer documents are cut into parts of this length, each read afresh.
        limit: documents, from the first on.
        batch_size: rows read together.

    Returns:
        See `perplexity_metric.summarise`; window and stride; `data`, what was read; `parts`, the number of documents
        after cutting.

    Raises:
        RecipeError: data that cannot be read; nothing to measure; a setting that cannot be; the evaluate library is
            not installed.
    """
    if importlib.util.find_spec("evaluate") is None:
        raise RecipeError("perplexity needs the evaluate library: pip install 'ssm-tune[eval]'.")
    mistakes = []
    if max_length < 2:
        mistakes.append(f"max_length: {max_length!r} must be 2 tokens or more.")
    if limit is not None and limit < 1:
        mistakes.append(f"limit: {limit!r} must be 1 or more.")
    if mistakes:
        raise RecipeError(mistakes)
    documents = _read(data, split, tokenizer)
    count = len(documents) if limit is None else min(limit, len(documents))
    tokens, labels = [], []
    for ids, learned in _parts(documents, count, max_length):
        tokens.append(ids.tolist())
        labels.append(np.where(learned, ids, -100).tolist())
    from ssm_tune.outputs.perplexity_metric import Perplexity

    with tempfile.TemporaryDirectory() as scratch:  # the library makes a folder of its own, wherever it is told
        metric = Perplexity(config_name="tokens", keep_in_memory=True, cache_dir=scratch)
        found = metric.compute(
            predictions=tokens, references=labels, model=model, window=window, stride=stride, batch_size=batch_size
        )
    name = str(data) if isinstance(data, str | Path) else "rows in memory"
    return {**found, "documents": count, "parts": len(tokens), "data": name}


def _read(data: Any, split: str, tokenizer: Any) -> Documents:
    from ssm_tune.data.sources import read_examples
    from ssm_tune.data.tokens import Encoder

    return Encoder(tokenizer).encode(read_examples(find_texts(data, split), "sft"))


def find_texts(data: Any, split: str = "train") -> list[Source]:
    """Where the texts are, not read yet. Raises RecipeError if they are nowhere."""
    from ssm_tune.data.sources import open_rows, open_sources

    if isinstance(data, str | Path):
        return open_sources([DataSource(path=str(data), split=split)], "perplexity")
    return open_rows(data, "perplexity")


def _parts(documents: Documents, count: int, max_length: int) -> Iterator[tuple[Any, Any]]:
    """Tokens and what counts of them, of each part of each document. A part begins with the last token of the one
    before it, so that every token but a document's first is predicted once.
    """
    for number in range(count):
        begin, end = int(documents.starts[number]), int(documents.starts[number + 1])
        for first in range(begin, max(begin + 1, end - 1), max_length - 1):
            part = slice(first, min(first + max_length, end))
            yield documents.tokens[part].astype(np.int64), documents.learned[part]


def write_perplexity(folder: str | Path, found: Mapping[str, Any]) -> tuple[Path, Path]:
    """perplexity.json and perplexity.png into a folder; returns their paths."""
    run = RunFolder(folder)
    table = run.write_json("perplexity.json", found)
    with run.staging("perplexity") as scratch:
        _draw(found, scratch / "perplexity.png")
    return table, run.path / "perplexity.png"


def _draw(found: Mapping[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    ranges = found["positions"]
    edges = [ranges[0]["from"], *(one["to"] for one in ranges)]
    axes.stairs([one["perplexity"] for one in ranges], [max(1, edge) for edge in edges], baseline=None, linewidth=2)
    axes.axhline(found["perplexity"], linestyle=":", label=f"all tokens: {found['perplexity']:.4g}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("perplexity")
    axes.set_title(f"{found['data']}: {_how(found)}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def format_perplexity(found: Mapping[str, Any]) -> str:
    """A table for a terminal."""
    lines = [f"{'position':>16}  {'tokens':>12}  {'loss':>8}  {'perplexity':>12}"]
    for one in found["positions"]:
        place = f"{one['from']:,} to {one['to'] - 1:,}"
        lines.append(f"{place:>16}  {one['tokens']:>12,}  {one['loss']:>8.4f}  {one['perplexity']:>12.4g}")
    lines.append(f"{'all':>16}  {found['tokens']:>12,}  {found['loss']:>8.4f}  {found['perplexity']:>12.4g}")
    lines.append(f"{found['data']}: {found['documents']:,} documents, {_how(found)}")
    return "\n".join(lines)


def _how(found: Mapping[str, Any]) -> str:
    if found["window"] is None:
        return "each read from its beginning"
    step = found["stride"] if found["stride"] is not None else found["window"] // 2
    return f"windows of {found['window']:,} tokens, moved by {step:,}"
