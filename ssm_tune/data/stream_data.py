"""A recipe's data section as a stream: sources opened, rows for evaluation set aside, all checked that can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssm_tune.data import demo, package_docs
from ssm_tune.data.blocks import StreamPlan, TextEncoder, is_held_out
from ssm_tune.data.compressed import COMPRESSED
from ssm_tune.data.documents import VIRTUAL_SHARDS, Document, DocumentSource, FileSource, RowSource, text_of
from ssm_tune.data.files import list_files
from ssm_tune.data.formatting import check_columns
from ssm_tune.data.hub_stream import HubSource
from ssm_tune.data.prepare import DataReport, PreparedData, lay_out_held_out
from ssm_tune.data.sources import bounded_part, is_a_path, open_sources, read_examples
from ssm_tune.data.token_shards import ShardWriter, TokenShards
from ssm_tune.data.tokens import Documents
from ssm_tune.recipe import DataSection, DataSource, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEARCHED = 20_000  # documents of a stream that are looked through for those held out by data.eval_fraction
_EVAL_TOKENS = 2**21  # a prepared folder may hold more


def is_streamed(section: DataSection) -> bool:
    """Whether a recipe's data are a stream: read again and again until max_steps."""
    return section.streaming or section.prepared is not None


@dataclass
class StreamReport(DataReport):
    """What is known of a stream before it is read. `streamed`: a sentence for each source."""

    streamed: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        held = [self.eval.lines()[0], *self.eval.notes] if self.eval else []
        return [*self.streamed, *self.notes, *(f"held out: {line}" for line in held)]

    def figures(self) -> dict[str, Any]:
        return {"stream": self.streamed, "notes": self.notes}


def prepare_stream(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    packing: bool,
    seed: int,
    max_steps: int,
) -> PreparedData:
    """The plan of a stream, and its held-out rows in memory. The first documents of every source are read.

    Raises RecipeError for every mistake that can be seen before training.
    """
    check_stream(section, packing=packing, max_length=max_length, max_steps=max_steps)
    assert max_length is not None
    encoder = TextEncoder(tokenizer)
    if section.prepared is not None:
        shards = TokenShards(Path(section.prepared))
        shards.check_recipe(tokenizer, section)
        shards.check()
        sources: list[DocumentSource] = [shards.source(n, entry.path) for n, entry in enumerate(section.train)]
        held = shards.held_out(_EVAL_TOKENS)
        held_out = None  # they are in files of their own
    else:
        sources = open_stream(section.train, "data.train")
        held_out = section.eval_fraction
        held = encoder.encode(list(_held_out_documents(section, sources)))
    plan = StreamPlan(
        sources,
        [1.0 if entry.weight is None else entry.weight for entry in section.train],
        max_length,
        seed,
        section.isolate,
        section.too_long,
        held_out,
        None if section.prepared is not None else encoder,
    )
    report = StreamReport(streamed=[line for source in sources for line in source.describe()])
    report.notes = [f"documents {'kept apart in' if section.isolate else 'joined into'} rows of {max_length:,} tokens"]
    evaluation = None
    if held:
        evaluation, report.eval = lay_out_held_out(_documents(held), max_length, section.isolate, seed)
    elif section.eval or section.eval_fraction:
        raise RecipeError("data: nothing is held out; raise data.eval_fraction, or name rows in data.eval.")
    from datasets import Dataset

    # TRL looks at one row of what it trains on; the stream itself is `ssm_tune.data.stream`.
    one = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]], "seq_lengths": [[2]], "rows": [[0]]})
    return PreparedData(one, evaluation, report, None, [], [], plan)


def check_stream(section: DataSection, *, packing: bool, max_length: int | None, max_steps: int) -> None:
    """Raises RecipeError for settings that a stream cannot follow."""
    mistakes = []
    if max_steps <= 0:
        mistakes.append("training.max_steps is missing: a stream has no end, so an epoch has no length.")
    if not packing:
        mistakes.append("training.packing: a stream is packed into rows of training.max_length. Leave packing out.")
    if max_length is None:
        mistakes.append("training.max_length: null; a stream is packed into rows of this length. Give a number.")
    if len(section.train) > 1 and all(source.weight is None for source in section.train):
        mistakes.append("data.train: a stream's sources have no known length: give at least one of them a weight.")
    mistakes += [
        f"data.train.{number}.split: a stream is read whole, not {source.split}. data.eval_fraction sets some of it "
        "aside."
        for number, source in enumerate(section.train)
        if "[" in source.split
    ]
    if mistakes:
        raise RecipeError(mistakes)


# -- sources ---------------------------------------------------------------------------------------------------------


def open_stream(entries: Sequence[DataSource], where: str) -> list[DocumentSource]:
    """The sources of a recipe's list; the first documents of each are read. Raises RecipeError, for all at once."""
    found: list[DocumentSource] = []
    mistakes: list[str] = []
    for number, entry in enumerate(entries):
        try:
            check_columns(entry.columns, f"{where}.{number}")
            found.append(_open(entry, f"{where}.{number}"))
        except RecipeError as error:
            mistakes += error.mistakes
    if mistakes:
        raise RecipeError(mistakes)
    return found


def _open(entry: DataSource, where: str) -> DocumentSource:
    path = Path(entry.path).expanduser()
    columns = dict(entry.columns) if entry.columns else None
    if not path.exists() and entry.path in (*demo.NAMES, package_docs.TEXT):
        (opened,) = open_sources([entry], where)
        return RowSource(f"{entry.path} {entry.split}", list(opened.read()), columns)
    if path.exists() or is_a_path(entry.path):
        files = list_files(path, entry.split)
        compressed = [file for file in files if file.suffix.lower() in COMPRESSED]
        if len(compressed) == len(files) >= VIRTUAL_SHARDS:
            # As `datasets` reads the Hub's, each reader has files of its own: none is decompressed for the others.
            return HubSource(str(path), entry.split, columns, where)
        return FileSource(entry.path, files, columns)
    return HubSource(entry.path, entry.split, columns, where)


def check_stream_sources(section: DataSection) -> list[str]:
    """What `ssm-tune validate` says of data.train: the first documents of everything that is here, without network.

    Raises RecipeError with the mistakes of all entries.
    """
    local = [entry for entry in section.train if is_here(entry)]
    notes = [
        f"{entry.path} {entry.split}: on the Hub, not looked into" for entry in section.train if entry not in local
    ]
    return [*(line for source in open_stream(local, "data.train") for line in source.describe()), *notes]


def is_here(entry: DataSource) -> bool:
    """Whether an entry is a file, a folder or built in; else it is the name of a data set on the Hub."""
    built_in = entry.path in (*demo.NAMES, package_docs.TEXT)
    return built_in or is_a_path(entry.path) or Path(entry.path).expanduser().exists()


def _held_out_documents(section: DataSection, sources: Sequence[DocumentSource]) -> Iterator[Document]:
    if section.eval_fraction:
        for source in sources:
            reader = source.reader(0, 1)
            for _ in range(_SEARCHED // len(sources)):
                document = reader.read()
                if reader.epoch:
                    break
                if is_held_out(document.text, section.eval_fraction):
                    yield document
    for number, entry in enumerate(section.eval or []):
        yield from _evaluated(entry, f"data.eval.{number}")


def _evaluated(entry: DataSource, where: str) -> Iterator[Document]:
    """All rows of an entry of data.eval; of the Hub only what its split says is fetched."""
    if is_here(entry):
        for source, example in read_examples(open_sources([entry], where), "pretrain"):
            yield Document(example.text, source.place(source.numbers[-1]))
        return
    name, begin, end = bounded_part(entry.split, where)
    source = HubSource(entry.path, name, dict(entry.columns) if entry.columns else None, where)
    for number, row in source.head(begin, end):
        text = text_of(row, source.columns, f"{source.name}, row {number}")
        if text is not None:
            yield Document(text, f"{source.name}, row {number}")


def _documents(arrays: Sequence[Any]) -> Documents:
    starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in arrays])]).astype(np.int64)
    numbers = np.arange(len(arrays), dtype=np.int64)
    return Documents(
        np.concatenate(arrays),
        np.ones(int(starts[-1]), np.bool_),
        starts,
        numbers,
        numbers,
        np.zeros(len(arrays), np.int32),
    )


# -- tokenizers and preparation --------------------------------------------------------------------------------------


def stream_texts(section: DataSection) -> Iterator[str]:
    """Texts of a stream to train a tokenizer on, in the stream's mixture, without what is held out."""
    weights = [1.0 if entry.weight is None else entry.weight for entry in section.train]
    sources = open_stream(section.train, "data.train")
    plan = StreamPlan(sources, weights, max_length=2, held_out=section.eval_fraction, shards=1)
    mixture = plan.mixture(0)
    while True:
        document = mixture.draw()
        if all(mixture.epochs()):  # every source has been read once
            return
        yield document.text


def shard_writer(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> ShardWriter:
    """The writer of `data.prepared`, its sources opened. Raises RecipeError as `open_stream`."""
    if section.prepared is None:
        raise RecipeError("data.prepared is missing: the folder that the tokens go to, such as data.prepared=tokens")
    sources = open_stream(section.train, "data.train")
    for number, entry in enumerate(section.eval or []):
        rows = [
            (place, {"text": document.text}) for place, document in enumerate(_evaluated(entry, f"data.eval.{number}"))
        ]
        sources.append(RowSource(entry.path, rows))
    return ShardWriter(Path(section.prepared), TextEncoder(tokenizer), sources, section)
