"""`ssm-tune prepare`: the recipe's text as tokens in a folder; and the tokenizer that a recipe has made of its data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ssm_tune.data.prepare import Task, training_texts
from ssm_tune.data.stream_data import is_streamed, shard_writer, stream_texts
from ssm_tune.data.token_shards import INDEX, TOKENIZER, TokenShards
from ssm_tune.recipe import DataSection, Recipe, RecipeError, TokenizerSection
from ssm_tune.tokenizer import ASKED_SIZE, DEFAULT_SIZE, TRAINED_CHARACTERS, BoundedTexts, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_shards(recipe: Recipe, console: Console | None = None) -> Path:
    """Write the tokens of a recipe's data to `data.prepared`, or finish what was begun there, or check what is there.

    Raises RecipeError: no data.prepared; a folder made with another tokenizer or of other data; damaged files.
    """
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    section = recipe.data
    if section.prepared is None:
        raise RecipeError("data.prepared is missing: the folder that the tokens go to. Add data.prepared=FOLDER")
    folder = Path(section.prepared)
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"data.prepared: {folder} is a file. Name a folder.")
    tokenizer, told = _tokenizer_of(recipe, folder)
    for line in told:
        console.print(line)
    if (folder / INDEX).is_file():
        shards = TokenShards(folder)
        shards.check_recipe(tokenizer, section)
        shards.check(whole=True)
        console.print(f"{folder} is prepared already; its checksums are right.")
        return folder
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "progress.json").is_file():
        rest = [entry.name for entry in folder.iterdir() if entry.name != TOKENIZER and not entry.name.startswith(".")]
        if rest:
            raise RecipeError(f"data.prepared: {folder} holds something else ({rest[0]}). Name an empty or new folder.")
    writer = shard_writer(section, tokenizer)
    if writer.resume():
        console.print(f"going on in {folder} after {len(writer.parts)} parts")
    begun = time.perf_counter()

    def report(documents: int, tokens: int) -> None:
        rate = tokens / (time.perf_counter() - begun)
        console.print(f"{documents:,} documents, {tokens:,} tokens ({rate:,.0f} a second)")

    writer.write(report)
    for part in writer.parts:
        console.print(f"{folder / part.file}: {part.split}, {part.documents:,} documents, {part.tokens:,} tokens")
    return folder


def _tokenizer_of(recipe: Recipe, folder: Path) -> tuple[PreTrainedTokenizerBase, list[str]]:
    if recipe.tokenizer.train:
        return trained_tokenizer(recipe.tokenizer, recipe.data, "pretrain", None, None)
    return load_tokenizer(recipe.tokenizer, recipe.model.name, recipe.model.revision), []


def trained_tokenizer(
    section: TokenizerSection, data: DataSection, task: Task, rows: Any, checkpoint: Path | None
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer that `tokenizer.train` asks for, and a sentence about it.

    It is made once: afterwards it is the prepared folder's, or the one of the checkpoint that is gone on from.
    """
    known = [] if checkpoint is None else [checkpoint]
    known += [] if data.prepared is None else [Path(data.prepared) / TOKENIZER]
    for folder in known:
        if (folder / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(TokenizerSection(str(folder), section.chat_template), None)
            wanted = section.vocab_size or DEFAULT_SIZE
            made = tokenizer.init_kwargs.get(ASKED_SIZE, wanted)  # it has fewer tokens where the data gave no more
            if made != wanted or len(tokenizer) > wanted:
                raise RecipeError(
                    f"tokenizer.vocab_size: {wanted:,}, but the tokenizer in {folder} was made for {made:,}, with "
                    f"{len(tokenizer):,} tokens. Write that number, or use another folder."
                )
            return tokenizer, [f"tokenizer: {len(tokenizer):,} tokens, from {folder}"]
    found = stream_texts(data) if is_streamed(data) else training_texts(data, task, rows)
    texts = BoundedTexts(found, TRAINED_CHARACTERS)
    tokenizer = load_tokenizer(section, None, texts=texts)
    return tokenizer, [f"tokenizer: {len(tokenizer):,} tokens, {texts}"]
