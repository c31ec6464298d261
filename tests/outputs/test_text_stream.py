"""What is shown of an answer that is still coming: never half a character, never the start of a stop text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny import tiny_tokenizer

from ssm_tune.outputs.text_stream import TextStream


def feed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def byte_tokens(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


@pytest.fixture(scope="module")
def fallback() -> Any:
    """A tokenizer that writes unknown characters as bytes, and decodes bytes only together, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a", "b"]
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_characters_of_several_bytes_come_whole() -> None:
    pieces = feed(TextStream(tiny_tokenizer()), byte_tokens("é€😀a"))
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", "a", ""]


def test_half_a_character_at_the_end_stays_out() -> None:
    assert feed(TextStream(tiny_tokenizer()), byte_tokens("a😀")[:-1]) == ["a", "", "", "", ""]


def test_bytes_that_are_no_character_are_shown_as_the_tokenizer_shows_them() -> None:
    """And what is put together is what decoding everything at once gives, but for half a character at the end."""
    tokenizer = tiny_tokenizer()
    for seed in range(300):
        chosen = random.Random(seed)
        tokens = [chosen.randrange(3, 262) for _ in range(chosen.randrange(1, 40))]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        shown = "".join(feed(TextStream(tokenizer), tokens))
        assert whole.startswith(shown) and not whole[len(shown) :].strip("\ufffd")
        assert len(whole) - len(shown) <= 3


def test_bytes_that_are_decoded_together_are_not_shown_broken(fallback: Any) -> None:
    tokens = [fallback.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁")]
    emoji = [3 + byte for byte in "€😀".encode()]
    world = fallback.convert_tokens_to_ids("▁world")
    pieces = feed(TextStream(fallback), [*tokens, *emoji, world, *emoji])
    assert "".join(pieces) == "Hello €😀 world€😀"
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_space_before_the_first_word_is_kept_where_a_text_is_continued(fallback: Any) -> None:
    hello, world = (fallback.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁world"))
    assert "".join(feed(TextStream(fallback, context=[hello]), [world])) == " world"
    assert "".join(feed(TextStream(fallback), [world])) == "world"


def test_special_tokens_are_left_out() -> None:
    tokens = [*byte_tokens("a"), 3, *byte_tokens("b"), 2]
    assert "".join(feed(TextStream(tiny_tokenizer()), tokens)) == "ab"


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("one EN", ["END"], "one EN"),
        ("aaab", ["aab"], "a"),
        ("one, two. three", [".", ","], "one"),
        ("a€b", ["€"], "a"),
        ("END", ["END"], ""),
        ("x\n\ny", ["\n\n"], "x"),
    ],
)
def test_stop_texts_end_the_answer(text: str, stops: list[str], shown: str) -> None:
    stream = TextStream(tiny_tokenizer(), stops)
    pieces = feed(stream, byte_tokens(text))
    assert "".join(pieces) == shown == stream.text
    assert stream.stopped == (shown != text)
    for count in range(len(pieces)):  # at no time more than the answer
        assert shown.startswith("".join(pieces[:count]))


def test_a_stop_text_in_the_middle_of_a_token_ends_the_answer_there(fallback: Any) -> None:
    stream = TextStream(fallback, ["wor"])
    hello, world = (fallback.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁world"))
    assert "".join(feed(stream, [hello, world, hello])) == "Hello "
    assert stream.stopped


def test_a_stop_text_is_shown_where_it_belongs_to_the_answer() -> None:
    stream = TextStream(tiny_tokenizer(), ["\n"], show_stop=True)
    assert "".join(feed(stream, byte_tokens("one\ntwo"))) == "one\n"


def test_half_a_character_before_the_answer_does_not_change_it(fallback: Any) -> None:
    context = [3 + byte for byte in "€".encode()[:2]]
    assert "".join(feed(TextStream(fallback, context=context), [3 + byte for byte in "€".encode()])) == "€"
