"""What a recipe may say: one dataclass per YAML section, and one error for every mistake in it."""

from __future__ import annotations

from collections.abc import Sequence


class RecipeError(ValueError):
    """A user's mistake: where it is, what was expected, what to do. `mistakes` holds one line each."""

    def __init__(self, mistakes: str | Sequence[str]) -> None:
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(mistakes)
        super().__init__("\n".join(self.mistakes))
