"""Held-out perplexity of the demo's base model beside a unigram and a trigram model of the same tokens.

    python benchmarks/demo_base.py [RUN or MODEL folder]        (default: the base model that comes with ssm-tune)

All three predict the same tokens: the base model's own, of held-out topics of Python's documentation.
The n-gram models are counted on the training topics of that text; the trigram is interpolated with the bigram, the
unigram and the uniform distribution by Witten-Bell smoothing (Witten and Bell 1991), which has no constant to choose.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict

import torch

from ssm_tune import load_model
from ssm_tune.data import Collator, prepare_data
from ssm_tune.recipe import DataSection, DataSource, TokenizerSection
from ssm_tune.shipped import shipped
from ssm_tune.tokenizer import load_tokenizer

LENGTH = 512


class WittenBell:
    """An n-gram model of token ids, interpolated down to the uniform distribution."""

    def __init__(self, order: int, vocabulary: int) -> None:
        self.order, self.vocabulary = order, vocabulary
        self.counts: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order)]

    def count(self, document: list[int]) -> None:
        for position, token in enumerate(document):
            for size in range(min(self.order, position + 1)):
                self.counts[size][tuple(document[position - size : position])][token] += 1

    def probability(self, history: tuple[int, ...], token: int) -> float:
        probability = 1 / self.vocabulary
        for size in range(self.order):
            if size > len(history):
                break
            seen = self.counts[size].get(history[len(history) - size :])
            if seen:
                total, kinds = seen.total(), len(seen)
                probability = (seen[token] + kinds * probability) / (total + kinds)
        return probability

    def perplexity(self, documents: list[list[int]]) -> float:
        logs = [
            math.log(
                self.probability(tuple(document[max(position - self.order + 1, 0) : position]), document[position])
            )
            for document in documents
            for position in range(1, len(document))
        ]
        return math.exp(-sum(logs) / len(logs))


@torch.no_grad()
def model_perplexity(name: str, rows: list[dict[str, list[int]]], pad: int) -> float:
    model = load_model(name, trainable="none").eval()
    collate, total, count = Collator(pad), 0.0, 0
    for start in range(0, len(rows), 8):
        batch = collate(rows[start : start + 8])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
        total, count = total + loss.item(), count + int((labels != -100).sum())
    return math.exp(total / count)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else str(shipped("recipes", "models/demo-base"))
    tokenizer = load_tokenizer(TokenizerSection(), name)
    section = DataSection(train=[DataSource("python-docs-text")], eval=[DataSource("python-docs-text", split="eval")])
    data = prepare_data(section, tokenizer, task="pretrain", max_length=LENGTH)
    held_out = data.eval.to_list()
    documents = [row["input_ids"] for row in held_out]
    print(
        f"{len(documents)} pieces of at most {LENGTH} tokens, {sum(map(len, documents)):,} tokens, of topics held out\n"
    )
    print("| model | perplexity per token |\n| --- | --- |")
    for order, title in ((1, "unigram"), (3, "trigram, Witten-Bell")):
        ngram = WittenBell(order, len(tokenizer))
        for row in data.train.to_list():
            ngram.count(row["input_ids"])
        print(f"| {title} | {ngram.perplexity(documents):.1f} |")
    print(f"| demo-base | {model_perplexity(name, held_out, tokenizer.pad_token_id):.1f} |")


if __name__ == "__main__":
    main()
