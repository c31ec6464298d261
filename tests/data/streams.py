"""Rows of streams for tests: written files, plans, and what a stream of them gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer

from ssm_tune.data.blocks import StreamPlan, TextEncoder
from ssm_tune.data.collator import Collator
from ssm_tune.data.documents import DocumentSource
from ssm_tune.data.stream import TokenStream

TOKENIZER = tiny_tokenizer()
LENGTH = 48


def texts(count: int) -> list[str]:
    """Documents that begin with their number, of 3 to 120 characters: some longer than a row."""
    return [f"{number} " + "ab " * (1 + number * 7 % 39) for number in range(count)]


def write_lines(path: Path, documents: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, "meta": {"a": 1}}) + "\n" for text in documents))
    return path


def plan_of(*sources: DocumentSource, **settings: Any) -> StreamPlan:
    weights = settings.pop("weights", [1.0] * len(sources))
    return StreamPlan(list(sources), weights, LENGTH, encoder=TextEncoder(TOKENIZER), **settings)


def take(plan: StreamPlan, batches: int, batch_size: int = 4, **place: Any) -> tuple[torch.Tensor, TokenStream]:
    """The tokens of the first batches, (batches * batch_size, LENGTH), and the stream they are from."""
    stream = TokenStream(plan, batch_size, Collator(TOKENIZER.pad_token_id, LENGTH), **place)
    batch = iter(stream)
    return torch.cat([next(batch)["input_ids"] for _ in range(batches)]), stream


def documents_of(rows: torch.Tensor) -> list[str]:
    """The texts in rows, as far as a document lies in one row."""
    return [
        text
        for row in rows
        for text in TOKENIZER.decode(row[row != TOKENIZER.pad_token_id]).split("<e>")
        if text.strip()
    ]
