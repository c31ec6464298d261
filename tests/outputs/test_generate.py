"""Generation: what a plain forward would say, alone as in a batch; it stops; mistakes are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from finished import stir
from tiny import MARKED_TEMPLATE, PURE, tiny_model, tiny_tokenizer

from ssm_tune.adapter import apply_adapter
from ssm_tune.data.chat import prompt_ids
from ssm_tune.mixers import patch_model
from ssm_tune.outputs.generate import generate_text, generate_texts
from ssm_tune.recipe import AdapterSection, RecipeError

PROMPT = "What is a state?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(template=None)


def adapted(kind: str, **changes: Any) -> Any:
    model = apply_adapter(patch_model(tiny_model(kind, **changes)), AdapterSection(r=4))
    stir(model)
    return model.eval()


@torch.no_grad()
def walk(model: Any, tokens: list[int], steps: int, vocabulary: int) -> list[int]:
    """Greedy decoding with a full forward for every token."""
    tokens = list(tokens)
    for _ in range(steps):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1, :vocabulary]
        tokens.append(int(logits.argmax()))
    return tokens[-steps:]


@pytest.mark.parametrize("kind", PURE)
def test_greedy_is_the_likeliest_token_of_a_full_forward(kind: str, tokenizer: Any) -> None:
    model = adapted(kind)
    expected = walk(model, prompt_ids(tokenizer, PROMPT), 12, len(tokenizer))
    tokenizer_without_end = tiny_tokenizer(template=None)
    answer = generate_text(model, tokenizer_without_end, PROMPT, max_new_tokens=12)
    cut = expected[: expected.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in expected else expected
    assert answer == tokenizer.decode(cut, skip_special_tokens=True)
    assert answer


@pytest.mark.parametrize("kind", [*PURE, "bamba", "jamba", "zamba2", "falcon_h1"])
def test_a_batch_is_its_single_runs(kind: str, tokenizer: Any) -> None:
    model = adapted(kind)
    prompts = ["a", "What is the answer?", "state space models remember"]
    together = generate_texts(model, tokenizer, prompts, max_new_tokens=6)
    assert together == [generate_text(model, tokenizer, prompt, max_new_tokens=6) for prompt in prompts]
    assert len(set(together)) == 3


def test_it_stops_at_eos() -> None:
    tokenizer = tiny_tokenizer(template=None)
    model = adapted("mamba")
    said = walk(model, prompt_ids(tokenizer, PROMPT), 8, len(tokenizer))
    end = next(i for i in range(2, 8) if said[i] not in said[:i])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(said[end])
    model.generation_config.eos_token_id = None
    assert generate_text(model, tokenizer, PROMPT, max_new_tokens=8) == tokenizer.decode(said[:end])


@pytest.mark.parametrize("kind", ["codestral", "bamba"])
def test_padded_rows_of_the_vocabulary_are_never_sampled(kind: str, tokenizer: Any) -> None:
    model = patch_model(tiny_model(kind, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] *= 50
    plain = walk(model, prompt_ids(tokenizer, PROMPT), 4, model.config.vocab_size)
    assert max(plain) >= len(tokenizer)  # without our care they would be
    seen: list[int] = []
    listening = tiny_tokenizer(template=None)
    listening.decode = lambda tokens, **keys: seen.extend(tokens) or tokenizer.decode(tokens, **keys)
    for settings in ({"temperature": 0}, {"temperature": 1.5, "seed": 0}, {"repetition_penalty": 2.0}):
        seen.clear()
        generate_text(model, listening, PROMPT, max_new_tokens=16, **settings)
        assert len(seen) > 4 and max(seen) < len(tokenizer)


def test_the_seed_decides_and_leaves_the_random_state(tokenizer: Any) -> None:
    model = adapted("mamba2")
    before = torch.get_rng_state()
    keys = {"max_new_tokens": 16, "temperature": 2.0}
    first, again, other = (generate_text(model, tokenizer, PROMPT, seed=seed, **keys) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert first == again != other


def test_the_models_own_generation_config_does_not_meddle(tokenizer: Any) -> None:
    model = adapted("mamba")
    expected = generate_text(model, tokenizer, PROMPT, max_new_tokens=8)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 9.0
    model.generation_config.repetition_penalty = 5.0
    model.config.use_cache = False
    assert [generate_text(model, tokenizer, PROMPT, max_new_tokens=8) for _ in range(3)] == [expected] * 3


def test_training_mode_and_padding_side_come_back() -> None:
    tokenizer = tiny_tokenizer(template=None)
    tokenizer.padding_side = "right"
    model = adapted("mamba").train()
    model.get_base_model().lm_head.eval()
    modes = [module.training for module in model.modules()]
    generate_text(model, tokenizer, PROMPT, max_new_tokens=2)
    assert [module.training for module in model.modules()] == modes
    assert tokenizer.padding_side == "right"


def test_prompts_are_put_as_the_tokenizers_template_puts_them() -> None:
    tokenizer = tiny_tokenizer(template=MARKED_TEMPLATE)
    model = adapted("mamba")
    asked = generate_text(model, tokenizer, PROMPT, max_new_tokens=8)
    assert asked == generate_text(model, tokenizer, f"<|u|>{PROMPT}<|a|>", chat=False, max_new_tokens=8)
    assert asked != generate_text(model, tokenizer, PROMPT, chat=False, max_new_tokens=8)


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(tokenizer: Any) -> None:
    model = adapted("mamba")
    whole = generate_text(model, tokenizer, PROMPT, max_new_tokens=20)
    stop = whole[4:6]
    assert generate_text(model, tokenizer, PROMPT, max_new_tokens=20, stop=stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", ["mamba", "bamba"])
def test_a_model_in_16_bit_with_masters_in_training_generates(kind: str, tokenizer: Any) -> None:
    section = AdapterSection(r=4, modules_to_save=["lm_head"], train_also=["conv1d"])
    model = apply_adapter(patch_model(tiny_model(kind, dtype=torch.bfloat16)), section)
    assert generate_text(model, tokenizer, PROMPT, max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: 2.5"),
        ({"temperature": -1}, "temperature: -1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0}, "top_p: 0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"top_k": -1}, "top_k: -1"),
        ({"min_p": 2}, "min_p: 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0"),
        ({"seed": -3}, "seed: -3"),
        ({"stop": [""]}, "stop: "),
        ({"max_tokens": 5}, "max_tokens is not a setting"),
        ({"chat": True}, "chat template"),
    ],
)
def test_impossible_settings_are_mistakes(settings: dict[str, Any], said: str, tokenizer: Any) -> None:
    with pytest.raises(RecipeError) as error:
        generate_text(tiny_model("mamba"), tokenizer, PROMPT, **settings)
    assert said in str(error.value)


@pytest.mark.parametrize("prompt", ["", "  \n", "half \ud800 a character", 5])
def test_prompts_without_text_are_mistakes(prompt: Any, tokenizer: Any) -> None:
    with pytest.raises(RecipeError, match="prompt"):
        generate_text(tiny_model("mamba"), tokenizer, prompt)


def test_all_wrong_settings_are_told_at_once(tokenizer: Any) -> None:
    with pytest.raises(RecipeError) as error:
        generate_text(tiny_model("mamba"), tokenizer, PROMPT, temperature=-1, top_p=7)
    assert len(error.value.mistakes) == 2


@pytest.mark.parametrize("kind", ["mamba", "bamba"])
def test_rows_of_a_batch_stop_on_their_own(kind: str) -> None:
    """By an end token and by a stop text, at different places, and as each does alone."""
    tokenizer = tiny_tokenizer(template=None)
    model = adapted(kind)
    prompts = ["a", "What is the answer?", "state space models remember"]
    whole = generate_texts(model, tokenizer, prompts, max_new_tokens=24)
    places = dict(zip(prompts, whole, strict=True))
    stop = next(char for char in whole[0][3:] if char.isascii() and char not in whole[0][:3])
    end = next(char for char in whole[1][2:] if char.isascii() and char not in whole[1][:2] + stop)
    model.generation_config.eos_token_id = tokenizer(end)["input_ids"][0]
    said = generate_texts(model, tokenizer, prompts, max_new_tokens=24, stop=stop)
    for prompt, answer in zip(prompts, said, strict=True):
        ends = [at for mark in (stop, end) if (at := places[prompt].find(mark)) >= 0]
        assert answer == places[prompt][: min(ends, default=None)]
        assert answer == generate_text(model, tokenizer, prompt, max_new_tokens=24, stop=stop)
    assert len({len(answer) for answer in said}) > 1
