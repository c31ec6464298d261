from __future__ import annotations

import re

import pytest
from tiny import MARKED_TEMPLATE, PLAIN_TEMPLATE, tiny_tokenizer
from tokenizers_for_data import merging_tokenizer, prefixing_tokenizer

from ssm_tune.data.chat import Piece, Renderer, adds_bos, exact_template, format_prompt, plain_template, prompt_ids
from ssm_tune.recipe import RecipeError
from ssm_tune.shipped import shipped
from ssm_tune.tokenizer import read_template


def turns(*pairs: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]


TALK = turns("system", "Be kind.", "user", "Hi", "assistant", "Hello", "user", "Bye", "assistant", "See you\n")


def pieces(template: str, messages: list[dict[str, str]] = TALK, loss_from: int = 0) -> list[Piece]:
    return Renderer(tiny_tokenizer(template)).pieces(messages, loss_from)


def learned(found: list[Piece]) -> list[str]:
    return [piece.text for piece in found if piece.learned]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_the_assistants_parts_are_its_texts_and_the_end_marker(template):
    assert pieces(template) == [
        Piece("<|s|>Be kind.<|u|>Hi<|a|>", False),
        Piece("Hello<e>", True),
        Piece("<|u|>Bye<|a|>", False),
        Piece("See you\n<e>", True),
    ]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_earlier_turns_may_be_only_read(template):
    assert learned(pieces(template, loss_from=3)) == ["See you\n<e>"]


@pytest.mark.parametrize("marked", [True, False])
def test_an_end_marker_that_is_not_eos_is_learned_and_followed_by_eos(marked):
    before, after = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{% for m in messages %}<|u|>{{ m.role }}:\n"
        f"{before}{{{{ m.content }}}}{after}<|s|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|u|>assistant:\n{% endif %}"
    )
    template = template.replace(before, "{% if m.role == 'assistant' %}" + before, 1) if marked else template
    if marked:
        template = template.replace(after, after + "{% else %}{{ m.content }}{% endif %}", 1)
    assert learned(pieces(template)) == ["Hello<|s|>", "See you\n<|s|><e>"]
    assert pieces(template)[-1].text.endswith("<|s|><e>"), "the line break that the template adds last is left out"


def test_a_template_without_end_marker_still_teaches_eos():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert learned(pieces(template)) == ["Hello", "See you\n<e>"]


def test_eos_is_there_once():
    for template in (PLAIN_TEMPLATE, MARKED_TEMPLATE, plain_template(tiny_tokenizer())):
        assert pieces(template)[-1].text.count("<e>") == 1


def test_text_that_the_template_trims_is_learned_trimmed():
    trimmed = PLAIN_TEMPLATE.replace("message['content']", "message['content'] | trim")
    assert learned(pieces(trimmed)) == ["Hello<e>", "See you<e>"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    template = PLAIN_TEMPLATE.replace(
        "{{ message['content'] }}<e>", "{{ message['content'] }}{% if loop.last %}<e>{% endif %}"
    )
    assert template != PLAIN_TEMPLATE
    with pytest.raises(RecipeError, match="writes earlier turns differently"):
        pieces(template)
    assert learned(pieces(template, TALK[:3])) == ["Hello<e>"]


def test_a_generation_prompt_that_stops_short_is_refused():
    template = PLAIN_TEMPLATE.replace("{% if add_generation_prompt %}<|a|>{% endif %}", "")
    with pytest.raises(RecipeError, match="generation prompt must end where"):
        pieces(template)


def test_a_template_that_changes_the_text_is_refused():
    template = PLAIN_TEMPLATE.replace("{{ message['content'] }}<e>", "{{ message['content'] | upper }}<e>")
    with pytest.raises(RecipeError, match=r"writes 'HELLO<e>' where the assistant says 'Hello'"):
        pieces(template)


def test_marks_that_do_not_belong_to_the_turns_are_refused():
    once = MARKED_TEMPLATE.replace("{% for", "{% generation %}x{% endgeneration %}{% for", 1)
    with pytest.raises(RecipeError, match="marks 3 spans"):
        pieces(once)


def test_what_the_template_refuses_is_said_with_its_reason():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RecipeError, match=r"cannot write the turns system, user, assistant.*roles must alternate"):
        pieces(template, TALK[:3])


def test_two_turns_of_the_assistant_in_a_row_are_learned_where_the_template_can_write_them():
    messages = turns("user", "Hi", "assistant", "One", "assistant", "Two")
    assert learned(pieces(PLAIN_TEMPLATE, messages)) == ["One<e>", "Two<e>"]


@pytest.mark.parametrize("marked", [True, False])
def test_the_codestral_template(marked):
    tokenizer = merging_tokenizer()
    tokenizer.bos_token = "<s>"
    template = read_template(shipped("recipes", "templates/codestral.jinja"), tokenizer)
    assert "generation" in template
    template = template if marked else re.sub(r"\{%-? (end)?generation -?%\}", "", template)
    assert Renderer(tokenizer, template).pieces(TALK) == [
        Piece("<s>[INST] Be kind.\n\nHi[/INST]", False),
        Piece(" Hello</s>", True),
        Piece("[INST] Bye[/INST]", False),
        Piece(" See you\n</s>", True),
    ]
    tokenizer.chat_template = template
    assert format_prompt(tokenizer, "Hi") == "<s>[INST] Hi[/INST]"
    with pytest.raises(RecipeError, match="must alternate"):
        Renderer(tokenizer, template).pieces(turns("user", "Hi", "user", "Hi", "assistant", "Hello"))


@pytest.mark.parametrize("marked", [True, False])
def test_the_falcon_mamba_template(marked):
    tokenizer = merging_tokenizer()
    template = read_template(shipped("recipes", "templates/falcon-mamba.jinja"), tokenizer)
    assert "generation" in template
    template = template if marked else re.sub(r"\{%-? (end)?generation -?%\}", "", template)
    assert Renderer(tokenizer, template).pieces(TALK) == [
        Piece("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        Piece("Hello<|im_end|>", True),
        Piece("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
        Piece("See you\n<|im_end|></s>", True),
    ]
    tokenizer.chat_template = template
    assert format_prompt(tokenizer, "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.eos_token = "<|im_end|>"
    assert Renderer(tokenizer, template).pieces(TALK)[-1] == Piece("See you\n<|im_end|>", True)


def test_plain_templates_write_lines_and_exact_ones_nothing():
    tokenizer = prefixing_tokenizer()
    assert adds_bos(tokenizer) and not adds_bos(merging_tokenizer()) and not adds_bos(tiny_tokenizer())
    messages = turns("user", "Hi", "assistant", "Hello")
    assert Renderer(tokenizer, plain_template(tokenizer)).pieces(messages) == [
        Piece("<s>Hi\n", False),
        Piece("Hello</s>", True),
    ]
    assert Renderer(tokenizer, exact_template(tokenizer)).pieces(messages)[0] == Piece("<s>Hi", False)


def test_prompts_have_bos_once_and_no_eos():
    tokenizer = prefixing_tokenizer()
    bos = tokenizer.bos_token_id
    for template in (None, plain_template(tokenizer), exact_template(tokenizer)):
        tokenizer.chat_template = template
        ids = prompt_ids(tokenizer, "the answer")
        assert ids[0] == bos and ids.count(bos) == 1 and tokenizer.eos_token_id not in ids
    assert format_prompt(tokenizer, "Hi", chat=False) == "Hi"
    tokenizer.chat_template = None
    assert prompt_ids(tokenizer, "the answer") == tokenizer("the answer")["input_ids"]


def test_messages_need_a_template():
    with pytest.raises(RecipeError, match="has no chat template"):
        format_prompt(tiny_tokenizer(None), TALK[:2])
    with pytest.raises(RecipeError, match="has no chat template"):
        format_prompt(tiny_tokenizer(None), "Hi", chat=True)
    assert format_prompt(tiny_tokenizer(), TALK[:4]) == "<|s|>Be kind.<|u|>Hi<|a|>Hello<e><|u|>Bye<|a|>"
