"""Tokens on disk: what `ssm-tune prepare` writes once and `ssm-tune pretrain` maps into memory ever after.

    index.json              tokenizer, sources, and for each part its documents, tokens and checksums; written last
    part-00000.tokens       documents one after the other, uint16 or int32, in the machine's byte order
    part-00000.starts.npy   int64 (documents + 1,): where each begins
    tokenizer/              what the text was tokenised with
    progress.json           only while it is being made: what is done, and where to go on

A part is written beside its place and renamed, then told in progress.json: a process that is killed loses the part it
was at. Documents are whole and in the order of their source; length and packing are chosen when they are trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssm_tune.data.blocks import TextEncoder, is_held_out
from ssm_tune.data.documents import Document, DocumentSource, Position, Reader
from ssm_tune.data.files import list_files
from ssm_tune.data.shard_source import Part, ShardSource
from ssm_tune.recipe import DataSection, DataSource, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer"
_PART_TOKENS = 2**26
_DRAWN = 1024  # documents tokenised together
_CHECKED_BYTES = 2**31  # a folder of so much is checked before training; a larger one by `ssm-tune prepare` again
_PROBE = "The state h(t) = A h(t-1) + B x(t), 3.14159 \u00e4\u00df\u6f22\n\n\tdef f(x): return x"


def tokenizer_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """A checksum of what a tokenizer makes of texts: its vocabulary, eos and bos, and a text's tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    vocabulary = [item for item in vocabulary if item[0] != tokenizer.pad_token]  # chosen for training, not for texts
    told = [vocabulary, tokenizer.eos_token_id, TextEncoder(tokenizer).bos, tokenizer(_PROBE)["input_ids"]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def source_marks(section: DataSection) -> list[list[str]]:
    """What was read, so that a recipe that reads something else is noticed; folders may have moved."""

    def mark(kind: str, source: DataSource) -> list[str]:
        path = Path(source.path)
        name = path.name if path.is_absolute() else source.path
        return [kind, name, source.split, json.dumps(source.columns or {}, sort_keys=True)]

    marks = [mark("train", source) for source in section.train]
    marks += [mark("eval", source) for source in section.eval or []]
    return [*marks, ["eval_fraction", str(section.eval_fraction or 0)]]


def source_sizes(section: DataSection) -> list[int | None]:
    """Bytes of each entry's files, so that a file that has changed is noticed; None for what is not here (any more)."""
    sizes: list[int | None] = []
    for source in [*section.train, *(section.eval or [])]:
        path = Path(source.path).expanduser()
        try:
            files = list_files(path, source.split.partition("[")[0]) if path.exists() else []
        except RecipeError:  # what was read is not here, as if the path were not
            files = []
        sizes.append(sum(file.stat().st_size for file in files) or None)
    return sizes


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class ShardWriter:
    """Tokenises sources into a folder, and goes on where a process before it was stopped.

    Args:
        folder: where to.
        encoder: the tokenizer.
        sources: of data.train, then of data.eval, by entry.
        section: the recipe's data section.
    """

    folder: Path
    encoder: TextEncoder
    sources: list[DocumentSource]
    section: DataSection
    part_tokens: int = _PART_TOKENS
    parts: list[Part] = field(default_factory=list)
    _entry: int = 0
    _position: Position | None = None

    def __post_init__(self) -> None:
        largest = max(self.encoder.tokenizer.get_vocab().values())
        self.dtype = np.dtype(np.uint16 if largest < 2**16 else np.int32)

    def facts(self) -> dict[str, Any]:
        """What must be the same for going on, and for training."""
        return {
            "format": 1,
            "tokenizer": tokenizer_mark(self.encoder.tokenizer),
            "tokenizer_name": self.encoder.tokenizer.name_or_path,
            "sources": source_marks(self.section),
            "sizes": source_sizes(self.section),
            "dtype": self.dtype.name,
        }

    def resume(self) -> bool:
        """Take up what progress.json says; False if nothing was begun. Raises RecipeError for another recipe."""
        file = self.folder / PROGRESS
        if not file.is_file():
            return False
        done = _read(file)
        check_facts(self.folder, done, self.facts())
        self.parts = done["parts"]
        self._entry, self._position = done["entry"], done["position"]
        return True

    def write(self, report: Any = None) -> list[Part]:
        """Write everything; `report` is called with the documents and tokens so far after each part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _Replaced(self.folder / TOKENIZER) as target:
            self.encoder.tokenizer.save_pretrained(str(target))
        for entry in range(self._entry, len(self.sources)):
            self._write_source(entry, report)
        text = json.dumps({**self.facts(), "parts": [asdict(part) for part in self.parts]}, indent=1)
        _write_text(self.folder / INDEX, text)
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return self.parts

    def _write_source(self, entry: int, report: Any) -> None:
        reader = self.sources[entry].reader(0, 1)
        if self._position is not None:
            reader.restore(self._position)
        split = "train" if entry < len(self.section.train) else "eval"
        fraction = self.section.eval_fraction if split == "train" else None
        while not reader.epoch:
            kept: dict[str, list[NDArray[np.int32]]] = {"train": [], "eval": []}
            size = 0
            while size < self.part_tokens and not reader.epoch:
                documents = self._read(reader)
                for document, ids in zip(documents, self.encoder.encode(documents), strict=True):
                    kept["eval" if is_held_out(document.text, fraction) else split].append(ids)
                    size += len(ids)
            for kind, arrays in kept.items():
                if arrays:
                    self._commit(entry, kind, arrays)
            ended = bool(reader.epoch)
            position = None if ended else reader.position()
            progress = {"entry": entry + ended, "position": position, "parts": [asdict(part) for part in self.parts]}
            _write_text(self.folder / PROGRESS, json.dumps({**self.facts(), **progress}))
            if report is not None:
                report(sum(part.documents for part in self.parts), sum(part.tokens for part in self.parts))
        self._position = None

    def _read(self, reader: Reader) -> list[Document]:
        """The next documents of the first epoch; what comes after its end is not used."""
        documents = []
        for _ in range(_DRAWN):
            document = reader.read()
            if reader.epoch:
                break
            documents.append(document)
        return documents

    def _commit(self, entry: int, split: str, arrays: list[NDArray[np.int32]]) -> None:
        name = f"part-{len(self.parts):05}"
        tokens = np.concatenate(arrays).astype(self.dtype)
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in arrays])]).astype(np.int64)
        starts_file = self.folder / f".{name}.starts.npy"
        np.save(starts_file, starts)
        starts_file.replace(self.folder / f"{name}.starts.npy")
        partial = self.folder / f".{name}.tokens"
        with partial.open("wb") as file:
            file.write(tokens.tobytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / f"{name}.tokens")
        digest = checksum(self.folder / f"{name}.tokens", self.folder / f"{name}.starts.npy")
        self.parts.append(Part(f"{name}.tokens", entry, split, len(arrays), len(tokens), digest))


def checksum(*files: Path) -> str:
    """SHA-256 of files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(2**22):
                digest.update(chunk)
    return digest.hexdigest()


def check_facts(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises RecipeError if a folder was made with another tokenizer, or from other sources."""
    if found["tokenizer"] != wanted["tokenizer"]:
        raise RecipeError(
            f"data.prepared: {folder} was tokenised with another tokenizer ({found['tokenizer_name'] or 'unnamed'}, "
            f"not {wanted['tokenizer_name'] or 'this one'}). Name that one in tokenizer.name, or prepare into another "
            "folder."
        )
    if len(found["sources"]) != len(wanted["sources"]):
        raise RecipeError(
            f"data.prepared: {folder} was made of {len(found['sources']) - 1} sources, the recipe names "
            f"{len(wanted['sources']) - 1}. Prepare into another folder."
        )
    for was, now in zip(found["sources"], wanted["sources"], strict=False):
        if was != now:
            told = [f"{kind} {' '.join(rest)}" for kind, *rest in (was, now)]
            raise RecipeError(
                f"data.prepared: {folder} was made of other data: {told[0]}, where the recipe has {told[1]}. Prepare "
                "into another folder."
            )
    sizes = zip(found.get("sizes", ()), wanted["sizes"], found["sources"], strict=False)  # absent in older folders
    for before, now, (_, name, *_) in sizes:
        if None not in (before, now) and before != now:
            raise RecipeError(
                f"data.prepared: {folder} was made of {before:,} bytes of {name}, which has {now:,} now. Prepare into "
                "another folder."
            )


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"data.prepared: {file} cannot be read: {error}.") from error
    facts = {"format", "tokenizer", "tokenizer_name", "sources", "dtype", "parts"}
    try:
        if found["format"] == 1 and facts <= found.keys() and np.dtype(found["dtype"]):
            return {**found, "parts": [Part(**part) for part in found["parts"]]}
    except (TypeError, KeyError, AttributeError):
        pass  # told below
    raise RecipeError(f"data.prepared: {file} is not of this version's format. Prepare again into another folder.")


def _write_text(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


class _Replaced:
    """A folder that is written beside its place, then takes it."""

    def __init__(self, target: Path) -> None:
        self.target, self.partial = target, target.with_name(f".{target.name}")

    def __enter__(self) -> Path:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            shutil.rmtree(self.target, ignore_errors=True)
            self.partial.replace(self.target)
        shutil.rmtree(self.partial, ignore_errors=True)


# -- reading ---------------------------------------------------------------------------------------------------------


class TokenShards:
    """A folder that `ShardWriter` has finished.

    Raises RecipeError if it is not there or not finished, made with another tokenizer or from other data (where those
    are given), or if a file has not the size or, up to 2 GiB in all, the checksum that was written down.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INDEX).is_file():
            begun = (folder / PROGRESS).is_file()
            raise RecipeError(
                f"data.prepared: {folder} is {'not finished' if begun else 'not there yet'}. "
                f"{'Go on' if begun else 'Make it'} with: ssm-tune prepare RECIPE"
            )
        self.index = _read(folder / INDEX)
        self.dtype = np.dtype(self.index["dtype"])
        self.parts: list[Part] = self.index["parts"]
        self._check_sizes()

    def _check_sizes(self) -> None:
        for part in self.parts:
            file = self.folder / part.file
            size = file.stat().st_size if file.is_file() else -1
            if size != part.tokens * self.dtype.itemsize or not self._starts(part).is_file():
                state = f"has {size:,} bytes" if size >= 0 else "is missing"
                raise RecipeError(
                    f"data.prepared: {file} {state}; {part.tokens * self.dtype.itemsize:,} were written. Delete "
                    f"{self.folder} and prepare again."
                )

    def check(self, *, whole: bool = False) -> None:
        """Compare checksums; not `whole`: only where that takes seconds. Raises RecipeError naming a damaged file."""
        if not whole and sum(part.tokens for part in self.parts) * self.dtype.itemsize > _CHECKED_BYTES:
            return
        for part in self.parts:
            if checksum(self.folder / part.file, self._starts(part)) != part.sha256:
                raise RecipeError(
                    f"data.prepared: {self.folder / part.file} is damaged: its checksum is another than was written. "
                    f"Delete {self.folder} and prepare again."
                )

    def _starts(self, part: Part) -> Path:
        return self.folder / part.file.replace(".tokens", ".starts.npy")

    def check_recipe(self, tokenizer: PreTrainedTokenizerBase, section: DataSection) -> None:
        """Raises RecipeError if the recipe has another tokenizer or other data."""
        wanted = {
            "tokenizer": tokenizer_mark(tokenizer),
            "tokenizer_name": tokenizer.name_or_path,
            "sources": source_marks(section),
            "sizes": source_sizes(section),
        }
        check_facts(self.folder, self.index, wanted)

    def source(self, entry: int, name: str) -> ShardSource:
        """The training documents of one of the recipe's entries. Raises RecipeError if there is none."""
        parts = [part for part in self.parts if part.entry == entry and part.split == "train"]
        if not parts:
            raise RecipeError(f"data.prepared: {self.folder} holds no document of {name} to train on.")
        return ShardSource(name, self.folder, self.dtype.name, parts)

    def held_out(self, most_tokens: int) -> list[NDArray[np.int32]]:
        """The first documents for evaluation, of about so many tokens."""
        parts = [part for part in self.parts if part.split == "eval"]
        found: list[NDArray[np.int32]] = []
        size = 0
        for part in parts:
            source = ShardSource(part.file, self.folder, self.dtype.name, [part])
            for number in range(part.documents):
                if size >= most_tokens:
                    return found
                found.append(source.document(number))
                size += len(found[-1])
        return found
