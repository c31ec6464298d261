"""Models from scratch: sizes, dimensions, and the papers' initialisation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from ssm_tune.architectures import ARCHITECTURES, plan_config
from ssm_tune.mixers import is_patched
from ssm_tune.model import init_model, load_model, meta_model
from ssm_tune.recipe import ModelSection, RecipeError

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
NAMES = tuple(ARCHITECTURES)


def section(architecture: str = "mamba", size: str | None = None, **dimensions: Any) -> ModelSection:
    return ModelSection(architecture=architecture, size=size, dimensions=dimensions)


def small(architecture: str, **dimensions: Any) -> ModelSection:
    narrow = {"head_dim": 16, "state_size": 32} if architecture == "mamba2" else {}
    return section(architecture, **{"hidden_size": 64, "num_hidden_layers": 4, **narrow, **dimensions})


def first_loss(model: Any, vocab_size: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (4, 64), generator=generator)
    with torch.no_grad():
        return model.eval()(input_ids=tokens, labels=tokens).loss.item()


# -- the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_size", [259, 4096])
@pytest.mark.parametrize("architecture", NAMES)
def test_first_loss_is_that_of_guessing(architecture: str, vocab_size: int, tied: bool) -> None:
    for seed in range(3):
        model = init_model(small(architecture, tie_word_embeddings=tied), vocab_size, seed=seed)
        loss = first_loss(model, vocab_size, seed)
        assert loss == pytest.approx(math.log(vocab_size), rel=0.05)


@pytest.mark.parametrize("architecture", NAMES)
def test_first_loss_of_a_wide_model_with_a_tied_head(architecture: str) -> None:
    """With 0.02 for the embedding a tied Mamba of this width starts 50 % too high: each token predicts itself."""
    model = init_model(small(architecture, hidden_size=1280, num_hidden_layers=1, tie_word_embeddings=True), 4096)
    assert first_loss(model, 4096, 0) == pytest.approx(math.log(4096), rel=0.05)


def test_transformers_own_start_is_not_that() -> None:
    """What this module is for; if it fails, transformers has changed and initialization.py may be too much."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = plan_config(small("mamba2", hidden_size=128, initializer_range=0.1), 1024, NO_TOKENS)
    stock = AutoModelForCausalLM.from_config(config)
    assert first_loss(stock, 1024, 0) > 1.05 * math.log(1024)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["mamba", "falcon_mamba"])
def test_parameters_of_mamba1(architecture: str) -> None:
    model = init_model(small(architecture), 512, seed=3)
    for block in model.backbone.layers:
        mixer = block.mixer
        assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(128, 16), rtol=1e-6)
        assert (mixer.D == 1).all()
        steps = softplus(mixer.dt_proj.bias)
        assert steps.min() >= 0.00099 and steps.max() <= 0.1001
        assert steps.log().mean() == pytest.approx(math.log(0.01), abs=0.4)  # the middle of log-uniform
        check_uniform(mixer.dt_proj.weight, mixer.dt_proj.in_features**-0.5)
        check_uniform(mixer.x_proj.weight, 128**-0.5)
        check_shared_parts(model, block)


@torch.no_grad()
def test_parameters_of_mamba2() -> None:
    model = init_model(small("mamba2", hidden_size=512, n_groups=2), 512, seed=3)
    for block in model.backbone.layers:
        mixer = block.mixer
        A = mixer.A_log.exp()
        assert A.shape == (64,) and A.min() >= 1 and A.max() <= 16
        assert A.mean() == pytest.approx(8.5, abs=1.5) and A.unique().numel() == 64
        assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
        steps = softplus(mixer.dt_bias)
        assert steps.min() >= 0.00099 and steps.max() <= 0.1001
        assert steps.log().mean() == pytest.approx(math.log(0.01), abs=0.5)
        check_shared_parts(model, block)


def check_shared_parts(model: Any, block: Any) -> None:
    width = model.config.hidden_size
    check_uniform(block.mixer.in_proj.weight, width**-0.5)
    check_uniform(block.mixer.out_proj.weight, (2 * width) ** -0.5 / 4**0.5)  # four layers, divided once
    check_uniform(block.mixer.conv1d.weight, 0.5)
    check_uniform(block.mixer.conv1d.bias, 0.5)
    assert (block.norm.weight == 1).all() and (model.backbone.norm_f.weight == 1).all()
    assert model.backbone.embeddings.weight.std() == pytest.approx(0.02, rel=0.05)


def check_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_a_floor_and_a_range_for_the_step() -> None:
    model = init_model(small("mamba2", time_step_min=0.5, time_step_max=0.6, time_step_floor=0.55), 300)
    steps = torch.cat([softplus(block.mixer.dt_bias) for block in model.backbone.layers])
    assert steps.min().item() == pytest.approx(0.55, rel=1e-5)  # some of 32 were drawn below
    assert 0.56 < steps.max() <= 0.6001


def test_a_constant_dt_proj() -> None:
    model = init_model(small("mamba", time_step_init_scheme="constant", time_step_scale=2.0), 300)
    weight = model.backbone.layers[0].mixer.dt_proj.weight
    assert torch.allclose(weight, torch.full_like(weight, 2 * 4**-0.5))  # the rank of width 64 is 4


@pytest.mark.parametrize("architecture", NAMES)
def test_the_seed_alone_decides(architecture: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = init_model(small(architecture), 300, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = init_model(small(architecture), 300, seed=5).state_dict()
    other = init_model(small(architecture), 300, seed=6).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["backbone.embeddings.weight"], other["backbone.embeddings.weight"])
    assert {value.dtype for value in one.values()} == {torch.float32}


@pytest.mark.parametrize("architecture", NAMES)
def test_saved_and_loaded(tmp_path: Path, architecture: str) -> None:
    model = init_model(small(architecture), 300, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    assert is_patched(model) and model.training
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert (loaded.config.pad_token_id, loaded.config.bos_token_id, loaded.config.eos_token_id) == (0, 1, 2)


def test_a_parameter_without_a_rule_is_an_error() -> None:
    from ssm_tune.architectures import initialize

    model = meta_model(plan_config(small("mamba"), 300, NO_TOKENS)).to_empty(device="cpu")
    model.backbone.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(NotImplementedError, match=r"backbone\.extra"):
        initialize(model, 0)


# -- sizes and dimensions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "size", "width", "layers"),
    [
        ("mamba", "130m", 768, 24),
        ("mamba", "370m", 1024, 48),
        ("mamba", "790m", 1536, 48),
        ("mamba1", "1.4b", 2048, 48),
        ("mamba", "2.8b", 2560, 64),
        ("mamba2", "130m", 768, 24),
        ("mamba2", "370m", 1024, 48),
        ("mamba2", "780m", 1536, 48),
        ("mamba2", "1.3b", 2048, 48),
        ("mamba2", "2.7b", 2560, 64),
        ("falcon_mamba", "7b", 4096, 64),
    ],
)
def test_published_sizes(architecture: str, size: str, width: int, layers: int) -> None:
    """Every parameter, counted from the published widths: state 16 or 128, expand 2, convolution 4, heads of 64."""
    inner = 2 * width
    if architecture == "mamba2":
        rows, heads, channels = 50288, inner // 64, inner + 2 * 128
        mixer = width * (inner + channels + heads) + 5 * channels + 3 * heads + inner + inner * width
    else:
        rows, rank = 50280, width // 16
        mixer = width * 2 * inner + 5 * inner + inner * (rank + 32) + (rank + 1) * inner + 17 * inner + inner * width
    tables = 2 if architecture == "falcon_mamba" else 1  # its head is not tied
    expected = tables * rows * width + layers * (mixer + width) + width
    config = plan_config(section(architecture, size), 50277, NO_TOKENS)
    assert sum(parameter.numel() for parameter in meta_model(config).parameters()) == expected


@pytest.mark.parametrize(
    ("size", "vocabulary", "parameters"), [("7b", 32768, 7_285_403_648), ("8b", 256000, 8_236_999_680)]
)
def test_large_mamba2_has_the_published_number_of_parameters(size: str, vocabulary: int, parameters: int) -> None:
    """Codestral's weights are 7.29 billion numbers, those of NVIDIA's mamba2-8b-3t-4k 8.24."""
    config = plan_config(section("mamba2", size), vocabulary, NO_TOKENS)
    assert sum(parameter.numel() for parameter in meta_model(config).parameters()) == parameters


@pytest.mark.parametrize(("architecture", "rows"), [("mamba", 50280), ("mamba2", 50288), ("falcon_mamba", 50280)])
def test_vocabulary_is_padded_as_published(architecture: str, rows: int) -> None:
    assert plan_config(small(architecture), 50277, NO_TOKENS).vocab_size == rows
    assert plan_config(small(architecture, pad_vocab_size_multiple=1), 50277, NO_TOKENS).vocab_size == 50277


def test_a_dimension_overrides_its_size() -> None:
    config = plan_config(section("mamba2", "130m", num_hidden_layers=3, n_groups=4, expand=4), 300, NO_TOKENS)
    assert (config.hidden_size, config.num_hidden_layers, config.n_groups, config.num_heads) == (768, 3, 4, 48)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ModelSection(), "model.architecture is missing"),
        (section("mamba4", "130m"), "'mamba4' cannot be built from scratch. Did you mean mamba"),
        (section("rwkv", "130m"), "Supported: mamba, mamba2, falcon_mamba"),
        (section("mamba", "135m"), "model.size: mamba has no published size '135m'. It has 130m"),
        (section("mamba"), "model.dimensions.hidden_size is missing"),
        (
            section("mamba", "130m", hidden=3),
            "model.dimensions.hidden is not a dimension of mamba. Did you mean hidden_size",
        ),
        (section("mamba", "130m", head_dim=64), "model.dimensions.head_dim is not a dimension of mamba"),
        (section("mamba2", "130m", time_step_rank=4), "model.dimensions.time_step_rank is not a dimension of mamba2"),
        (
            section("mamba", d_model=64, n_layer=2),
            "model.dimensions.d_model is not a dimension of mamba. Did you mean hidden",
        ),
        (section("mamba", "130m", hidden_size="wide"), "model.dimensions.hidden_size is 'wide'"),
        (section("mamba", "130m", num_hidden_layers=0), "model.dimensions.num_hidden_layers is 0"),
        (section("mamba", "130m", use_bias="maybe"), "use_bias"),
        (section("mamba", "130m", vocab_size=300), "model.dimensions.vocab_size follows the tokenizer"),
        (section("mamba2", "130m", num_heads=8), "model.dimensions.num_heads follows from"),
        (section("mamba2", hidden_size=100, num_hidden_layers=2), "200, which is not a multiple of head_dim 64"),
        (section("mamba2", "130m", n_groups=5), "24 heads"),
        (section("mamba", "130m", pad_vocab_size_multiple=-8), "pad_vocab_size_multiple"),
        (ModelSection(architecture="mamba2", size="130m", pattern="M*M-"), "model.pattern has no meaning for"),
        (ModelSection(architecture="mamba2", size="130m", attention_ratio=0.1), "model.attention_ratio"),
        (ModelSection(architecture="mamba2", size="130m", mlp_ratio=0.5), "model.mlp_ratio"),
        (ModelSection(architecture="mamba2", size="130m", layers=12), "model.layers"),
        (ModelSection(architecture="mamba2", size="130m", attention_every=4), "model.attention_every"),
        (ModelSection(architecture="mamba2", size="130m", mixer="mamba"), "model.mixer"),
    ],
)
def test_mistakes_are_said(wrong: ModelSection, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        init_model(wrong, 300)
    assert said in str(caught.value)


def test_every_mistake_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        plan_config(section("mamba", "7b", hiden_size=3, conv_kernel=0), 300, NO_TOKENS)
    assert len(caught.value.mistakes) == 3
