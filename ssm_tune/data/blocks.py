"""Blocks of packed rows: what one virtual shard of a stream makes of its documents, one block after the other.

A block is some hundred documents, drawn from the mixture, put in a random order and packed into rows. It is a function
of its state, which is plain data taken at its beginning: the readers' positions, how often each source was drawn, and
what the block before could not fill a row with. So a checkpoint holds the state of the block that is under way and how
many of its rows are used up; going on means to make that one block again. (The shuffle buffer of `datasets` is lost.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.chat import adds_bos
from ssm_tune.data.documents import VIRTUAL_SHARDS, Document, DocumentSource
from ssm_tune.data.packing import pack
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DRAWN = 64  # documents tokenised together
_BLOCK_TOKENS = 2**18
_BLOCK_ROWS = 8  # at least, where rows are long
_FIRST = 3  # the first block is 2**3 times smaller, the next one 2**2 times ...
_FULL = 0.97  # a row filled less waits for the next block, if it is the emptiest of its block


def is_held_out(text: str, fraction: float | None) -> bool:
    """Whether a document of a stream is for evaluation: by its content, so that equal documents go the same way."""
    if not fraction:
        return False
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


@dataclass
class TextEncoder:
    """Texts to token ids, many at once: bos if the tokenizer puts it first, eos at the end of a document."""

    tokenizer: PreTrainedTokenizerBase
    bos: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []

    def encode(self, documents: Sequence[Document]) -> list[NDArray[np.int32]]:
        """One array a document, int32."""
        eos, mark = [self.tokenizer.eos_token_id], self.tokenizer.eos_token
        texts = [document.text.removesuffix(mark) if document.last else document.text for document in documents]
        return [
            np.array((self.bos if document.first else []) + ids + (eos if document.last else []), np.int32)
            for document, ids in zip(documents, self._ids(texts), strict=True)
        ]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # without offsets and masks, which nobody asks for here
            return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


@dataclass
class StreamPlan:
    """All that the order of a stream depends on, beside the data itself. Can be sent to worker processes."""

    sources: list[DocumentSource]
    weights: list[float]
    max_length: int
    seed: int = 0
    isolate: bool = True
    too_long: str = "cut"
    held_out: float | None = None
    encoder: TextEncoder | None = None
    shards: int = VIRTUAL_SHARDS

    @property
    def block_tokens(self) -> int:
        return max(_BLOCK_TOKENS, _BLOCK_ROWS * self.max_length)

    def mixture(self, shard: int, state: dict[str, Any] | None = None) -> Mixture:
        return Mixture(self, shard, state)


class Mixture:
    """Documents of all sources in the shares that the weights say: always from the source that is furthest behind."""

    def __init__(self, plan: StreamPlan, shard: int, state: dict[str, Any] | None = None) -> None:
        self.plan = plan
        self.readers = [source.reader(shard, plan.shards) for source in plan.sources]
        total = sum(plan.weights)
        self.shares = [weight / total for weight in plan.weights]
        self.drawn = [0] * len(self.readers)
        if state is not None:
            self.drawn = list(state["drawn"])
            for reader, position in zip(self.readers, state["positions"], strict=True):
                reader.restore(position)

    def state(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "positions": [reader.position() for reader in self.readers]}

    def draw(self) -> Document:
        """The next document that is not held out. Raises RecipeError for a bad row, or a source without any."""
        behind = [share * (sum(self.drawn) + 1) - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        chosen = max(range(len(behind)), key=behind.__getitem__)
        self.drawn[chosen] += 1
        first = self.readers[chosen].epoch
        while True:
            document = self.readers[chosen].read()
            if not is_held_out(document.text, self.plan.held_out):
                return document
            if self.readers[chosen].epoch > first + 1:
                name = self.plan.sources[chosen].name
                raise RecipeError(f"{name}: data.eval_fraction {self.plan.held_out} holds out every document.")

    def epochs(self) -> list[int]:
        return [reader.epoch for reader in self.readers]


@dataclass
class Block:
    """Packed rows. Row i is tokens[starts[i]:starts[i + 1]], of documents of `lengths` with `numbers`, as TokenRows.

    places: where each document (by number) is from. state: what the block was made from.
    """

    shard: int
    state: dict[str, Any]
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    numbers: NDArray[np.int64]
    document_starts: NDArray[np.int64]
    places: dict[int, str]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> dict[str, NDArray[Any]]:
        """A row as the collator takes it; everything in it is learned."""
        tokens = self.tokens[self.starts[index] : self.starts[index + 1]]
        inside = slice(int(self.document_starts[index]), int(self.document_starts[index + 1]))
        return {
            "input_ids": tokens,
            "labels": tokens,
            "seq_lengths": self.lengths[inside],
            "rows": self.numbers[inside],
        }


@dataclass
class _Piece:
    """Tokens that stay together in a row, the number of their document, and where that is from."""

    tokens: NDArray[np.int32]
    number: int
    place: str


class ShardBlocks:
    """The blocks of one virtual shard, for ever. `state`: of the block to begin with (see `Block.state`)."""

    def __init__(self, plan: StreamPlan, shard: int, state: dict[str, Any] | None = None) -> None:
        self.plan, self.shard = plan, shard
        state = state or {}
        self.number: int = state.get("number", 0)  # of the block
        self.documents: int = state.get("documents", 0)  # drawn before it
        self.mixture = plan.mixture(shard, state.get("mixture"))
        self.waiting = [
            _Piece(np.asarray(tokens, np.int32), number, place) for tokens, number, place in state.get("waiting", [])
        ]

    def state(self) -> dict[str, Any]:
        """Plain data, and int32 tensors for the tokens that wait."""
        import torch

        waiting = [(torch.from_numpy(piece.tokens.copy()), piece.number, piece.place) for piece in self.waiting]
        return {
            "number": self.number,
            "documents": self.documents,
            "mixture": self.mixture.state(),
            "waiting": waiting,
        }

    def __iter__(self) -> Iterator[Block]:
        while True:
            yield self.make()

    def make(self) -> Block:
        """The next block, of at least one row."""
        state = self.state()
        random = np.random.default_rng([self.plan.seed, self.shard, self.number])
        pieces, rows = list(self.waiting), []
        while not rows:
            drawn = self._draw()
            pieces += [drawn[index] for index in random.permutation(len(drawn)).tolist()]
            rows, left = self._lay_out(pieces, random)
            pieces = left
        self.waiting = pieces
        self.number += 1
        return _block(self.shard, state, rows)

    def _draw(self) -> list[_Piece]:
        """Documents of about `block_tokens` tokens; fewer where all sources have come to their end meanwhile."""
        plan, found, tokens = self.plan, [], 0
        # The first blocks are smaller, so that training begins soon: all shards have to make one before the first step.
        wanted = max(plan.block_tokens >> max(_FIRST - self.number, 0), plan.max_length)
        epochs = self.mixture.epochs()
        while tokens < wanted:
            documents: list[Document] = []
            for _ in range(_DRAWN):
                documents.append(self.mixture.draw())
                if self._all_began_again(epochs):
                    break
            encoded = [document.tokens for document in documents]
            if plan.encoder is not None and encoded[0] is None:
                encoded = plan.encoder.encode(documents)
            for document, ids in zip(documents, encoded, strict=True):
                number = self.shard + plan.shards * self.documents
                self.documents += 1
                tokens += len(ids)
                found.append(_Piece(ids, number, document.place))
            if self._all_began_again(epochs):
                break
        return found

    def _all_began_again(self, epochs: list[int]) -> bool:
        return all(now > before for now, before in zip(self.mixture.epochs(), epochs, strict=True))

    def _lay_out(self, pieces: list[_Piece], random: np.random.Generator) -> tuple[list[list[_Piece]], list[_Piece]]:
        """Rows of pieces, and the pieces that wait for the next block."""
        length = self.plan.max_length
        if self.plan.too_long == "drop":
            pieces = [piece for piece in pieces if len(piece.tokens) <= length]
        if not self.plan.isolate:
            return _joined(pieces, length)
        cut = [
            _Piece(piece.tokens[begin : begin + length], piece.number, piece.place)
            for piece in pieces
            # A piece begins with the last token of the one before: every token but the first is predicted once.
            for begin in range(0, max(len(piece.tokens) - 1, 1), length - 1)
        ]
        cut = [piece for piece in cut if len(piece.tokens) > 1]
        lengths = np.array([len(piece.tokens) for piece in cut], np.int64)
        packs = [[cut[index] for index in row] for row in pack(lengths, length, int(random.integers(2**31)))]
        if not packs:
            return [], []
        filled = [sum(len(piece.tokens) for piece in row) for row in packs]
        emptiest = int(np.argmin(filled))
        waiting = packs.pop(emptiest) if filled[emptiest] < _FULL * length else []
        return packs, waiting


def _joined(pieces: list[_Piece], length: int) -> tuple[list[list[_Piece]], list[_Piece]]:
    """All pieces as one text, cut into rows of exactly `length` tokens; the rest waits."""
    rows: list[list[_Piece]] = []
    row: list[_Piece] = []
    space = length
    for piece in pieces:
        tokens = piece.tokens
        while len(tokens):
            part, tokens = tokens[:space], tokens[space:]
            row.append(_Piece(part, piece.number, piece.place))
            space -= len(part)
            if not space:
                rows.append([_Piece(np.concatenate([part.tokens for part in row]), row[0].number, row[0].place)])
                row, space = [], length
    return rows, row


def _block(shard: int, state: dict[str, Any], rows: list[list[_Piece]]) -> Block:
    pieces = [piece for row in rows for piece in row]
    lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    document_starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Block(
        shard=shard,
        state=state,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        starts=ends[document_starts],
        lengths=lengths,
        numbers=np.array([piece.number for piece in pieces], np.int64),
        document_starts=document_starts,
        places={piece.number: piece.place for piece in pieces},
    )
