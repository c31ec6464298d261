"""Text from a model, on the recurrent path.

Models of state-space layers only decode in our own loop (`ssm_tune.outputs.decoding`), on a GPU one CUDA graph a token;
for others it is transformers' generate, with the mistakes caught that it lets pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ssm_tune.data.chat import prompt_ids
from ssm_tune.data.formatting import check_text
from ssm_tune.mixers.step import can_step
from ssm_tune.model import padded_token_ids
from ssm_tune.outputs.decoding.choosing import Choice
from ssm_tune.outputs.decoding.graphs import say_once
from ssm_tune.outputs.decoding.loop import Decoder, NoNumbers
from ssm_tune.outputs.text_stream import TextStream
from ssm_tune.recipe import RecipeError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    `temperature` 0 takes the likeliest token (and ignores top_k, top_p and seed). `top_k` 0 and `top_p` 1 leave all
    tokens in. `stop`: texts that end the answer; they are not part of it. `seed` None: torch's current random state.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        wrong = [
            (not _is_whole(self.max_new_tokens) or self.max_new_tokens < 1, "max_new_tokens", "a whole number from 1"),
            (not _is_number(self.temperature) or self.temperature < 0, "temperature", "0 (the likeliest) or more"),
            (not _is_whole(self.top_k) or self.top_k < 0, "top_k", "a whole number; 0 means no limit"),
            (not _is_number(self.top_p) or not 0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (not _is_number(self.min_p) or not 0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
            (
                not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0,
                "repetition_penalty",
                "above 0; 1 means none",
            ),
            (self.seed is not None and (not _is_whole(self.seed) or self.seed < 0), "seed", "a whole number from 0"),
            (not all(isinstance(text, str) and text for text in stop), "stop", "one or more texts, none of them empty"),
        ]
        mistakes = [
            f"{name}: {getattr(self, name)!r} cannot be; it must be {rule}." for bad, name, rule in wrong if bad
        ]
        if mistakes:
            raise RecipeError(mistakes)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def generate_text(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool | None = None,
    decoder: Decoder | None = None,
    **settings: Any,
) -> str:
    """The model's continuation of one prompt, without the prompt, special tokens and whatever follows a stop text.

    Args:
        model: a patched causal language model, with or without an adapter; it may be in training mode, and stays so.
        chat: put the prompt into the tokenizer's chat template, as a user's turn; None: if the tokenizer has one. The
            tokenizer saved with a run has the template that its rows were written with.
        decoder: what it is decoded with, if it is to be kept for the next call.
        settings: see `Sampling`.

    Raises:
        RecipeError: an empty prompt, an unknown or impossible setting, chat without a template.
    """
    return generate_texts(model, tokenizer, [prompt], chat=chat, decoder=decoder, **settings)[0]


def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    chat: bool | None = None,
    decoder: Decoder | None = None,
    **settings: Any,
) -> list[str]:
    """As `generate_text` for several prompts at once: padded on the left, each row stops on its own."""
    return _generate(model, tokenizer, prompts, chat, check_settings(settings), decoder=decoder)


def stream_text(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    tell: Callable[[str], None],
    *,
    chat: bool | None = None,
    **settings: Any,
) -> str:
    """As `generate_text`, telling the text as it comes, never half a character or the start of a stop text."""
    sampling = check_settings(settings)
    return _generate(model, tokenizer, [prompt], chat, sampling, tell)[0]


def _generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    chat: bool | None,
    sampling: Sampling,
    tell: Callable[[str], None] | None = None,
    decoder: Decoder | None = None,
) -> list[str]:
    batch = _encode_prompts(tokenizer, prompts, chat).to(next(model.parameters()).device)
    config = _generation_config(model, tokenizer, sampling)
    listener = None if tell is None else _Listener(TextStream(tokenizer, sampling.stop), config, tell)
    with evaluating(model), compute_scope(model), _seeded(model, sampling.seed), torch.no_grad():
        if can_step(model):
            rows = _decode(model, tokenizer, batch, sampling, config, listener, decoder or Decoder())
        else:
            rows = _generate_stock(model, tokenizer, batch, sampling, config, listener)
    answers = [_until(row, config.eos_token_id or []) for row in rows]  # an end token need not be a special one
    return [_cut_at(tokenizer.decode(answer, skip_special_tokens=True), sampling.stop) for answer in answers]


class _Listener(BaseStreamer):
    """Tells one answer's text as its tokens come; for transformers' generate, which gives the prompt's tokens first."""

    def __init__(self, stream: TextStream, config: GenerationConfig, tell: Callable[[str], None]) -> None:
        self._stream, self._tell = stream, tell
        self._ends = frozenset(config.eos_token_id or [])
        self._begun = self._ended = False

    def put(self, value: torch.Tensor) -> None:
        for token in value.flatten().tolist() if self._begun else ():
            self.take(token)
        self._begun = True

    def take(self, token: int) -> None:
        self._ended = self._ended or token in self._ends
        if not self._ended:
            self._pass_on(self._stream.push(token))

    def end(self) -> None:
        self._pass_on(self._stream.finish())

    def _pass_on(self, text: str) -> None:
        if text:
            self._tell(text)


def _decode(
    model: nn.Module,
    tokenizer: Any,
    batch: Any,
    sampling: Sampling,
    config: GenerationConfig,
    listener: _Listener | None,
    decoder: Decoder,
) -> list[list[int]]:
    """Every row's tokens. A row that has ended goes on beside the others, and nobody listens to it."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    choose = Choice(
        ids,
        mask,
        model.get_output_embeddings().weight.shape[0],
        never=config.suppress_tokens or (),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
    )
    rows: list[list[int]] = [[] for _ in range(len(ids))]
    streams = [TextStream(tokenizer, sampling.stop) for _ in rows] if sampling.stop else []
    ends, running = frozenset(config.eos_token_id or []), set(range(len(rows)))
    try:
        for tokens in decoder.decode(model, ids, mask, choose, sampling.max_new_tokens):
            for row in sorted(running):
                rows[row].append(tokens[row])
                if listener is not None:
                    listener.take(tokens[row])
                if streams:
                    streams[row].push(tokens[row])
                if tokens[row] in ends or (streams and streams[row].stopped):
                    running.discard(row)
            if not running:
                break
    except NoNumbers as error:
        raise RecipeError(f"generate: {error}.") from error
    if listener is not None:
        listener.end()
    return rows


def _generate_stock(
    model: nn.Module,
    tokenizer: Any,
    batch: Any,
    sampling: Sampling,
    config: GenerationConfig,
    listener: _Listener | None,
) -> list[list[int]]:
    """As `_decode`, by transformers' generate, with caches that may grow."""
    if batch["input_ids"].is_cuda:
        say_once(
            "generate: %s is not of state-space layers only (or carries hooks), so that decoding is transformers' own: "
            "every kernel is launched from Python, which for few rows takes several times as long as the GPU needs.",
            type(model).__name__,
        )
    options: dict[str, Any] = {"stop_strings": list(sampling.stop), "tokenizer": tokenizer} if sampling.stop else {}
    if listener is not None:
        options["streamer"] = listener
    tokens = model.generate(**batch, generation_config=config, **options)
    return tokens[:, batch["input_ids"].shape[1] :].tolist()


def check_settings(settings: dict[str, Any]) -> Sampling:
    """Settings of generation as `Sampling`. Raises RecipeError for every unknown or impossible one."""
    known = Sampling.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise RecipeError([f"{name} is not a setting of generation. It has: {', '.join(known)}." for name in unknown])
    return Sampling(**settings)


def _encode_prompts(tokenizer: Any, prompts: Sequence[str], chat: bool | None) -> Any:
    """input_ids and attention_mask (batch, length), padded on the left."""
    rows = [prompt_ids(tokenizer, check_text(prompt, "the prompt", "generate"), chat=chat) for prompt in prompts]
    if not rows or not all(rows):
        raise RecipeError("generate: the tokenizer makes no token of the prompt.")
    with _padding_left(tokenizer):
        return tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")


@contextmanager
def _padding_left(tokenizer: Any) -> Iterator[None]:
    """Right pads would stand between prompt and answer, and enter the state. One prompt needs no pad token at all."""
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    if pad is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        tokenizer.padding_side = side
        if pad is None:
            tokenizer.pad_token = None


def _generation_config(model: nn.Module, tokenizer: Any, sampling: Sampling) -> GenerationConfig:
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampled = sampling.temperature > 0
    how = {"temperature": float(sampling.temperature), "top_k": sampling.top_k, "top_p": float(sampling.top_p)}
    if sampling.min_p > 0:
        how["min_p"] = float(sampling.min_p)
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampled,
        repetition_penalty=float(sampling.repetition_penalty),
        use_cache=True,  # the trainer leaves use_cache=False in the model's config
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        suppress_tokens=padded_token_ids(model, tokenizer) or None,
        **(how if sampled else {}),
    )


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def _cut_at(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within this scope; every module's own mode comes back, as training left it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def compute_scope(model: nn.Module) -> AbstractContextManager[Any]:
    """Autocast, as the trainer has it, for a model that holds float32 masters beside 16-bit frozen weights."""
    masters = any(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    low = {parameter.dtype for parameter in model.parameters()} & {torch.bfloat16, torch.float16}
    if not masters or len(low) != 1:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=low.pop())


@contextmanager
def _seeded(model: nn.Module, seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
