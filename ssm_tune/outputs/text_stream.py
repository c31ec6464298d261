"""Tokens in, text out, while the tokens are still coming: nothing is shown that a later token would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet one
_CONTEXT = 8  # tokens before the answer that may change how its first word is written
_LONGEST_START = 3  # a character of UTF-8 has at most four bytes, so at most three can stand alone


class TextStream:
    """The text of one answer, token by token.

    Held back are bytes that may become a character, and text that may become a stop text. What `push` and `finish`
    return is, put together, the whole answer: the same however it is cut, and the same without streaming.

    Args:
        tokenizer: decodes; special tokens are left out.
        stops: texts that end the answer. None of them is shown, unless `show_stop`.
        context: the tokens before the answer, where it continues a text; some tokenizers write a first word without
            the space that belongs before it. Empty: the answer begins afresh.
        show_stop: the stop text is part of the answer (Megatron's stop_on_eol).
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), context: Sequence[int] = (), show_stop: bool = False
    ) -> None:
        self.text = ""  # all that was shown
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._show_stop = show_stop
        self._held = ""  # decoded, and not shown yet
        # The tokens whose text is open, after those of the text that was settled last: some tokenizers decode a token
        # by the one before it, and bytes only together.
        self._window = list(context[-_CONTEXT:])
        if self._decode(self._window).endswith(_BROKEN):
            self._window = []
        self._known = self._decode(self._window)  # what of the window's text has been passed on
        self._open = len(self._window)  # where the open tokens begin

    def push(self, token: int) -> str:
        """Take one token; returns the text that is certain by now. After a stop text nothing more is taken."""
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        if not text.startswith(self._known):  # bytes that are no character took what was before them along
            if broken:
                return ""
            text = self._known + self._decode(self._window[self._open :])
        certain = text[: len(text) - min(broken, _LONGEST_START)]
        piece = certain[len(self._known) :]
        if not broken and piece:
            self._window = self._window[self._open :]
            self._known = self._decode(self._window)
            self._open = len(self._window)
        else:
            self._known += piece
        return self._show(piece, last=False)

    def finish(self) -> str:
        """The rest, where the tokens end: text that looked like the start of a stop text is text after all.

        Bytes at the end that are no whole character stay out.
        """
        if self.stopped:
            return ""
        rest = self._decode(self._window)
        known = rest.startswith(self._known)
        rest = rest[len(self._known) :] if known else self._decode(self._window[self._open :])
        return self._show(rest.rstrip(_BROKEN), last=True)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _show(self, piece: str, *, last: bool) -> str:
        self._held += piece
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            shown, self._held = self._held[: at + len(stop) if self._show_stop else at], ""
            self.stopped = True
        else:
            keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
            shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text begin the stop text."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
