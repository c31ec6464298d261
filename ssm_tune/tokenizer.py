"""The tokenizer of a run: found, checked against the model, given a pad token, and saved for generation.

Why pad matters: published Mamba tokenizers pad with eos, and a trainer that takes the labels of pad tokens away then
takes every eos with them, so that the model never learns to stop. Here padding has no label because of where it is, and
pad is another token wherever the tokenizer has one.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssm_tune.data.chat import Renderer, adds_bos
from ssm_tune.recipe import RecipeError, TokenizerSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SPARE = re.compile(r"pad|reserved|unused|placeholder|extra_id", re.IGNORECASE)
TRAINED_CHARACTERS = 100_000_000  # of the data: enough for the merges of 50,000 tokens, minutes of work
DEFAULT_SIZE = 32768  # of a tokenizer trained here
ASKED_SIZE = "trained_vocab_size"  # in the saved settings of a tokenizer trained here: what was asked for
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any of them holds a vocabulary
_ADVICE = (
    "Put the files of the tokenizer that the model was trained with into that folder, or, in a recipe, set "
    "tokenizer.name to a folder or Hub name that has them."
)
_END, _PAD = "<|endoftext|>", "<|padding|>"  # of tokenizers trained here; GPT-NeoX's names


def load_tokenizer(
    section: TokenizerSection,
    model_name: str | None,
    revision: str | None = None,
    *,
    config: PreTrainedConfig | None = None,
    texts: Iterable[str] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer that a recipe names, or else the model's own, or else the one of the model's layout.

    config: the model's, whose vocabulary must hold all tokens; None for a model that is yet to be made. texts: what
    `tokenizer.train` is trained on (`BoundedTexts`). Pads on the right, as training needs it.

    Raises RecipeError, naming tokenizer.name, if there is none; for a chat template that cannot be used, with file and
    line; if it has no eos; if it has more tokens than the model has embeddings.
    """
    if section.train:
        if texts is None:
            raise ValueError("a tokenizer that is to be trained needs texts")
        tokenizer = train_tokenizer(texts, section.vocab_size or DEFAULT_SIZE)
    else:
        tokenizer = _find_tokenizer(section.name, model_name, revision)
    return adopt_tokenizer(tokenizer, section, config)


def adopt_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    section: TokenizerSection | None = None,
    config: PreTrainedConfig | None = None,
) -> PreTrainedTokenizerBase:
    """Check a tokenizer and set it up for training, in place: pad token, padding side, the recipe's chat template.

    Raises RecipeError as `load_tokenizer` does.
    """
    if tokenizer.eos_token_id is None:
        raise RecipeError(
            f"tokenizer.name: {_name(tokenizer)} has no eos token, so a model could not learn to stop. Use another one."
        )
    rows = None if config is None else config.get_text_config().vocab_size
    check_vocabulary(tokenizer, rows)
    if section is not None and section.chat_template is not None:
        tokenizer.chat_template = read_template(Path(section.chat_template), tokenizer)
    _choose_pad(tokenizer, rows)
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> None:
    """Raises RecipeError if the tokenizer has tokens beyond the model's `rows` embeddings (None: not known)."""
    largest = max(tokenizer.get_vocab().values())
    if rows is not None and largest >= rows:
        raise RecipeError(
            f"tokenizer.name: {_name(tokenizer)} has tokens up to number {largest:,}, the model has embeddings for "
            f"{rows:,}. It belongs to another model: leave tokenizer.name out, or name this model's own."
        )


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """One line for the table at the start of a run: size, eos, pad, bos, chat template."""
    parts = [
        f"{_name(tokenizer)}: {len(tokenizer):,} tokens",
        f"eos {tokenizer.eos_token} ({tokenizer.eos_token_id})",
        f"pad {tokenizer.pad_token} ({tokenizer.pad_token_id})",
        f"bos {tokenizer.bos_token} put first" if adds_bos(tokenizer) else "no bos",
        "with a chat template" if tokenizer.chat_template else "no chat template",
    ]
    return ", ".join(parts)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path, chat_template: str | None = None) -> None:
    """Write the tokenizer as a run's users need it: padding on the left, since right pads enter the generating state.

    chat_template: of the data (`PreparedData.chat_template`), put in the place of the tokenizer's own; None: its own.
    The tokenizer itself is not changed.
    """
    generation_tokenizer(tokenizer, chat_template).save_pretrained(str(folder))


def generation_tokenizer(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> PreTrainedTokenizerBase:
    """A copy that pads on the left, with the chat template of the data if there is one; see `save_tokenizer`."""
    copied = copy.deepcopy(tokenizer)
    copied.padding_side = "left"
    copied.init_kwargs["padding_side"] = "left"  # save_pretrained writes what the tokenizer was made with
    if chat_template is not None:
        copied.chat_template = chat_template
    return copied


class BoundedTexts:
    """The first of some texts, of at most so many characters in all (the last one is cut), counted as they are read."""

    def __init__(self, texts: Iterable[str], most: int) -> None:
        self._texts, self.most = texts, most
        self.count = self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            text = text[: self.most - self.characters]
            self.count += 1
            self.characters += len(text)
            yield text
            if self.characters >= self.most:
                return

    def __str__(self) -> str:
        end = "" if self.characters < self.most else ", then no more"
        return f"trained on the first {self.count:,} texts, {self.characters:,} characters{end}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2) of at most `vocab_size` tokens.

    Reads any text without an unknown token. eos is <|endoftext|> (0), pad <|padding|> (1). The same texts in the same
    order give the same tokenizer. Raises RecipeError if `vocab_size` cannot hold the 256 bytes and these two.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [_END, _PAD]
    smallest = len(special) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise RecipeError(f"tokenizer.vocab_size: {vocab_size} is too small; 256 bytes and 2 marks need {smallest}.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    marks = {"eos_token": _END, "bos_token": _END, "pad_token": _PAD, ASKED_SIZE: vocab_size}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **marks)


def read_template(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A chat template from a .jinja file, tried on a question and an answer.

    Raises RecipeError with file and line if it is not a template, or cannot write that conversation so that the
    answer's place in it is found.
    """
    from jinja2 import TemplateSyntaxError

    try:
        template = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"tokenizer.chat_template: {path} is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise RecipeError(f"tokenizer.chat_template: {path} cannot be read: {error.strerror}.") from error
    if not template.strip():
        raise RecipeError(f"tokenizer.chat_template: {path} is empty.")
    trial = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": "An answer."}]
    try:
        Renderer(tokenizer, template).pieces(trial)
    except RecipeError as error:
        cause = error.__cause__
        if isinstance(cause, TemplateSyntaxError):
            raise RecipeError(f"tokenizer.chat_template: {path}, line {cause.lineno}: {cause.message}.") from cause
        raise RecipeError(f"tokenizer.chat_template: {path}: on a question and an answer, {error}") from error
    return template


# -- finding ---------------------------------------------------------------------------------------------------------


def _find_tokenizer(name: str | None, model_name: str | None, revision: str | None) -> PreTrainedTokenizerBase:
    if name is not None:
        return read_tokenizer(name, None, "tokenizer.name")
    if model_name is None:
        raise RecipeError("tokenizer.name is missing, and so is a model that has a tokenizer of its own.")
    try:
        return read_tokenizer(model_name, revision, "model.name")
    except RecipeError as error:
        default = _default_of_layout(model_name, revision)
        if default is None or default == model_name:
            raise
        logger.info("%s carries no tokenizer; using %s, that of its layout's published models", model_name, default)
        try:
            return read_tokenizer(default, None, "tokenizer.name")
        except RecipeError as second:
            raise RecipeError([*error.mistakes, *second.mistakes]) from second


def _default_of_layout(model_name: str, revision: str | None) -> str | None:
    from ssm_tune.layouts import open_checkpoint

    try:
        return open_checkpoint(model_name, revision).default_tokenizer
    except RecipeError:  # what is wrong with the checkpoint is said when it is read
        return None


def read_tokenizer(name: str, revision: str | None, where: str, **keys: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a Hub name, with `keys` changed.

    Raises RecipeError, which begins with `where`, if there is none, or it is damaged.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(name).expanduser()
    file = folder / "tokenizer.json"
    for written in (file, folder / "tokenizer_config.json"):
        if written.is_file():
            _check_json(written, where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name, revision=revision, **keys)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        if file.is_file():  # beside a config that transformers does not know, as state-spaces'
            try:
                return PreTrainedTokenizerFast.from_pretrained(str(folder), **keys)
            except Exception as damage:  # tokenizers has no class of its own for what is no tokenizer
                raise RecipeError(f"{where}: {file} cannot be read: {type(damage).__name__} {damage}.") from damage
        raise RecipeError(_no_tokenizer(name, where, str(error).strip().splitlines()[:1])) from error
    # Of a folder without tokenizer files transformers makes an empty tokenizer from the config's model_type.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise RecipeError(_no_tokenizer(name, where, []))
    return tokenizer


def _check_json(file: Path, where: str) -> None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{where}: {file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: {file} cannot be read: it is no JSON object.")


def _no_tokenizer(name: str, where: str, reason: list[str]) -> str:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        told = [f"{name} could not be loaded as a tokenizer.", *(f"({line})" for line in reason)]
        return " ".join([f"{where}:", *told, "Set tokenizer.name to a tokenizer, a folder or a Hub name."])
    if any((folder / file).is_file() for file in _FILES):
        found = " ".join([f"{name} has a tokenizer that cannot be read.", *(f"({line})" for line in reason)])
    else:
        found = f"{name} has no tokenizer files (tokenizer.json, or tokenizer.model or vocab.json)."
    return f"{where}: {found} {_ADVICE}"


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "the tokenizer"


# -- padding ---------------------------------------------------------------------------------------------------------


def _choose_pad(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> None:
    """Give the tokenizer a pad token that is not eos, and say which and why."""
    eos = tokenizer.eos_token
    if tokenizer.pad_token is not None and tokenizer.pad_token != eos:
        return
    had = "its own pad token is eos" if tokenizer.pad_token == eos else "it has no pad token"
    taken = {eos, tokenizer.bos_token}
    spare = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content not in taken]
    spare = sorted((token for token in spare if _SPARE.search(token)), key=lambda token: "pad" not in token.lower())
    if tokenizer.unk_token is not None and tokenizer.unk_token not in taken:
        spare.append(tokenizer.unk_token)
    if spare:
        tokenizer.pad_token = spare[0]
    elif rows is None or max(tokenizer.get_vocab().values()) + 1 < rows:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    else:
        other = tokenizer.bos_token if tokenizer.bos_token not in (None, eos) else eos
        tokenizer.pad_token = other
        logger.warning(
            "padding with %s, which has a meaning of its own: %s, no token is reserved, and the model has no embedding "
            "to spare for a new one. Padding is masked by its place and never learned; eos is.",
            other,
            had,
        )
        return
    logger.info("padding with %s (%d): %s", tokenizer.pad_token, tokenizer.pad_token_id, had)
