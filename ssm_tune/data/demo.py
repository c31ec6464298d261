"""The demo corpus: Python's own documentation, read from the Python that runs.

Two data sets that every machine has, without network and without a file in this package. In a recipe:

    data: {train: [{path: python-docs, split: train}], eval: [{path: python-docs, split: eval}]}

- `python-docs`: question and answer rows (`question`, `answer`, `topic`), one per documented function, class, module
  or section, the answer being the first sentences of its documentation.
- `python-docs-text`: plain text (`text`, `topic`), one document per language topic or library module, for pretraining.

A topic is one entry of `pydoc_data.topics` (the language reference that `help("with")` prints) or one module of the
standard library. Whole topics are held out: a topic is in `eval` by a hash of its name, for both data sets alike, so
a base model pretrained on the one has never read what the other evaluates. An answer that a topic of `train` gives in
the same words is left out of `eval`.

The text is copyright the Python Software Foundation, under the PSF License (https://docs.python.org/3/license.html).
It differs a little between Python versions; for one version it is always the same, in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ssm_tune.recipe import RecipeError

QUESTIONS = "python-docs"
TEXT = "python-docs-text"
NAMES = (QUESTIONS, TEXT)
SPLITS = ("train", "eval")

_HELD_OUT = 10  # one topic in so many
_SHORTEST, _LONGEST = 40, 320  # characters of an answer
_ROWS_PER_TOPIC = 40  # else a few large packages (email, asyncio) would be most of the corpus
# Absent from small installations, about Python's own development, or generated (encodings): not for this corpus.
_LEFT_OUT = {
    *("antigravity", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib", "pydoc_data"),
    *("test", "this", "tkinter", "turtle", "turtledemo", "venv"),
}
_NOT_LIBRARY = {"test", "tests", "idle_test"}  # folders inside packages
# Written in C: their documentation is only in the running objects. All are safe to import.
_COMPILED = ("builtins", "array", "binascii", "cmath", "gc", "itertools", "marshal", "math", "sys", "time", "zlib")


class Entry(NamedTuple):
    """One documented thing. `asked` is the question about it, `said` its documentation, paragraphs kept."""

    topic: str
    heading: str
    asked: str
    said: str


def read_demo(name: str, split: str = "train") -> list[dict[str, str]]:
    """The rows of the demo corpus `name` (`python-docs` or `python-docs-text`), `split` being train or eval.

    Takes one to three seconds the first time in a process. Raises RecipeError for another split, or where this
    Python was installed without its documentation.
    """
    if split not in SPLITS:
        raise RecipeError(f"data: {name} has no split {split!r}. It has: {', '.join(SPLITS)}.")
    key = "answer" if name == QUESTIONS else "text"
    rows = _question_rows(_entries()) if name == QUESTIONS else _documents(_entries())
    if len(rows) < 100:
        raise RecipeError(
            f"data: {name} is Python's own documentation, and {sys.executable} was installed without most of it "
            f"({len(rows)} entries found under {_library()}). Use a full installation of Python, or another data set."
        )
    train = [row for row in rows if not is_held_out(row["topic"])]
    if split == "train":
        return train
    seen = {row[key] for row in train}
    return [row for row in rows if is_held_out(row["topic"]) and row[key] not in seen]


def is_held_out(topic: str) -> bool:
    """Whether `topic` is evaluated on and never trained on."""
    return int(hashlib.sha256(topic.encode()).hexdigest()[:8], 16) % _HELD_OUT == 0


def _question_rows(entries: tuple[Entry, ...]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    seen: set[tuple[str, str]] = set()
    count: dict[str, int] = {}
    for entry in entries:
        answer = _first_sentences(entry.said)
        if not _SHORTEST <= len(answer) <= _LONGEST or (entry.topic, answer) in seen:
            continue
        if count.get(entry.topic, 0) >= _ROWS_PER_TOPIC:
            continue
        seen.add((entry.topic, answer))
        count[entry.topic] = count.get(entry.topic, 0) + 1
        rows.append({"question": entry.asked, "answer": answer, "topic": entry.topic})
    return rows


def _documents(entries: tuple[Entry, ...]) -> list[dict[str, str]]:
    parts: dict[str, list[str]] = {}
    for entry in entries:
        text = f"{entry.heading}\n\n{entry.said}" if entry.heading else entry.said
        parts.setdefault(entry.topic, []).append(text)
    return [{"text": "\n\n".join(texts), "topic": topic} for topic, texts in parts.items()]


@lru_cache(maxsize=1)
def _entries() -> tuple[Entry, ...]:
    found = (*_language_topics(), *_compiled_modules(), *_library_modules())
    return tuple(entry for entry in found if entry.said)


def _language_topics() -> Iterator[Entry]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # small installations leave pydoc_data out; the library's docstrings remain
        return
    for name in sorted(topics):
        for title, body in _sections(_clean(topics[name])):
            yield Entry(name, title, f"What does Python's documentation say about {_plain_title(title, name)}?", body)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Titles and bodies of a topic: a title is a line underlined by a row of *, =, - or similar."""
    pieces = re.split(r"^(\S.*)\n([*=\-~^+#])\2{3,}$", text, flags=re.MULTILINE)
    for title, body in zip(pieces[1::3], pieces[3::3], strict=True):
        yield title.strip(), body.strip()


def _plain_title(title: str, name: str) -> str:
    title = re.sub(r"^[\d.]+\s+", "", title).replace('"', "")
    if not title:
        return name
    return title if title.isupper() or not title[1:2].islower() else title[0].lower() + title[1:]


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_modules() -> Iterator[Entry]:
    """Docstrings of the standard library's Python files, read as text: importing them would run them."""
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_"):
            continue
        package = _library() / name
        files = sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
        for path in files:
            parts = path.relative_to(_library()).with_suffix("").parts
            private = any(part.startswith("_") and part != "__init__" for part in parts)
            if path.is_file() and not private and _NOT_LIBRARY.isdisjoint(parts):
                yield from file_entries(name, ".".join(part for part in parts if part != "__init__"), path)


def file_entries(topic: str, module: str, path: Path) -> Iterator[Entry]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # a few library files exist to be syntax errors
        return
    yield Entry(topic, module, f"What is Python's module {module} for?", _clean(ast.get_docstring(tree) or ""))
    yield from _member_entries(topic, module, tree.body)


def _member_entries(topic: str, owner: str, body: list[ast.stmt]) -> Iterator[Entry]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{owner}.{node.name}"
        said = _clean(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            yield Entry(topic, name, f"What is {name}?", said)
            yield from _member_entries(topic, name, node.body)
        else:
            yield Entry(topic, f"{name}({', '.join(_arguments(node))})", f"What does {name} do?", said)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    spec = node.args
    for argument in [*spec.posonlyargs, *spec.args]:
        if argument.arg not in ("self", "cls"):
            yield argument.arg
    if spec.vararg:
        yield f"*{spec.vararg.arg}"
    yield from (argument.arg for argument in spec.kwonlyargs)
    if spec.kwarg:
        yield f"**{spec.kwarg.arg}"


def _compiled_modules() -> Iterator[Entry]:
    for name in _COMPILED:
        try:
            module = importlib.import_module(name)
        except ImportError:  # zlib is optional when Python is built
            continue
        for member, value in sorted(vars(module).items()):
            if member.startswith("_") or not (inspect.isclass(value) or inspect.isbuiltin(value)):
                continue
            if member.endswith("hook"):  # of sys: debuggers and test tools put their own in its place
                continue
            if value.__name__ != member:  # an alias, as IOError is of OSError
                continue
            full = member if name == "builtins" else f"{name}.{member}"
            # The built-in types are each as large as a module: one topic per type.
            topic = member if name == "builtins" and inspect.isclass(value) else name
            yield from _object_entries(topic, full, value)


def _object_entries(topic: str, name: str, value: object) -> Iterator[Entry]:
    is_class = inspect.isclass(value)
    if isinstance(value, type) and issubclass(value, BaseException):
        topic = "exceptions"
    said = _without_signature(value.__doc__) if isinstance(value.__doc__, str) else ""
    yield Entry(topic, name, f"What is {name}?" if is_class else f"What does {name} do?", said)
    if is_class:
        for member, method in sorted(vars(value).items()):
            if not member.startswith("_") and inspect.isroutine(method) and isinstance(method.__doc__, str):
                yield Entry(
                    topic, f"{name}.{member}", f"What does {name}.{member} do?", _without_signature(method.__doc__)
                )


def _without_signature(doc: str) -> str:
    """C docstrings often begin with lines such as `max(iterable, *[, key=func]) -> value`."""
    lines = inspect.cleandoc(doc).splitlines()
    while lines and (not lines[0].strip() or re.match(r"^[\w.]+\(.*\)\s*(->.*)?$", lines[0])):
        lines.pop(0)
    return _clean("\n".join(lines))


_PUNCTUATION = str.maketrans(
    {0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'", 0x2026: "...", 0x2013: "-", 0x2014: "-", 0xA0: " "}
)


def _clean(text: str) -> str:
    text = text.translate(_PUNCTUATION).expandtabs(8)
    text = re.sub(r":[a-z:]+:`~?([^`]+)`", r"\1", text)  # reStructuredText roles
    text = text.replace("``", "`")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())).strip()


def _first_sentences(said: str) -> str:
    """The first paragraph, and the next ones while they are prose and short enough; whole sentences only."""
    sentences: list[str] = []
    for paragraph in said.split("\n\n"):
        lines = paragraph.splitlines()
        if not lines or any(line[:1] in " *-+|>=." or "::" in line for line in lines):
            break  # a list, a table, an example: not prose
        prose = " ".join(" ".join(lines).split())
        sentences += re.split(r"(?<=[.!?]) (?=[A-Z\"'*`])", prose)
        if not prose.endswith("."):
            break
    answer = ""
    for sentence in sentences:
        longer = f"{answer} {sentence}".lstrip()
        if len(longer) > _LONGEST or sentence.endswith(":"):  # what follows a colon is an example
            break
        answer = longer
    return answer
