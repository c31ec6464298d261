"""The way of the data: sources -> examples -> tokens -> held-out rows -> lengths -> mixture -> packed rows.

Everything is a function of the recipe, the files and the seed, so that all processes of a run come to the same rows
without speaking to each other. Nothing is written: the token rows are in memory, the Hub's files in its own cache.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ssm_tune.data.mixture import hold_out, weigh
from ssm_tune.data.packing import padding_share
from ssm_tune.data.rows import TokenRows, cut_documents, joined_rows, packed_rows, single_rows, split_documents
from ssm_tune.data.sources import Source, open_rows, open_sources, read_examples
from ssm_tune.data.tokens import Documents, Encoder
from ssm_tune.recipe import DataSection, RecipeError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ssm_tune.data.blocks import StreamPlan

logger = logging.getLogger(__name__)

Task = Literal["sft", "pretrain"]


@dataclass
class DataReport:
    """What became of the rows, in numbers.

    rows: read, and on this side of the train/eval split. sequences: rows of the token data set. documents: what they
    hold. tokens, loss_tokens: of one epoch, without padding. padding_share: of all positions, packed, or in random
    batches where not packed. dropped, cut: rows left out altogether, and rows shortened (in pretraining: split).
    """

    rows: int = 0
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    padding_share: float = 0.0
    dropped: int = 0
    cut: int = 0
    notes: list[str] = field(default_factory=list)
    eval: DataReport | None = None

    def lines(self) -> list[str]:
        """The report for a reader, one sentence a line."""
        found = [
            f"{self.rows:,} rows, {self.tokens:,} tokens ({self.loss_tokens:,} with loss) in {self.sequences:,} "
            f"sequences, {self.padding_share:.1%} padding"
        ]
        if self.eval:
            found.append(f"held out: {self.eval.lines()[0]}")
        return [*found, *self.notes, *(f"held out: {note}" for note in (self.eval.notes if self.eval else []))]

    def figures(self) -> dict[str, Any]:
        """The report for the model card."""
        return {"rows": self.rows, "tokens": self.tokens, "loss tokens": self.loss_tokens, "notes": self.notes}

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass
class PreparedData:
    """Token rows to train and evaluate on.

    train, eval: columns input_ids, labels (-100: no loss), seq_lengths (of the row's documents) and rows (the number of
    each document's source row). chat_template: what the run's tokenizer must be saved with so that prompts look as in
    training; None: its own is right. end_markers: texts after which the assistant stops, beside eos.
    """

    train: Dataset
    eval: Dataset | None
    report: DataReport
    chat_template: str | None
    end_markers: list[str]
    sources: list[Source] = field(repr=False)
    stream: StreamPlan | None = field(default=None, repr=False)  # what is trained on in the place of `train`

    def row_name(self, row: int) -> str:
        """The name of a source row for messages, such as "rows.jsonl, line 3"; `row` as in the column `rows`."""
        firsts = np.cumsum([0, *(len(source.numbers) for source in self.sources)]).tolist()
        if not 0 <= row < firsts[-1]:
            raise IndexError(f"there is no source row {row}; {firsts[-1]} were read")
        index = bisect_right(firsts, row) - 1
        return self.sources[index].place(self.sources[index].numbers[row - firsts[index]])


def prepare_data(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task = "sft",
    max_length: int | None,
    packing: bool = False,
    seed: int = 0,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool | None = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    batch_size: int = 8,
) -> PreparedData:
    """Read, tokenise, split, cut and pack all data of a run.

    max_length: tokens of the longest row, and of every packed row. completion_only_loss, assistant_only_loss: False
    asks for a loss on the prompt too; None is True, unlike in TRL. dataset, eval_dataset: rows in memory, in the place
    of the section's train and eval. batch_size: only for the share of padding in the report.

    Raises RecipeError for every mistake in the data, naming file and row, or if nothing is left to train on.
    """
    _check_settings(section, task, max_length, packing, eval_dataset)
    loss_on_all = {"completion"} if completion_only_loss is False else set()
    loss_on_all |= {"assistant"} if assistant_only_loss is False else set()
    encoder = Encoder(tokenizer, frozenset(loss_on_all))
    sources = open_sources(section.train) if dataset is None else open_rows(dataset)
    held_sources: list[Source] = []
    if eval_dataset is not None:
        held_sources = open_rows(eval_dataset, "eval_dataset")
    elif section.eval:
        held_sources = open_sources(section.eval, "data.eval")
    documents = encoder.encode(read_examples(sources, task))
    held: Documents | None = None
    notes: list[str] = []
    if held_sources:
        held = encoder.encode(read_examples(held_sources, task))
        held.rows += len(documents)  # one numbering for both
        notes += _overlap(documents, held)
    elif section.eval_fraction:
        documents, held = hold_out(documents, section.eval_fraction, seed, max_length if task == "pretrain" else None)
    layout = _Layout(task, max_length, packing, section.isolate, section.too_long, seed, batch_size)
    if dataset is None:
        documents, mixed = weigh(documents, [source.weight for source in section.train], seed)
        notes += [f"{section.train[group].path}: {note}" for group, note in mixed]
    train, report = _lay_out(documents, layout, "the training data")
    evaluation = None
    if held is not None:
        evaluation, report.eval = _lay_out(held, layout, "the held-out data")
    everything = [*sources, *held_sources]
    notes += [note for source in everything for note in source.notes]
    report.notes = list(dict.fromkeys([*_written_as(encoder), *notes, *report.notes]))
    markers = sorted(encoder.renderer.end_markers - {tokenizer.eos_token})
    return PreparedData(train, evaluation, report, encoder.run_template(), markers, everything)


def check_sources(section: DataSection, task: Task = "sft", *, most: int = 100_000) -> list[str]:
    """Look into every local source without tokenizer, network or torch: the first `most` rows of each.

    Returns what was found, a line each. Raises RecipeError with the mistakes of all sources.
    """
    notes: list[str] = []
    mistakes: list[str] = []
    for where, listed in (("data.train", section.train), ("data.eval", section.eval or [])):
        try:
            sources = open_sources(listed, where)
        except RecipeError as error:
            mistakes += error.mistakes
            continue
        for source in sources:
            if source.remote:
                notes.append(f"{source.name}: on the Hub, not looked into")
                continue
            try:
                count = sum(1 for _ in zip(read_examples([source], task), range(most), strict=False))
            except RecipeError as error:
                mistakes += error.mistakes
                continue
            notes.append(f"{source.name}: {count:,} {'first rows' if count == most else 'rows'} are usable")
    if mistakes:
        raise RecipeError(mistakes)
    return notes


def training_texts(section: DataSection, task: Task = "sft", dataset: Any = None) -> Iterator[str]:
    """All texts of the training rows, one after the other, for training a tokenizer."""
    sources = open_sources(section.train) if dataset is None else open_rows(dataset)
    for _, example in read_examples(sources, task):
        yield from example.texts()


@dataclass(frozen=True)
class _Layout:
    task: Task
    max_length: int | None
    packing: bool
    isolate: bool
    too_long: str
    seed: int
    batch_size: int


def _check_settings(section: DataSection, task: Task, max_length: int | None, packing: bool, eval_dataset: Any) -> None:
    mistakes = []
    if task not in ("sft", "pretrain"):
        mistakes.append(f"task must be sft or pretrain, not {task!r}.")
    if max_length is not None and max_length < 2:
        mistakes.append("training.max_length must be at least 2: a token is predicted from one before it.")
    if packing and max_length is None:
        mistakes.append("training.packing needs training.max_length, the length of the packed rows.")
    if not packing and not section.isolate:
        mistakes.append("data.isolate: false lets packed documents see each other; it needs training.packing: true.")
    if section.eval_fraction and (section.eval or eval_dataset is not None):
        mistakes.append("data.eval_fraction and data.eval both name held-out rows. Keep one.")
    mistakes += [
        f"data.eval.{index}.weight has no meaning: every held-out row is evaluated once."
        for index, source in enumerate(section.eval or [])
        if source.weight is not None
    ]
    if mistakes:
        raise RecipeError(mistakes)


def _overlap(documents: Documents, held: Documents) -> list[str]:
    shared = int(np.isin(held.keys, documents.keys).sum())
    if not shared:
        return []
    note = f"{shared:,} of {len(held):,} held-out rows are also in the training data: the eval loss will flatter"
    logger.warning(note)
    return [note]


def _written_as(encoder: Encoder) -> list[str]:
    found = []
    if "chat" in encoder.kinds:
        own = encoder.tokenizer.chat_template
        how = "the tokenizer's chat template" if own else "plain lines, since the tokenizer has no chat template"
        found.append(f"turns are written by {how}")
    if encoder.run_template() and encoder.tokenizer.chat_template:
        found.append("prompts are exact texts: the run's tokenizer is saved with a chat template that adds nothing")
    if encoder.lossy:
        found.append(
            f"{encoder.lossy:,} of the first rows do not decode to their exact text: the tokenizer changes its input"
        )
    return found


# -- lengths and rows ------------------------------------------------------------------------------------------------


def lay_out_held_out(documents: Documents, max_length: int, isolate: bool, seed: int) -> tuple[Dataset, DataReport]:
    """A stream's documents for evaluation, packed as its rows are. Raises RecipeError if none can be used."""
    layout = _Layout("pretrain", max_length, True, isolate, "cut", seed, 1)
    return _lay_out(documents, layout, "the held-out data")


def _lay_out(documents: Documents, layout: _Layout, name: str) -> tuple[Dataset, DataReport]:
    from datasets import Dataset

    report = DataReport(rows=len(np.unique(documents.rows)))
    if layout.max_length is not None:
        documents = _fit(documents, layout, layout.max_length, report)
    usable = documents.count_learned() > 0
    if not usable.all():
        lost = len(np.unique(documents.rows[~usable]))
        report.dropped += lost
        within = f" within the first {layout.max_length:,} tokens" if layout.max_length else ""
        report.notes.append(f"{lost:,} rows dropped: nothing to learn{within}")
        documents = documents.take(np.flatnonzero(usable))
    if not len(documents):
        raise RecipeError([f"{name} has no usable row left.", *report.notes])
    rows = _arrange(documents, layout)
    report.documents = len(documents)
    report.sequences = len(rows)
    report.tokens = int(rows.starts[-1])
    report.loss_tokens = int(documents.count_learned().sum())
    if layout.packing:
        report.padding_share = 1 - report.tokens / (report.sequences * (layout.max_length or 1))
    else:
        report.padding_share = padding_share(documents.lengths, layout.batch_size, layout.seed)
    return Dataset(rows.to_table()), report


def _fit(documents: Documents, layout: _Layout, max_length: int, report: DataReport) -> Documents:
    """Documents of at most `max_length` tokens: cut, dropped, or (pretraining) split, and counted in the report."""
    long = documents.lengths > max_length
    count = len(np.unique(documents.rows[long]))
    if not count:
        return documents
    what = f"{count:,} of {report.rows:,} rows are longer than {max_length:,} tokens"
    if layout.too_long == "drop":
        report.dropped += count
        report.notes.append(f"{what}: dropped")
        return documents.take(np.flatnonzero(~long))
    if layout.task == "pretrain" and not layout.isolate:
        return documents  # they run on from row to row
    report.cut += count
    if layout.task == "pretrain":
        report.notes.append(f"{what}: split into pieces, each with a fresh state")
        return split_documents(documents, max_length)
    lost = int((documents.lengths[long] - max_length).sum())
    report.notes.append(f"{what}: cut at the end, {lost:,} tokens lost")
    return cut_documents(documents, max_length)


def _arrange(documents: Documents, layout: _Layout) -> TokenRows:
    if not layout.packing or layout.max_length is None:
        return single_rows(documents)
    if not layout.isolate:
        return joined_rows(documents, layout.max_length, layout.seed)
    return packed_rows(documents, layout.max_length, layout.seed)
