"""From a request's prompt to tokens that the model can read, with every way to fail told to the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ssm_tune.data.chat import prompt_ids
from ssm_tune.data.formatting import check_text
from ssm_tune.outputs.serve.errors import ApiError
from ssm_tune.recipe import RecipeError


class PromptReader:
    """Tokenises prompts; called from several threads (nothing in it changes).

    Args:
        max_tokens: of one prompt.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_tokens: int) -> None:
        rows = model.get_output_embeddings().weight.shape[0]
        self.tokenizer = tokenizer
        self.known = frozenset(token for token in tokenizer.get_vocab().values() if token < rows)
        own = model.generation_config.eos_token_id
        self.ends = frozenset({tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None})
        self._max_tokens = max_tokens

    @property
    def chat(self) -> bool:
        """Whether there is a template to write conversations with."""
        return bool(self.tokenizer.chat_template)

    def read_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers. Raises ApiError."""
        if not self.chat:
            raise ApiError(
                400,
                "this model has no chat template to write messages with. Use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        try:
            for index, message in enumerate(messages):
                check_text(message["content"], "the content", f"messages.{index}", may_be_empty=True)
            ids = prompt_ids(self.tokenizer, messages, chat=True)
        except RecipeError as error:
            raise ApiError(400, str(error), param="messages") from error
        return self._checked(ids, "messages")

    def read_prompt(self, prompt: str | list[int], param: str = "prompt", bos: bool = False) -> list[int]:
        """The tokens of a text, or tokens that are given; `bos`: put bos in front (Megatron's add_BOS).

        Raises ApiError.
        """
        if isinstance(prompt, str):
            try:
                ids = prompt_ids(self.tokenizer, check_text(prompt, "the text", param, may_be_empty=True), chat=False)
            except RecipeError as error:
                raise ApiError(400, str(error), param=param) from error
        else:
            ids = prompt
            unknown = next((token for token in ids if token not in self.known), None)
            if unknown is not None:
                raise ApiError(400, f"{param}: there is no token {_shown(unknown)} in this vocabulary.", param=param)
        if bos:
            if self.tokenizer.bos_token_id is None:
                raise ApiError(400, "add_BOS: this tokenizer has no such token.", param="add_BOS")
            ids = [self.tokenizer.bos_token_id, *ids]
        return self._checked(ids, param)

    def check_bias(self, tokens: Sequence[int], param: str = "logit_bias") -> None:
        """Raises ApiError for a token that the vocabulary does not have."""
        unknown = next((token for token in tokens if token not in self.known), None)
        if unknown is not None:
            raise ApiError(400, f"{param}: there is no token {_shown(unknown)} in this vocabulary.", param=param)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones too."""
        return self.tokenizer.decode(list(tokens))

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError(400, f"{param}: it is empty; there is nothing to continue.", param=param)
        if len(ids) > self._max_tokens:
            raise ApiError(
                400,
                f"{param}: {len(ids)} tokens; this server reads at most {self._max_tokens} in one prompt.",
                param=param,
                code="context_length_exceeded",
            )
        return ids


def _shown(token: int) -> str:
    text = str(token)
    return text if len(text) < 24 else text[:20] + "..."
