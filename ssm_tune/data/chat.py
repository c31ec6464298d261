"""Conversations as text, and which parts of that text the model learns.

The parts are found on the rendered text, not on tokens, and checked there: an assistant's part is its text and the end
marker that the template writes after it, nothing else. Templates with {% generation %} markers say where that is. For
the others each turn is rendered twice: the conversation before it with the generation prompt, and with it. What the
second adds to the first is the turn, provided that the template leaves earlier turns alone; where it does not, the
message says so and nothing is guessed.

The text is then tokenised part by part. No token reaches over a border, and the model sees in training the very tokens
that a prompt of its own has (`prompt_ids`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ssm_tune.data.formatting import Message
from ssm_tune.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# What stands in for a chat template where the tokenizer has none: a line for each turn. eos after the assistant's.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
)
# And for rows of prompt and completion, which are exact texts: nothing is added to them.
_EXACT_TEMPLATE = _PLAIN_TEMPLATE.replace(" + '\n'", "")


class Piece(NamedTuple):
    """A part of a row's text, and whether its tokens are learned."""

    text: str
    learned: bool


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template of one plain line a turn, for tokenizers without one: `question\\nanswer<eos>`."""
    return ("{{ bos_token }}" if adds_bos(tokenizer) else "") + _PLAIN_TEMPLATE


def exact_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template that adds nothing to a prompt but the tokenizer's own bos."""
    return ("{{ bos_token }}" if adds_bos(tokenizer) else "") + _EXACT_TEMPLATE


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts bos in front of plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], *, chat: bool | None = None
) -> list[int]:
    """The tokens of a prompt as training saw it.

    prompt: a user's text, or messages. chat None: by the tokenizer's chat template if it has one (the tokenizer saved
    with a run has the one it was trained with); False: as plain text, with bos if the tokenizer adds one.
    """
    text = format_prompt(tokenizer, prompt, chat=chat)
    as_chat = bool(tokenizer.chat_template) if chat is None else chat
    if as_chat:  # the template has written bos
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    return bos + list(tokenizer(text, add_special_tokens=False)["input_ids"])


def format_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], *, chat: bool | None = None
) -> str:
    """The text of a prompt as training saw it, up to where the answer begins. See `prompt_ids`.

    Raises RecipeError for messages (or chat=True) where the tokenizer has no chat template.
    """
    as_chat = bool(tokenizer.chat_template) if chat is None else chat
    if not as_chat and isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise RecipeError("the tokenizer has no chat template to write messages with: set tokenizer.chat_template.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return Renderer(tokenizer).render(messages, generate=True)


class Renderer:
    """Writes conversations by a tokenizer's chat template, or by `template`, and finds the assistant's parts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self.template: str = template or tokenizer.get_chat_template()
        self.marked = bool(_GENERATION.search(self.template))
        self.tokens = dict(tokenizer.special_tokens_map)
        self.eos: str = tokenizer.eos_token
        special = {*tokenizer.all_special_tokens, *(str(token) for token in tokenizer.added_tokens_encoder)}
        self.special = sorted((token for token in special if token.strip()), key=len, reverse=True)
        self.end_markers: set[str] = set()  # what the template wrote after the assistant's texts

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """The text of a conversation; `generate`: up to where the assistant begins. Raises RecipeError."""
        return self._render(messages, generate)[0]

    def pieces(self, messages: Sequence[Message], loss_from: int = 0) -> list[Piece]:
        """A conversation that ends with the assistant, in parts; the last one is followed by eos exactly once.

        Turns of the assistant from message `loss_from` on are learned. The whole text is that of the template up to
        the last turn's end marker: what it writes after that (a line break) no model is asked for. eos is appended if
        the end marker is another token, so that the model stops at the latest there.
        Raises RecipeError if the template cannot write this conversation, or its parts cannot be told apart.
        """
        text, marks = self._render(messages, False)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.marked:
            if len(marks) != len(turns):
                raise RecipeError(
                    f"the chat template marks {len(marks)} spans with {{% generation %}}, but the conversation has "
                    f"{len(turns)} turns of the assistant."
                )
            spans = [self._with_end(text, start, end) for start, end in marks]
        else:
            spans = [self._span(messages, index, text) for index in turns]
        pieces, position = [], 0
        for index, (start, end) in zip(turns, spans, strict=True):
            self._check(text[start:end], messages[index]["content"])
            pieces += [Piece(text[position:start], False), Piece(text[start:end], index >= loss_from)]
            position = end
        if not pieces[-1].text.endswith(self.eos):
            pieces.append(Piece(self.eos, pieces[-1].learned))
        return _joined(pieces)

    def _render(self, messages: Sequence[Message], generate: bool) -> tuple[str, list[tuple[int, int]]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        settings: dict[str, Any] = self.tokens
        rendered: Any  # annotated as text, but it is the texts and the marks
        try:
            rendered = render_jinja_template(
                [list(messages)],
                chat_template=self.template,
                add_generation_prompt=generate,
                return_assistant_tokens_mask=self.marked,
                **settings,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RecipeError(f"the chat template cannot write the turns {roles}: {error}") from error
        texts, marks = rendered
        return texts[0], marks[0] if marks else []

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Where turn `index` stands in `text`, by rendering what comes before it and what ends with it."""
        before = self.render(messages[:index], generate=True)
        after = text if index == len(messages) - 1 else self.render(messages[: index + 1])
        if not after.startswith(before) or not text.startswith(after):
            raise RecipeError(
                "the chat template writes earlier turns differently once later ones follow, so the assistant's parts "
                "cannot be found. Put {% generation %} and {% endgeneration %} round them in the template "
                "(tokenizer.chat_template), or split the conversations into single turns."
            )
        said = after[len(before) :]
        content = messages[index]["content"]
        found = content if content in said else content.strip()
        marker = said.partition(found)[2]
        # A line break between turns is not an end marker, and one after the marker is not learned either.
        return len(before), len(before) + len(said) - len(marker) + len(marker.rstrip())

    def _with_end(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A marked span with the end marker, where the marks leave it out; else stopping would not be learned."""
        trimmed = start + len(text[start:end].rstrip())
        if any(text[start:trimmed].endswith(token) for token in self.special):
            return start, trimmed
        following = next((token for token in self.special if text.startswith(token, end)), "")
        return start, end + len(following)

    def _check(self, span: str, content: str) -> None:
        found = content if content in span else content.strip()
        lead, _, marker = span.partition(found)
        if found not in span or lead.strip():
            raise RecipeError(
                f"the chat template writes {span[:60]!r} where the assistant says {content[:60]!r}. The generation "
                "prompt must end where the assistant's text begins, and the text must be written unchanged."
            )
        if marker:
            self.end_markers.add(marker)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that are both learned, or both not, as one piece; empty ones left out."""
    joined: list[Piece] = []
    for piece in pieces:
        if not piece.text:
            continue
        if joined and joined[-1].learned == piece.learned:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.learned)
        else:
            joined.append(piece)
    return joined
