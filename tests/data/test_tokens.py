from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import MARKED_TEMPLATE, PLAIN_TEMPLATE, tiny_tokenizer
from tokenizers_for_data import merging_tokenizer, normalising_tokenizer, prefixing_tokenizer

from ssm_tune.data.chat import exact_template, plain_template, prompt_ids
from ssm_tune.data.sources import open_rows, open_sources, read_examples
from ssm_tune.data.tokens import Documents, Encoder
from ssm_tune.recipe import DataSource, RecipeError

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k-train.jsonl"
PAIR = {"prompt": "what is the ", "completion": "answer"}
MESSAGES = {
    "messages": [
        {"role": "user", "content": "what is the question"},
        {"role": "assistant", "content": "the answer"},
        {"role": "user", "content": "and now"},
        {"role": "assistant", "content": "forty two"},
    ]
}
MAKERS = [tiny_tokenizer, merging_tokenizer, prefixing_tokenizer]


def encode(tokenizer: Any, rows: list[dict[str, Any]], *parts: str) -> tuple[Documents, Encoder]:
    encoder = Encoder(tokenizer, frozenset(parts))
    return encoder.encode(read_examples(open_rows(rows), "sft")), encoder


def texts(tokenizer: Any, documents: Documents, index: int = 0) -> tuple[str, str]:
    """A document's whole text, and that of its learned tokens."""
    here = slice(documents.starts[index], documents.starts[index + 1])
    tokens = documents.tokens[here]
    return tokenizer.decode(tokens), tokenizer.decode(tokens[documents.learned[here]])


@pytest.mark.parametrize("make", MAKERS)
def test_labels_are_the_completion_and_eos(make):
    tokenizer = make(None)
    documents, _ = encode(tokenizer, [PAIR, {**PAIR, "completion": f"answer{tokenizer.eos_token}"}])
    for index in (0, 1):
        whole, learned = texts(tokenizer, documents, index)
        assert learned == f"answer{tokenizer.eos_token}"
        expected = f"what is the answer{tokenizer.eos_token}"
        assert whole == ("<s> " if make is prefixing_tokenizer else "") + expected, "one space before the answer"


@pytest.mark.parametrize("make", MAKERS)
def test_no_token_reaches_over_the_border(make):
    tokenizer = make(None)
    joined = tokenizer("what is the answer", add_special_tokens=False)["input_ids"]
    prompt = tokenizer(PAIR["prompt"], add_special_tokens=False)["input_ids"]
    if make is merging_tokenizer:
        assert joined[: len(prompt)] != prompt, "the test needs a token over the border"
    tokenizer.chat_template = exact_template(tokenizer)
    documents, encoder = encode(make(None), [PAIR])
    assert encoder.run_template() == tokenizer.chat_template
    assert documents.tokens[~documents.learned].tolist() == prompt_ids(tokenizer, PAIR["prompt"])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("template", [None, "plain", "marked"])
def test_prompts_are_tokenised_as_in_training(make, template):
    """For every turn: what training has before it is what generation makes of the conversation so far."""
    name = {"plain": PLAIN_TEMPLATE, "marked": MARKED_TEMPLATE}.get(template or "")
    tokenizer = make(name and name.replace("<e>", "{{ eos_token }}"))
    documents, encoder = encode(tokenizer, [MESSAGES])
    if template is None:
        assert encoder.run_template() == plain_template(tokenizer)
        tokenizer.chat_template = encoder.run_template()
    else:
        assert encoder.run_template() is None
    first = int(np.flatnonzero(documents.learned)[0])
    assert documents.tokens[:first].tolist() == prompt_ids(tokenizer, MESSAGES["messages"][0]["content"])
    last = int(np.flatnonzero(~documents.learned)[-1]) + 1
    assert documents.tokens[:last].tolist() == prompt_ids(tokenizer, MESSAGES["messages"][:3])


@pytest.mark.parametrize("make", MAKERS)
def test_turns_of_the_assistant_are_learned_with_their_ends(make):
    tokenizer = make(PLAIN_TEMPLATE.replace("<e>", "{{ eos_token }}"))
    documents, _ = encode(tokenizer, [MESSAGES])
    eos = tokenizer.eos_token
    # Where the tokenizer writes a space before a text that follows a special token, it is part of the answer.
    assert texts(tokenizer, documents)[1].replace(" ", "") == f"theanswer{eos}fortytwo{eos}"
    ends = documents.tokens == tokenizer.eos_token_id
    assert ends.sum() == 2 and documents.learned[ends].all() and ends[-1]


def test_an_eos_that_the_data_brings_is_not_doubled():
    rows = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "a<e>"}]
    for template in (None, PLAIN_TEMPLATE):
        tokenizer = tiny_tokenizer(template)
        documents, _ = encode(tokenizer, rows)
        assert texts(tokenizer, documents, 0)[1] == texts(tokenizer, documents, 1)[1] == "a<e>"


def test_loss_on_everything_where_it_is_asked_for():
    tokenizer = merging_tokenizer()
    whole, learned = texts(tokenizer, encode(tokenizer, [PAIR], "completion")[0])
    assert learned == whole == "what is the answer</s>"
    assert texts(tokenizer, encode(tokenizer, [PAIR], "assistant")[0])[1] == "answer</s>"
    whole, learned = texts(tokenizer, encode(tokenizer, [MESSAGES], "assistant")[0])
    assert learned == whole
    assert texts(tokenizer, encode(tokenizer, [MESSAGES], "completion")[0])[1] != whole


def test_documents_end_with_eos_once_and_are_learned_whole():
    tokenizer = merging_tokenizer()
    documents, encoder = encode(tokenizer, [{"text": "the answer"}, {"text": "the answer</s>"}])
    assert documents.tokens[: documents.starts[1]].tolist() == documents.tokens[documents.starts[1] :].tolist()
    assert texts(tokenizer, documents) == ("the answer</s>", "the answer</s>")
    assert encoder.run_template() is None
    assert documents.count_learned().tolist() == [documents.lengths[0] - 1] * 2


def test_bos_is_put_first_by_tokenizers_that_add_it():
    tokenizer = prefixing_tokenizer()
    documents, _ = encode(tokenizer, [{"text": "the answer"}, {"text": "for it"}])
    firsts = documents.tokens[documents.starts[:-1]]
    assert firsts.tolist() == [tokenizer.bos_token_id] * 2
    assert (documents.tokens == tokenizer.bos_token_id).sum() == 2


def test_a_model_never_learns_to_stop_without_eos():
    tokenizer = merging_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(RecipeError, match="no eos token"):
        Encoder(tokenizer)


def test_rows_that_the_template_cannot_write_are_named():
    refusing = PLAIN_TEMPLATE + "{% if messages | length > 3 %}{{ raise_exception('too long a talk') }}{% endif %}"
    short = {"messages": MESSAGES["messages"][:2]}
    with pytest.raises(RecipeError, match=r"dataset, row 2: the chat template cannot write .*: too long a talk"):
        encode(tiny_tokenizer(refusing), [short, short, MESSAGES])


def test_a_tokenizer_that_changes_text_is_found_out():
    assert encode(merging_tokenizer(), [PAIR])[1].lossy == encode(merging_tokenizer(), [MESSAGES])[1].lossy == 0
    shouted = [{"prompt": "x", "completion": "ANSWER"}, {"prompt": "X", "completion": "answer"}]
    assert encode(normalising_tokenizer(), shouted)[1].lossy == 1


def test_slices_of_documents():
    documents, _ = encode(tiny_tokenizer(None), [{"text": "abcdef"}, {"text": "xyz"}])
    taken = documents.take(np.array([1, 0, 1]))
    assert tiny_tokenizer().decode(taken.tokens) == "xyz<e>abcdef<e>xyz<e>"
    assert taken.rows.tolist() == [1, 0, 1] and taken.starts.tolist() == [0, 4, 11, 15]
    parts = documents.slices(np.array([0, 0]), np.array([1, 4]), np.array([2, 3]))
    assert tiny_tokenizer().decode(parts.tokens) == "bcef<e>"


@pytest.mark.skipif(not GSM8K.exists(), reason="the real rows lie beside the repository, not in it")
@pytest.mark.parametrize(("template", "count"), [(None, 7473), (PLAIN_TEMPLATE, 500), (MARKED_TEMPLATE, 500)])
def test_real_rows(template, count):
    """The decoded labels are exactly the answer and eos, for all 7,473 rows of GSM8K."""
    tokenizer = tiny_tokenizer(template)
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()][:count]
    sources = open_sources([DataSource(path=str(GSM8K), split=f"train[:{count}]")])
    documents = Encoder(tokenizer).encode(read_examples(sources, "sft"))
    assert len(documents) == len(rows) == count
    labels = np.split(documents.tokens[documents.learned], np.cumsum(_learned(documents))[:-1])
    assert tokenizer.batch_decode(labels) == [row["answer"] + "<e>" for row in rows]


def _learned(documents: Documents) -> np.ndarray:
    return np.add.reduceat(documents.learned.astype(np.int64), documents.starts[:-1])
