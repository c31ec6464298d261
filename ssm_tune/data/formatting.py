"""From a row of any usual shape to one Example: what is read, and what is learned.

| columns | becomes |
| --- | --- |
| `messages` (role, content), `conversations` (from, value) | a conversation; loss on the assistant's turns |
| `prompt`, `completion` as text | exactly this text, nothing between; loss on the completion |
| `prompt`, `completion` as lists of messages | a conversation; loss on the assistant's turns of `completion` |
| `question`, `answer` | a conversation of one turn each |
| `instruction`, `input` (may be absent or empty), `output` | one turn each, the input after an empty line |
| `text` | a document; loss on everything |

Other names: `columns` maps our name to the data's, `columns: {prompt: query, completion: reply}`. Our names stand on
the left; the other way round is refused, since {prompt: completion, completion: prompt} has a meaning too.
Conversations are written by the tokenizer's chat template, and where it has none as plain lines (`ssm_tune.data.chat`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from ssm_tune.recipe import RecipeError

SHAPES: dict[str, tuple[str, ...]] = {  # in the order of preference, where a row has the columns of several
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = {"instruction": ("input",)}
NAMES = tuple(dict.fromkeys([name for names in SHAPES.values() for name in names] + ["input"]))
ROLES = {"system", "developer", "user", "assistant", "tool"}
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """One row. `kind` text: `text` is a document. completion: `prompt` and `completion` are exact texts.

    chat: `messages`, of which assistant turns from index `loss_from` on are learned.
    `part` names what is learned: the setting `<part>_only_loss: false` asks for a loss on everything instead.
    """

    kind: Literal["text", "completion", "chat"]
    text: str = ""
    prompt: str = ""
    completion: str = ""
    messages: tuple[Message, ...] = ()
    loss_from: int = 0
    part: Literal["completion", "assistant"] = "completion"

    def key(self) -> int:
        """A 64-bit number that rows of equal content share."""
        content = json.dumps([self.text, self.prompt, self.completion, self.messages, self.loss_from])
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little", signed=True)

    def texts(self) -> list[str]:
        """All text of the row, for training a tokenizer."""
        found = [self.text, self.prompt, self.completion, *(message["content"] for message in self.messages)]
        return [text for text in found if text]


def check_columns(columns: Mapping[str, str] | None, where: str) -> None:
    """Check a recipe's `columns` mapping. Raises RecipeError with what was probably meant."""
    if not columns:
        return
    unknown = [name for name in columns if name not in NAMES]
    if unknown and all(value in NAMES for value in columns.values()):
        swapped = ", ".join(f"{value}: {name}" for name, value in columns.items())
        raise RecipeError(f"{where}.columns maps our names to the data's, the other way round: {{{swapped}}}.")
    if unknown:
        near = get_close_matches(unknown[0], NAMES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RecipeError(f"{where}.columns: {unknown[0]} is not one of {', '.join(NAMES)}.{hint}")
    shapes = [shape for shape, names in SHAPES.items() if set(columns) <= {*names, *OPTIONAL.get(shape, ())}]
    if not shapes:
        raise RecipeError(f"{where}.columns: {', '.join(columns)} do not belong together. {_known_shapes()}")
    missing = [name for name in SHAPES[shapes[0]] if name not in columns]
    if missing:
        raise RecipeError(f"{where}.columns names {', '.join(columns)} but not {' or '.join(missing)}.")


class Formatter:
    """Turns the rows of one source into Examples; all of them must have the shape of the first.

    `task` pretrain takes `text` only. Counts what it leaves out (see `notes`).
    """

    def __init__(self, columns: Mapping[str, str] | None = None, *, task: str = "sft") -> None:
        self.columns = dict(columns or {})
        self.task = task
        self.shape: str | None = None
        self.first = ""  # the place of the first row, for messages about mixed shapes
        self.unused: set[str] = set()
        self.counts: Counter[str] = Counter()

    def format(self, row: Any, where: str) -> Example:
        """The Example of one row; `where` names it in messages. Raises RecipeError if the row is not usable."""
        if not isinstance(row, Mapping):
            raise RecipeError(f"{where}: a row must be an object of columns, not {_a(row)}.")
        shape = self._shape_of(row, where)
        names = {*SHAPES[shape], *OPTIONAL.get(shape, ())}
        self.unused |= set(row) - {self.columns.get(name, name) for name in names}
        match shape:
            case "text":
                return Example("text", text=self._text(row, "text", where))
            case "messages" | "conversations":
                value = self._value(row, shape, where)
                messages = self._messages(value, self._name(shape), where, sharegpt=shape == "conversations")
                return Example("chat", messages=self._conversation(messages, where), part="assistant")
            case "prompt":
                return self._prompt(row, where)
            case "question":
                asked, said = self._text(row, "question", where), self._text(row, "answer", where)
            case _:
                asked, said = self._text(row, "instruction", where), self._text(row, "output", where)
                if row.get(self._name("input")) is not None:
                    more = self._text(row, "input", where, may_be_empty=True)
                    asked = f"{asked}\n\n{more}" if more.strip() else asked
        return Example("chat", messages=({"role": "user", "content": asked}, {"role": "assistant", "content": said}))

    def notes(self) -> list[str]:
        """What the rows lost on the way, one sentence each."""
        found = []
        if self.unused:
            found.append(f"columns not used: {', '.join(sorted(map(str, self.unused)))}")
        found += [f"{count:,} {what}" for what, count in self.counts.items()]
        return found

    # -- shapes -------------------------------------------------------------------------------------------------

    def _name(self, name: str) -> str:
        return self.columns.get(name, name)

    def _shape_of(self, row: Mapping[str, Any], where: str) -> str:
        if self.columns:
            self.shape = next(
                shape for shape, names in SHAPES.items() if set(self.columns) <= {*names, *OPTIONAL.get(shape, ())}
            )
            if self.task == "pretrain" and self.shape != "text":
                raise RecipeError(f"{where}: pretraining reads text. Name the column: columns: {{text: ...}}.")
            return self.shape
        found = [shape for shape, names in SHAPES.items() if all(row.get(name) is not None for name in names)]
        if self.task == "pretrain":
            found = [shape for shape in found if shape == "text"]
        if self.shape is None:
            if not found:
                raise RecipeError(f"{where}: {self._unrecognised(row)}")
            self.shape, self.first = found[0], where
            if len(found) > 1:
                self.counts[f"possible shapes; {found[0]} is read (name columns to choose)"] = len(found)
        elif self.shape not in found:
            missing = [name for name in SHAPES[self.shape] if row.get(name) is None]
            if not found:
                raise RecipeError(f"{where}: no value in column {missing[0]}.")
            raise RecipeError(
                f"{where}: this row has {' and '.join(SHAPES[found[0]])}, the first ({self.first}) has "
                f"{' and '.join(SHAPES[self.shape])}. One source has one shape: put them into two files."
            )
        return self.shape

    def _unrecognised(self, row: Mapping[str, Any]) -> str:
        columns = ", ".join(map(str, row)) or "none"
        if self.task == "pretrain":
            return f"pretraining needs a column text; this row has: {columns}. Name it: columns: {{text: ...}}."
        for names in SHAPES.values():
            present = [name for name in names if row.get(name) is not None]
            if present and len(present) < len(names):
                missing = next(name for name in names if name not in present)
                empty = "is null" if missing in row else "is missing"
                return f"column {missing} {empty} beside {present[0]}; this row has: {columns}."
        return (
            f"the columns are {columns}. {_known_shapes()} Or name two columns: "
            "columns: {prompt: <column>, completion: <column>}."
        )

    def _value(self, row: Mapping[str, Any], name: str, where: str) -> Any:
        column = self._name(name)
        if row.get(column) is None:
            problem = f"column {column} is null" if column in row else f"no column {column}"
            near = get_close_matches(column, [str(key) for key in row], n=1)
            hint = f" Did you mean {near[0]}?" if near and column not in row else ""
            raise RecipeError(f"{where}: {problem}; this row has: {', '.join(map(str, row)) or 'none'}.{hint}")
        return row[column]

    # -- values -------------------------------------------------------------------------------------------------

    def _text(self, row: Mapping[str, Any], name: str, where: str, *, may_be_empty: bool = False) -> str:
        value = self._value(row, name, where)
        return check_text(value, f"column {self._name(name)}", where, may_be_empty=may_be_empty)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Example:
        prompt, completion = self._value(row, "prompt", where), self._value(row, "completion", where)
        if isinstance(prompt, str) and isinstance(completion, str):
            # An empty prompt is a completion of nothing: the model then learns to begin.
            prompt = check_text(prompt, f"column {self._name('prompt')}", where, may_be_empty=True)
            completion = check_text(completion, f"column {self._name('completion')}", where)
            return Example("completion", prompt=prompt, completion=completion)
        if isinstance(prompt, list | tuple) and isinstance(completion, list | tuple):
            asked = self._messages(prompt, self._name("prompt"), where)
            said = self._messages(completion, self._name("completion"), where)
            messages = self._conversation([*asked, *said], where)
            if not any(message["role"] == "assistant" for message in messages[len(asked) :]):
                raise RecipeError(f"{where}: column {self._name('completion')} has no assistant turn.")
            return Example("chat", messages=messages, loss_from=len(asked))
        raise RecipeError(
            f"{where}: columns {self._name('prompt')} and {self._name('completion')} must both be text, or lists of "
            f"messages; they are {_a(prompt)} and {_a(completion)}."
        )

    def _messages(self, value: Any, column: str, where: str, *, sharegpt: bool = False) -> list[Message]:
        role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
        if not isinstance(value, list | tuple) or not value:
            raise RecipeError(f"{where}: column {column} must be a list of turns, not {_a(value)}.")
        messages = []
        for number, turn in enumerate(value, 1):
            place = f"turn {number} of {column}"
            if not isinstance(turn, Mapping) or role_key not in turn or content_key not in turn:
                raise RecipeError(f"{where}: {place} must be an object with {role_key} and {content_key}.")
            role = turn[role_key]
            role = _SHAREGPT.get(role, role) if sharegpt and isinstance(role, str) else role
            if not isinstance(role, str) or role not in ROLES:
                near = get_close_matches(str(role).lower(), ROLES, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise RecipeError(f"{where}: {place} has the {role_key} {role!r}, not one of {_roles(sharegpt)}.{hint}")
            content = check_text(turn[content_key], place, where, may_be_empty=role in ("system", "tool"))
            if role == "system" and not content.strip():
                self.counts["empty system turns left out"] += 1
                continue
            messages.append({"role": role, "content": content})
        return messages

    def _conversation(self, messages: list[Message], where: str) -> tuple[Message, ...]:
        turns = [message["role"] for message in messages]
        if "assistant" not in turns:
            raise RecipeError(f"{where}: no turn of the assistant: there is nothing to learn.")
        if next(role for role in turns if role != "system") == "assistant":
            raise RecipeError(f"{where}: the assistant speaks first: a turn of the user must come before.")
        last = len(turns) - turns[::-1].index("assistant")
        if last < len(turns):
            self.counts["conversations cut after their last assistant turn"] += 1
        return tuple(messages[:last])


def check_text(value: Any, what: str, where: str, *, may_be_empty: bool = False) -> str:
    """`value` if it is usable text. Raises RecipeError for another type, a lone surrogate, or no text at all."""
    if not isinstance(value, str):
        raise RecipeError(f"{where}: {what} must be text, not {_a(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise RecipeError(
            f"{where}: {what} has half a character (the lone surrogate \\u{code:04x} at position {error.start}), "
            "which no tokenizer can read. Repair the text or leave the row out."
        ) from error
    if not may_be_empty and not value.strip():
        raise RecipeError(f"{where}: {what} is empty.")
    return value


def _a(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", type(None): "null"}
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def _roles(sharegpt: bool) -> str:
    return ", ".join(_SHAREGPT if sharegpt else sorted(ROLES))


def _known_shapes() -> str:
    shapes = " | ".join(" + ".join(names) for names in SHAPES.values())
    return f"Known shapes: {shapes}."
