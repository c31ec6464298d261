"""`ssm-tune generate RUN|MODEL`: one prompt, told as it is written, or a file of prompts, in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ssm_tune.data.compressed import kind_of
from ssm_tune.data.files import SUFFIXES, is_read, read_file, unit_of
from ssm_tune.data.formatting import check_text
from ssm_tune.recipe import RecipeError


def answer_source(
    source: str | Path,
    *,
    prompt: str | None = None,
    prompts: str | Path | None = None,
    stream: bool = False,
    batch_size: int = 8,
    chat: bool | None = None,
    **settings: Any,
) -> None:
    """What the command line calls: load a run or a model and print its answers.

    The answer to one prompt is printed alone. Those to a file of prompts are printed as JSON lines, {"prompt": ...,
    "answer": ...}, in the file's order, each batch as it is done.

    Args:
        prompts: a file, see `read_prompts`; this or `prompt`.
        stream: print one prompt's answer while it is written.
        batch_size: prompts of a file that are answered together.
        chat, settings: see `generate_text`.

    Raises:
        RecipeError: both or neither of prompt and prompts; a file that cannot be read; what `generate_text` refuses.
    """
    if (prompt is None) == (prompts is None):
        raise RecipeError("generate: give either one prompt (--prompt) or a file of prompts (--prompts).")
    if prompts is not None and stream:
        raise RecipeError("generate: --stream tells one prompt's answer as it is written; leave out --prompts.")
    if batch_size < 1:
        raise RecipeError(f"batch_size: {batch_size!r} must be 1 or more.")
    texts = [check_text(prompt, "the prompt", "generate")] if prompts is None else read_prompts(prompts)
    from ssm_tune.outputs.generate import check_settings, stream_text
    from ssm_tune.outputs.run import load_source

    check_settings(settings)  # before the model is loaded, which may take minutes
    model, tokenizer = load_source(source)
    if prompts is not None:
        for text, answer in zip(
            texts, answer_prompts(model, tokenizer, texts, batch_size, chat=chat, **settings), strict=True
        ):
            print(json.dumps({"prompt": text, "answer": answer}, ensure_ascii=False), flush=True)
        return
    said = stream_text(model, tokenizer, texts[0], _print_piece if stream else _say_nothing, chat=chat, **settings)
    print("" if stream else said)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _say_nothing(text: str) -> None:
    pass


def answer_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 8, **settings: Any
) -> Iterator[str]:
    """The answers to prompts, in their order, a batch at a time. With a seed each batch has one of its own."""
    from ssm_tune.outputs.decoding.loop import Decoder
    from ssm_tune.outputs.generate import generate_texts

    seed, decoder = settings.pop("seed", None), Decoder()
    for first in range(0, len(prompts), batch_size):
        changed = {} if seed is None else {"seed": seed + first}
        batch = prompts[first : first + batch_size]
        yield from generate_texts(model, tokenizer, batch, decoder=decoder, **settings, **changed)


def read_prompts(file: str | Path) -> list[str]:
    """The prompts in a file: the lines of a .txt file, empty ones left out, or the column `prompt` of rows.

    Raises:
        RecipeError: no such file; a kind of file that is not known; a row without `prompt`; no prompt at all.
    """
    file = Path(file)
    if not file.is_file():
        raise RecipeError(f"generate: there is no file {file}.")
    if not is_read(file):
        raise RecipeError(f"{file}: prompts are read from {', '.join(sorted(SUFFIXES))}.")
    prompts = []
    for number, row in read_file(file):
        if kind_of(file) == ".txt":
            prompts += [line for line in row["text"].splitlines() if line.strip()]
            continue
        place = f"{file.name}, {unit_of(file)} {number}"
        if not isinstance(row, dict) or "prompt" not in row:
            columns = list(row) if isinstance(row, dict) else []
            near = get_close_matches("prompt", map(str, columns), n=1)
            hint = f" Is it {near[0]!r}? Rename it." if near else f" It has: {', '.join(map(str, columns)) or 'none'}."
            raise RecipeError(f"{place}: there is no column prompt.{hint}")
        prompts.append(check_text(row["prompt"], "the prompt", place))
    if not prompts:
        raise RecipeError(f"{file}: there is no prompt in it.")
    return prompts
