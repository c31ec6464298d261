from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import MARKED_TEMPLATE, PLAIN_TEMPLATE, tiny_config, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_for_data import merging_tokenizer, prefixing_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ssm_tune import tokenizer as tokenizer_module
from ssm_tune.data import prompt_ids
from ssm_tune.recipe import RecipeError, TokenizerSection
from ssm_tune.tokenizer import (
    adopt_tokenizer,
    describe_tokenizer,
    generation_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = ["Return the sum of the values.", "Return the number of items in the list.", "The value is zero."] * 20


def word_tokenizer(*special: str, **roles: str) -> Any:
    """A tokenizer of two words and the given special tokens, whose roles are named by keyword."""
    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def config(rows: int) -> Any:
    return tiny_config("mamba", vocab_size=rows)


# -- pad -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("special", "roles", "rows", "pad"),
    [
        (("<e>", "<p>"), {"eos_token": "<e>", "pad_token": "<p>"}, 8, "<p>"),
        (("<e>", "<|padding|>"), {"eos_token": "<e>", "pad_token": "<e>"}, 8, "<|padding|>"),
        (("<e>", "<a_reserved>", "<pad_x>"), {"eos_token": "<e>"}, 8, "<pad_x>"),
        (("<e>", "<reserved_1>", "<u>"), {"eos_token": "<e>", "unk_token": "<u>"}, 8, "<reserved_1>"),
        (("<e>", "<u>"), {"eos_token": "<e>", "unk_token": "<u>"}, 8, "<u>"),
        (("<e>",), {"eos_token": "<e>", "unk_token": "<e>", "bos_token": "<e>"}, 8, "<pad>"),
        (("<e>",), {"eos_token": "<e>"}, None, "<pad>"),
        (("<e>", "<b>"), {"eos_token": "<e>", "bos_token": "<b>"}, 4, "<b>"),
        (("<e>",), {"eos_token": "<e>"}, 3, "<e>"),
    ],
)
def test_pad_is_another_token_than_eos_wherever_there_is_one(special, roles, rows, pad, caplog):
    tokenizer = word_tokenizer(*special, **roles)
    with caplog.at_level(logging.INFO):
        adopt_tokenizer(tokenizer, config=None if rows is None else config(rows))
    assert tokenizer.pad_token == pad and tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(pad)
    assert rows is None or tokenizer.pad_token_id < rows
    assert tokenizer.eos_token == "<e>"
    said = pad != "<p>"
    assert bool(caplog.records) == said and (f"padding with {pad}" in caplog.text) == said
    assert any(record.levelno == logging.WARNING for record in caplog.records) == (pad in ("<b>", "<e>"))


def test_without_eos_it_is_refused():
    with pytest.raises(RecipeError, match=r"tokenizer.name: .* has no eos token"):
        adopt_tokenizer(word_tokenizer("<p>", pad_token="<p>"))


def test_more_tokens_than_embeddings_is_refused():
    with pytest.raises(RecipeError, match="tokens up to number 261, the model has embeddings for 261"):
        adopt_tokenizer(tiny_tokenizer(), config=config(261))
    adopt_tokenizer(tiny_tokenizer(), config=config(262))


def test_training_pads_on_the_right():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    assert adopt_tokenizer(tokenizer).padding_side == "right"


# -- finding ---------------------------------------------------------------------------------------------------------


def save(tokenizer: Any, folder: Path, **config_keys: Any) -> Path:
    tokenizer.save_pretrained(folder)
    if config_keys:
        (folder / "config.json").write_text(json.dumps(config_keys))
    return folder


def test_the_models_own_is_the_default_and_another_may_be_named(tmp_path):
    own = save(tiny_tokenizer(), tmp_path / "model")
    other = save(merging_tokenizer(), tmp_path / "other")
    assert load_tokenizer(TokenizerSection(), str(own)).eos_token == "<e>"
    assert load_tokenizer(TokenizerSection(name=str(other)), str(own)).eos_token == "</s>"


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "mamba2", "zamba2", "jamba", None])
def test_a_folder_without_tokenizer_is_refused(tmp_path, model_type):
    """Of some of these transformers makes an empty tokenizer without a word."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    with pytest.raises(RecipeError, match=r"has no tokenizer files \(tokenizer.json, .* set tokenizer.name") as refused:
        load_tokenizer(TokenizerSection(), str(tmp_path))
    assert str(tmp_path) in str(refused.value)
    assert "instantiate" not in str(refused.value)  # transformers' words, about packages and classes
    with pytest.raises(RecipeError, match=r"^tokenizer.name: "):
        load_tokenizer(TokenizerSection(name=str(tmp_path)), None)


def test_a_name_that_cannot_be_had_is_refused():
    with pytest.raises(RecipeError, match=r"^tokenizer.name: owner/name could not be loaded as a tokenizer"):
        load_tokenizer(TokenizerSection(name="owner/name"), None)
    with pytest.raises(RecipeError, match=r"^tokenizer.name is missing"):
        load_tokenizer(TokenizerSection(), None)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ['{"version": ', "[]"])
def test_a_broken_file_is_named(tmp_path, file, content):
    save(tiny_tokenizer(), tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(RecipeError, match=rf"{file} cannot be read"):
        load_tokenizer(TokenizerSection(name=str(tmp_path)), None)


def test_json_that_is_no_tokenizer_is_named(tmp_path):
    save(tiny_tokenizer(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"tokenizer.json cannot be read: KeyError"):
        load_tokenizer(TokenizerSection(name=str(tmp_path)), None)


STATE_SPACES = {"d_model": 32, "n_layer": 2, "vocab_size": 300, "ssm_cfg": {"layer": "Mamba2"}}


def test_original_folders_take_the_tokenizer_of_their_publisher(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(STATE_SPACES))
    neox = tiny_tokenizer()
    load = tokenizer_module.read_tokenizer

    def stand_in(name: str, revision: str | None, key: str) -> Any:
        return neox if name == "EleutherAI/gpt-neox-20b" else load(name, revision, key)

    monkeypatch.setattr(tokenizer_module, "read_tokenizer", stand_in)
    assert load_tokenizer(TokenizerSection(), str(tmp_path)) is neox


def test_original_folders_with_a_tokenizer_use_it(tmp_path):
    save(tiny_tokenizer(), tmp_path, **STATE_SPACES)
    assert load_tokenizer(TokenizerSection(), str(tmp_path)).eos_token == "<e>"


def test_offline_both_places_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STATE_SPACES))
    with pytest.raises(RecipeError) as caught:
        load_tokenizer(TokenizerSection(), str(tmp_path))
    assert str(tmp_path) in caught.value.mistakes[0] and "EleutherAI/gpt-neox-20b" in caught.value.mistakes[1]


# -- chat templates --------------------------------------------------------------------------------------------------


def test_a_template_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("\ufeff" + MARKED_TEMPLATE, encoding="utf-8")
    own = save(tiny_tokenizer(None), tmp_path / "model")
    tokenizer = load_tokenizer(TokenizerSection(chat_template=str(file)), str(own))
    assert tokenizer.chat_template == MARKED_TEMPLATE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", ", line 2: unexpected '}'"),
        (b"line\n\n{% for m in messages %}", ", line 3: Unexpected end of template"),
        (b"{{ messages | nofilter }}", ", line 1: No filter named 'nofilter'"),
        (b"{{ messages[0].absent.more }}", "cannot write the turns user, assistant"),
        (b"{{ raise_exception('no thanks') }}", "no thanks"),
        (b"{% for m in messages %}{{ m.role }}{% endfor %}", "where the assistant says 'An answer.'"),
        (b" \n", "is empty"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_an_unusable_template_is_named(tmp_path, content, message):
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        adopt_tokenizer(tiny_tokenizer(None), TokenizerSection(chat_template=str(file)))
    assert str(caught.value).startswith(f"tokenizer.chat_template: {file}") and message in str(caught.value)


def test_a_template_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        adopt_tokenizer(tiny_tokenizer(), TokenizerSection(chat_template=str(tmp_path / "none.jinja")))


# -- saving ----------------------------------------------------------------------------------------------------------


def test_it_is_saved_for_generation_and_stays_as_it_is(tmp_path):
    tokenizer = adopt_tokenizer(tiny_tokenizer(PLAIN_TEMPLATE))
    save_tokenizer(tokenizer, tmp_path / "own")
    save_tokenizer(tokenizer, tmp_path / "data", chat_template=MARKED_TEMPLATE)
    assert tokenizer.padding_side == "right" and tokenizer.chat_template == PLAIN_TEMPLATE
    own, data = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "data"))
    assert own.padding_side == data.padding_side == "left"
    assert (own.chat_template, data.chat_template) == (PLAIN_TEMPLATE, MARKED_TEMPLATE)
    assert own("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert prompt_ids(own, "Hi") == prompt_ids(tokenizer, "Hi")
    assert own.pad_token == "<pad>"
    copied = generation_tokenizer(tokenizer, None)
    assert (copied.padding_side, copied.chat_template) == ("left", PLAIN_TEMPLATE)


def test_it_is_described_in_a_line():
    assert describe_tokenizer(adopt_tokenizer(tiny_tokenizer())) == (
        "the tokenizer: 262 tokens, eos <e> (2), pad <pad> (0), no bos, with a chat template"
    )
    assert "bos <s> put first, no chat template" in describe_tokenizer(prefixing_tokenizer())


# -- training --------------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_reads_everything_back():
    tokenizer = train_tokenizer(TEXTS, 400)
    assert 258 < len(tokenizer) <= 400
    text = "Return the sum — 総和 \x00 of 3 items.\n\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("Return the value of the list.")["input_ids"]) < 15
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)


def test_training_gives_the_same_tokenizer_in_another_process():
    program = (
        "from ssm_tune.tokenizer import train_tokenizer; import sys, json;"
        "print(json.dumps(train_tokenizer(json.loads(sys.argv[1]), 400).get_vocab(), sort_keys=True))"
    )
    command = [sys.executable, "-c", program, json.dumps(TEXTS)]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert json.loads(other) == train_tokenizer(TEXTS, 400).get_vocab()


def test_a_recipe_trains_its_tokenizer():
    section = TokenizerSection(train=True, vocab_size=290)
    tokenizer = load_tokenizer(section, None, texts=iter(TEXTS))
    assert len(tokenizer) == 290 and tokenizer.padding_side == "right" and tokenizer.pad_token == "<|padding|>"
    with pytest.raises(RecipeError, match="256 bytes and 2 marks need 258"):
        load_tokenizer(TokenizerSection(train=True, vocab_size=257), None, texts=TEXTS)
    with pytest.raises(ValueError, match="needs texts"):
        load_tokenizer(section, None)
