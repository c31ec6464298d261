"""From Examples to token arrays with a loss mask, in batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.chat import Piece, Renderer, adds_bos, exact_template, plain_template
from ssm_tune.data.formatting import Example, Message
from ssm_tune.data.sources import Source
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_BATCH = 2000  # rows a call of the tokenizer: enough for its threads, little memory
_CHECKED = 2000  # rows whose labels are decoded and compared with the text


@dataclass
class Documents:
    """Tokenised documents one after the other: document i is tokens[starts[i]:starts[i + 1]].

    tokens int32 and learned bool, both (tokens,); starts int64 (documents + 1,); rows int64 (documents,): the number
    of the source row, counted in the order read; keys int64 (documents,): equal for rows of equal content;
    groups int32 (documents,): the recipe's entry the row is from.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    keys: NDArray[np.int64]
    groups: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def take(self, indices: NDArray[np.int64]) -> Documents:
        """These documents in this order; an index may come several times."""
        lengths = self.lengths[indices]
        return self.slices(indices, np.zeros(len(indices), np.int64), lengths)

    def slices(self, indices: NDArray[np.int64], begin: NDArray[np.int64], lengths: NDArray[np.int64]) -> Documents:
        """Parts of documents: of document indices[k] the `lengths[k]` tokens from `begin[k]`."""
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Position j of the result comes from the source's start of its part plus its offset in the part.
        source = np.arange(starts[-1]) + np.repeat(self.starts[:-1][indices] + begin - starts[:-1], lengths)
        return Documents(
            self.tokens[source],
            self.learned[source],
            starts,
            self.rows[indices],
            self.keys[indices],
            self.groups[indices],
        )

    def count_learned(self) -> NDArray[np.int64]:
        """Tokens of each document that give a loss; its first token never does, for nothing predicts it."""
        counts = np.concatenate([[0], np.cumsum(self.learned)])
        totals = counts[self.starts[1:]] - counts[self.starts[:-1]]
        first = np.where(self.lengths > 0, self.learned[np.minimum(self.starts[:-1], len(self.learned) - 1)], False)
        return totals - first


@dataclass
class Written:
    """One row as text parts, before tokenising. `bos`: put the tokenizer's own first; `eos`: append it, learned."""

    pieces: list[Piece]
    bos: bool
    eos: bool


@dataclass
class Encoder:
    """Writes Examples as text and tokenises them.

    loss_on_all: the parts ("completion", "assistant") beside which everything else of the row is learned too.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_on_all: frozenset[str] = frozenset()
    kinds: set[str] = field(default_factory=set)
    lossy: int = 0  # of the first rows, how many the tokenizer does not give back as they were
    _checked: int = 0

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise RecipeError("the tokenizer has no eos token: a model could not learn to stop. Use another one.")
        template = self.tokenizer.chat_template
        self.renderer = Renderer(self.tokenizer, template or plain_template(self.tokenizer))
        self.bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []
        self.joins = _prefixes_words(self.tokenizer)

    def encode(self, examples: Iterable[tuple[Source, Example]]) -> Documents:
        """Tokenise all rows. Raises RecipeError naming the row whose conversation the template cannot write."""
        tokens: list[NDArray[np.int32]] = []
        learned: list[NDArray[np.bool_]] = []
        keys: list[int] = []
        groups: list[int] = []
        numbered = iter(examples)
        while batch := list(islice(numbered, _BATCH)):
            ids, masks = self._encode_batch([self._write(source, example) for source, example in batch])
            tokens += ids
            learned += masks
            keys += [example.key() for _, example in batch]
            groups += [source.group for source, _ in batch]
        lengths = [len(row) for row in tokens]
        return Documents(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.concatenate(learned) if learned else np.zeros(0, np.bool_),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.arange(len(tokens), dtype=np.int64),
            np.array(keys, np.int64),
            np.array(groups, np.int32),
        )

    def run_template(self) -> str | None:
        """The chat template that prompts need after training on these rows; None: leave the tokenizer's own."""
        if self.kinds == {"completion"}:
            return exact_template(self.tokenizer)
        if "chat" in self.kinds and not self.tokenizer.chat_template:
            return plain_template(self.tokenizer)
        return None

    def _write(self, source: Source, example: Example) -> Written:
        self.kinds.add(example.kind)
        match example.kind:
            case "text":
                text = example.text.removesuffix(self.tokenizer.eos_token)
                return Written([Piece(text, True)], bos=True, eos=True)
            case "completion":
                said = example.completion.removesuffix(self.tokenizer.eos_token)
                pieces = [Piece(example.prompt, example.part in self.loss_on_all), Piece(said, True)]
                return Written(pieces, bos=True, eos=True)
        try:
            pieces = self.renderer.pieces(self._without_eos(example.messages), example.loss_from)
        except RecipeError as error:
            raise RecipeError(f"{source.place(source.numbers[-1])}: {error}") from error
        if example.part in self.loss_on_all:
            pieces = [Piece(piece.text, True) for piece in pieces]
        return Written(pieces, bos=False, eos=False)

    def _without_eos(self, messages: Sequence[Message]) -> list[Message]:
        """Messages without an eos that the data has at the end of the assistant's texts: the template writes it."""
        return [
            {**message, "content": message["content"].removesuffix(self.tokenizer.eos_token)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]

    def _encode_batch(self, batch: Sequence[Written]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.bool_]]]:
        ids, masks = [], []
        for written, parts in zip(batch, self._tokenise([row.pieces for row in batch]), strict=True):
            flags = [piece.learned for piece in written.pieces]
            if written.bos and self.bos:
                parts, flags = [self.bos, *parts], [all(flags), *flags]
            if written.eos:
                parts, flags = [*parts, [self.tokenizer.eos_token_id]], [*flags, True]
            ids.append(np.concatenate([np.array(part, np.int32) for part in parts]))
            masks.append(np.repeat(flags, [len(part) for part in parts]))
        self._compare(batch, ids, masks)
        return ids, masks

    def _tokenise(self, rows: Sequence[Sequence[Piece]]) -> Iterator[list[list[int]]]:
        """The tokens of each part of each row, parts tokenised on their own."""
        parts = self._ids([piece.text for row in rows for piece in row])
        joined: list[list[int]] = []
        if self.joins:
            # Such a tokenizer would put a space between the parts. So the row's text is tokenised up to each border:
            # what a longer text adds is the next part. Where it changes earlier tokens instead, the part is tokenised
            # behind a line break, which takes the space.
            joined = self._ids([text for row in rows for text in _prefixes(row)])
            line_break = self._ids(["\n"])[0]
            behind = self._ids(["\n" + piece.text for row in rows for piece in row])
        position = 0
        for row in rows:
            here = slice(position, position + len(row))
            position += len(row)
            own = parts[here]
            if joined:
                yield _differences(joined[here]) or [own[0], *_without(line_break, behind[here], own)[1:]]
            else:
                yield own

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _compare(self, batch: Sequence[Written], ids: list[NDArray[np.int32]], masks: list[NDArray[np.bool_]]) -> None:
        """Count rows whose learned tokens do not decode to the learned text (the tokenizer changes it, as NFC does)."""
        rows = range(min(len(batch), _CHECKED - self._checked))
        self._checked += len(rows)
        decoded = self.tokenizer.batch_decode(
            [ids[row][masks[row]].tolist() for row in rows],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        for row, text in zip(rows, decoded, strict=True):
            expected = "".join(piece.text for piece in batch[row].pieces if piece.learned)
            expected += self.tokenizer.eos_token if batch[row].eos else ""
            text = text.removeprefix(self.tokenizer.bos_token or "")
            self.lossy += text.strip() != expected.strip()


def _prefixes_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer reads a text as if a space stood before it, as SentencePiece does."""
    token = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"][0])
    return token[:1] in ("▁", "Ġ")


def _prefixes(row: Sequence[Piece]) -> Iterator[str]:
    text = ""
    for piece in row:
        text += piece.text
        yield text


def _differences(texts: list[list[int]]) -> list[list[int]] | None:
    """What each list adds to the one before; None if one does not begin with the one before it."""
    parts: list[list[int]] = []
    before: list[int] = []
    for ids in texts:
        if ids[: len(before)] != before:
            return None
        parts.append(ids[len(before) :])
        before = ids
    return parts


def _without(prefix: list[int], texts: list[list[int]], otherwise: list[list[int]]) -> list[list[int]]:
    pairs = zip(texts, otherwise, strict=True)
    return [ids[len(prefix) :] if ids[: len(prefix)] == prefix else other for ids, other in pairs]
