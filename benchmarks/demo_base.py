"""Held-out perplexity of the demo's base model beside unigram and trigram models of the same tokens.

    python benchmarks/demo_base.py [RUN or MODEL folder]        (default: the base model that comes with ssm-tune)
    python benchmarks/demo_base.py --tokens FOLDER              (what `ssm-tune prepare demo-base` wrote: seconds)

All predict the same tokens: the base model's own, of held-out topics of Python's documentation, in the pieces that
the base was evaluated on. The n-gram models are counted on Python's documentation alone, and on all text that the base
has read; the trigram is interpolated with the bigram, the unigram and the uniform distribution by Witten-Bell
smoothing (Witten and Bell 1991), which has no constant to choose. Without --tokens all text is read and tokenised
first, which takes minutes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ssm_tune import load_model, load_recipe
from ssm_tune.data import Collator, prepare_data
from ssm_tune.data.rows import split_documents
from ssm_tune.data.token_shards import TokenShards
from ssm_tune.data.tokens import Documents
from ssm_tune.recipe import DataSection, DataSource, TokenizerSection
from ssm_tune.shipped import shipped
from ssm_tune.tokenizer import load_tokenizer

LENGTH = 512
Text = list[NDArray[np.int32]]


class WittenBell:
    """An n-gram model of token ids, interpolated down to the uniform distribution."""

    def __init__(self, order: int, vocabulary: int, documents: Text) -> None:
        if vocabulary**order >= 2**63:
            raise ValueError(f"{order}-grams of {vocabulary} tokens do not fit in 64 bits")
        self.order, self.vocabulary = order, vocabulary
        self.tables = [self._count(size, documents) for size in range(order)]

    def _grams(self, size: int, documents: Text) -> Iterator[NDArray[np.int64]]:
        """For each document the (size + 1)-grams that end at its tokens, as numbers; the first `size` have none."""
        for document in documents:
            tokens = document.astype(np.int64)
            numbers = np.zeros(max(len(tokens) - size, 0), np.int64)
            for place in range(size + 1):
                numbers = numbers * self.vocabulary + tokens[place : place + len(numbers)]
            yield numbers

    def _count(self, size: int, documents: Text) -> tuple[NDArray[np.int64], ...]:
        """The n-grams seen and how often; their histories, how often those came and with how many different tokens."""
        grams, counts = np.unique(np.concatenate(list(self._grams(size, documents))), return_counts=True)
        histories, first = np.unique(grams // self.vocabulary, return_index=True)
        kinds = np.diff(np.append(first, len(grams)))
        return grams, counts, histories, np.add.reduceat(counts, first), kinds

    def perplexity(self, documents: Text) -> float:
        """Of all tokens but each document's first."""
        levels = [list(self._grams(size, documents)) for size in range(self.order)]
        total, number = 0.0, 0
        for place, document in enumerate(documents):
            probability = np.full(len(document), 1 / self.vocabulary)
            for size, (grams, counts, histories, totals, kinds) in enumerate(self.tables):
                wanted = levels[size][place]
                history = wanted // self.vocabulary
                at, known = _find(histories, history)
                gram, seen = _find(grams, wanted)
                count = np.where(seen, counts[gram], 0)
                shorter = probability[size:]
                longer = (count + kinds[at] * shorter) / (totals[at] + kinds[at])
                probability[size:] = np.where(known, longer, shorter)
            total -= float(np.log(probability[1:]).sum())
            number += len(document) - 1
        return math.exp(total / number)


def _find(values: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return at, values[at] == wanted


@torch.no_grad()
def model_perplexity(name: str, documents: Text, pad: int) -> float:
    model = load_model(name, trainable="none").eval()
    collate, total, count = Collator(pad), 0.0, 0
    rows = [
        {"input_ids": ids, "labels": ids, "seq_lengths": [len(ids)], "rows": [0]}
        for ids in (document.tolist() for document in documents)
    ]
    for start in range(0, len(rows), 8):
        batch = collate(rows[start : start + 8])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
        total, count = total + loss.item(), count + int((labels != -100).sum())
    return math.exp(total / count)


def read_prepared(folder: Path) -> tuple[list[Text], Text]:
    """The documents of each source, and those held out in pieces, of a folder that `ssm-tune prepare` wrote."""
    shards = TokenShards(folder)
    entries = sorted({part.entry for part in shards.parts if part.split == "train"})
    sources = [shards.source(entry, f"source {entry}") for entry in entries]
    held = shards.held_out(2**40)
    starts = np.cumsum([0, *map(len, held)])
    zeros = np.zeros(len(held), np.int64)
    tokens = np.concatenate(held)
    documents = Documents(tokens, np.ones(len(tokens), np.bool_), starts, zeros, zeros, zeros.astype(np.int32))
    return [[source.document(number) for number in range(len(source))] for source in sources], _pieces(documents)


def _pieces(documents: Documents) -> Text:
    pieces = split_documents(documents, LENGTH)
    return np.split(pieces.tokens, pieces.starts[1:-1])


def read_text(name: str) -> tuple[list[Text], Text]:
    """The same, by reading and tokenising everything."""
    tokenizer = load_tokenizer(TokenizerSection(), name)
    recipe = load_recipe(str(shipped("recipes", "demo-base.yaml")))
    sources = []
    for entry in recipe.data.train:
        section = DataSection(train=[DataSource(entry.path)])
        rows = prepare_data(section, tokenizer, task="pretrain", max_length=None).train
        sources.append([np.array(ids, np.int32) for ids in rows["input_ids"]])
    section = DataSection(train=recipe.data.train[:1], eval=recipe.data.eval)
    held = prepare_data(section, tokenizer, task="pretrain", max_length=LENGTH).eval
    assert held is not None
    return sources, [np.array(ids, np.int32) for ids in held["input_ids"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="held-out perplexity of the demo's base model beside n-grams")
    parser.add_argument("model", nargs="?", default=str(shipped("recipes", "models/demo-base")))
    parser.add_argument("--tokens", type=Path, help="the folder that ssm-tune prepare wrote for recipes/demo-base.yaml")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(TokenizerSection(), arguments.model)
    sources, held = read_prepared(arguments.tokens) if arguments.tokens else read_text(arguments.model)
    everything = [document for source in sources for document in source]
    print(f"{len(held)} pieces of at most {LENGTH} tokens, {sum(map(len, held)):,} tokens, of topics held out\n")
    print("| model | counted on, tokens | perplexity per token |\n| --- | --- | --- |")
    for order, title in ((1, "unigram"), (3, "trigram, Witten-Bell")):
        for what, text in (("Python's documentation", sources[0]), ("all that the base has read", everything)):
            perplexity = WittenBell(order, len(tokenizer), text).perplexity(held)
            print(f"| {title} | {what}, {sum(map(len, text)):,} | {perplexity:.1f} |")
    print(f"| demo-base | | {model_perplexity(arguments.model, held, tokenizer.pad_token_id):.1f} |")


if __name__ == "__main__":
    main()
