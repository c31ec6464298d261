"""Hybrids and other architectures from a recipe's model section: the right class and layers, and the papers' start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, softplus
from transformers import AutoModelForCausalLM

from ssm_tune.architectures import initialize, plan_config
from ssm_tune.architectures.hybrid_dimensions import NAMES
from ssm_tune.model import meta_model
from ssm_tune.recipe import ModelSection, RecipeError

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
SSD = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
SHARED = {"num_key_value_heads": 2}

# One small model of every architecture: the section's keys, and the class that is to come out.
SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "mamba2 hybrid": (
        {"architecture": "hybrid", "pattern": "M*M-", "dimensions": {**SMALL, "state_size": 16, "mamba_head_dim": 32}},
        "NemotronHForCausalLM",
    ),
    "mamba hybrid": (
        {"architecture": "hybrid", "mixer": "mamba", "pattern": "M*M-", "dimensions": SMALL},
        "HybridForCausalLM",
    ),
    "mamba hybrid as jamba": (
        {"architecture": "hybrid", "mixer": "mamba", "attention_every": 4, "layers": 8, "dimensions": SMALL},
        "JambaForCausalLM",
    ),
    "mamba3 hybrid": (
        {"architecture": "hybrid", "mixer": "mamba3", "pattern": "M*M-", "dimensions": {**SMALL, "state_size": 16}},
        "Mamba3ForCausalLM",
    ),
    "mamba3": (
        {"architecture": "mamba3", "dimensions": {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 16}},
        "Mamba3ForCausalLM",
    ),
    "samba": ({"architecture": "samba", "dimensions": {**SMALL, "num_hidden_layers": 4}}, "SambaForCausalLM"),
    "h3": ({"architecture": "h3", "pattern": "M-*-", "dimensions": {**SMALL, "state_size": 16}}, "H3ForCausalLM"),
}
# Those whose order of layers is said by their own dimensions.
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "transformer": ({**SMALL, "num_hidden_layers": 2}, "LlamaForCausalLM"),
    "jamba": (
        {**SMALL, **SHARED, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        "JambaForCausalLM",
    ),
    "nemotron_h": (
        {
            **SMALL,
            **SHARED,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "head_dim": 16,
        },
        "NemotronHForCausalLM",
    ),
    "zamba2": (
        {
            **SMALL,
            "num_hidden_layers": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "use_mem_rope": True,
        },
        "Zamba2ForCausalLM",
    ),
    "bamba": ({**SMALL, **SHARED, **SSD, "num_hidden_layers": 3, "attn_layer_indices": [1]}, "BambaForCausalLM"),
    "falcon_h1": ({**SMALL, **SHARED, **SSD, "num_hidden_layers": 2, "mamba_d_ssm": 128}, "FalconH1ForCausalLM"),
    "granitemoehybrid": (
        {
            **SMALL,
            **SHARED,
            **SSD,
            "shared_intermediate_size": 96,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
        },
        "GraniteMoeHybridForCausalLM",
    ),
}
SECTIONS |= {name: ({"architecture": name, "dimensions": given}, cls) for name, (given, cls) in OWN.items()}


def plan(**keys: Any) -> Any:
    return plan_config(ModelSection(**keys), 1000, TOKENS)


def new_model(kind: str, seed: int = 0) -> Any:
    model = meta_model(plan(**SECTIONS[kind][0]))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(math.nan)  # whatever is not given a value shows
    model.tie_weights()
    initialize(model, seed)
    return model


def test_every_architecture_is_tried_here() -> None:
    assert set(NAMES) == {keys["architecture"] for keys, _ in SECTIONS.values()}


@pytest.mark.parametrize("kind", SECTIONS)
def test_begins_near_ln_v_with_steps_and_decays_in_their_ranges(kind: str) -> None:
    state = torch.random.get_rng_state()
    model = new_model(kind)
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(model).__name__ == SECTIONS[kind][1]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), name
    ids = torch.randint(3, 1000, (4, 33))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    vocabulary = math.log(model.config.vocab_size)
    assert abs(loss - vocabulary) < 0.05 * vocabulary
    mixers = [module for module in model.modules() if "A_log" in module._parameters or "dt_bias" in module._parameters]
    assert mixers or kind in ("transformer", "h3")
    for mixer in mixers:
        assert (mixer.D == 1).all()
        bias = mixer.dt_proj.bias if "dt_proj" in mixer._modules else mixer.dt_bias
        steps = softplus(bias)
        assert steps.min() > 0.00099 and steps.max() < 0.101
        if "A_log" not in mixer._parameters:  # Mamba-3's A comes out of in_proj
            continue
        A = mixer.A_log.exp()
        if A.dim() == 1:
            assert A.min() >= 1 and A.max() <= 16 and not torch.allclose(A, torch.arange(1.0, len(A) + 1))
        else:
            assert torch.allclose(A, torch.arange(1.0, A.shape[-1] + 1).expand_as(A))


@pytest.mark.parametrize("kind", ["mamba2 hybrid", "mamba3 hybrid", "bamba"])
def test_a_seed_is_a_model(kind: str) -> None:
    first, again, other = (dict(new_model(kind, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_what_adds_to_the_residual_begins_smaller_once() -> None:
    model = new_model("mamba2 hybrid")
    inner, outer = model.model.layers[1].mixer.q_proj.weight, model.model.layers[1].mixer.o_proj.weight
    assert 0.4 < outer.std() / inner.std() < 0.6  # one half, for four layers
    samba = new_model("samba").backbone.layers[2].mixer
    assert 0.4 < samba.o_proj.weight.std() / samba.q_proj.weight.std() < 0.6


def test_published_hybrids() -> None:
    for size, layers, width in (("megatron-800m", (20, 4, 24), 1024), ("megatron-8b", (24, 4, 28), 4096)):
        config = plan(architecture="hybrid", size=size)
        counts = tuple(map(config.hybrid_override_pattern.count, "M*-"))
        assert counts == layers
        assert (config.hidden_size, config.intermediate_size, config.num_key_value_heads) == (width, 4 * width, 8)
        assert (config.mamba_num_heads, config.mamba_head_dim, config.n_groups) == (2 * width // 64, 64, 8)
        assert (config.ssm_state_size, config.head_dim, config.mlp_hidden_act) == (
            128,
            width // config.num_attention_heads,
            "gelu",
        )


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "mamba3"])
def test_layers_by_share_period_and_pattern(mixer: str) -> None:
    def types(**keys: Any) -> list[str]:
        config = plan(architecture="hybrid", mixer=mixer, dimensions={"hidden_size": 64}, **keys)
        return [{"mamba": "linear_attention"}.get(layer, layer) for layer in config.layer_types]

    assert types(layers=48, attention_ratio=0.08, mlp_ratio=0.5).count("full_attention") == 4
    assert types(pattern="M*M-") == ["linear_attention", "full_attention", "linear_attention", "mlp"]
    layers = types(layers=16, attention_every=8)
    kinds = [layer for layer in layers if layer != "mlp"]
    assert kinds == ["linear_attention"] * 4 + ["full_attention"] + ["linear_attention"] * 3
    assert plan(architecture="hybrid", mixer=mixer, size="130m", pattern="M*M-").num_hidden_layers == 24


WIDE = {"hidden_size": 64}
UNEVEN = {"hidden_size": 65, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"architecture": "hybrid", "dimensions": {**WIDE, "num_hidden_layers": 4}}, "a hybrid needs its layers"),
        ({"architecture": "hybrid", "mixer": "mamba4", "pattern": "M"}, "not a mixer of hybrids. Did you mean mamba"),
        ({"architecture": "mamba3", "mixer": "mamba3", "size": "130m"}, "model.mixer belongs to architecture hybrid"),
        ({"architecture": "hybrid", "size": "131m", "pattern": "M*"}, "no size '131m'. It has 130m, megatron-800m"),
        ({"architecture": "hybrid", "pattern": "MX", "dimensions": WIDE}, "other symbols than M"),
        ({"architecture": "hybrid", "size": "130m", "pattern": "M*M-M"}, "of which 24 is not a multiple"),
        ({"architecture": "hybrid", "attention_ratio": 0.1, "dimensions": WIDE}, "num_hidden_layers is missing"),
        (
            {"architecture": "hybrid", "layers": 8, "attention_ratio": 0.8, "mlp_ratio": 0.5, "dimensions": WIDE},
            "8 layers cannot be 0.8 attention and 0.5 MLP",
        ),
        ({"architecture": "hybrid", "pattern": "M", "dimensions": {"hiden_size": 64}}, "Did you mean hidden_size"),
        ({"architecture": "hybrid", "pattern": "M", "dimensions": {"hidden_size": 65}}, "multiple of mamba_head_dim"),
        ({"architecture": "mamba3", "dimensions": UNEVEN}, "multiple of mamba_head_dim"),
        (
            {"architecture": "mamba3", "dimensions": {**UNEVEN, "hidden_size": "big"}},
            "hidden_size is 'big'; a positive whole",
        ),
        ({"architecture": "mamba3", "size": "130m", "dimensions": {"vocab_size": 5}}, "follows the tokenizer"),
        ({"architecture": "mamba3", "size": "130m", "dimensions": {"pattern": "M"}}, "write model.pattern"),
        ({"architecture": "transformer", "size": "130m", "attention_every": 4}, "whose order of layers is its own"),
        ({"architecture": "bamba"}, "model.dimensions.hidden_size is missing"),
        ({"architecture": "hybryd", "size": "130m"}, "Did you mean hybrid"),
        (
            {"architecture": "hybrid", "attention_every": 4, "layers": 7, "dimensions": WIDE},
            "model.attention_every: 7 layers are odd",
        ),
        (
            {"architecture": "hybrid", "mlp_ratio": 0.5, "layers": 8, "dimensions": {**WIDE, "num_hidden_layers": 6}},
            "model.layers is 8, model.dimensions.num_hidden_layers 6",
        ),
        (
            {"architecture": "hybrid", "pattern": "M-", "dimensions": {**WIDE, "hidden_dropout": 0.1}},
            "model.dimensions.hidden_dropout has no meaning for a hybrid without attention",
        ),
        ({"architecture": "jamba", "dimensions": {**WIDE, "num_hidden_layers": 4}}, "Set attn_layer_period and attn_l"),
        ({"architecture": "bamba", "dimensions": {**WIDE, "num_hidden_layers": 4}}, "Set attn_layer_indices"),
        ({"architecture": "granitemoehybrid", "dimensions": {**WIDE, "num_hidden_layers": 2}}, "Set layer_types"),
        ({"architecture": "nemotron_h", "dimensions": {**WIDE, "layers_block_type": ["mlp"]}}, "Set layers_block_type"),
        (
            {"architecture": "zamba2", "dimensions": {**WIDE, "num_hidden_layers": 3, "layers_block_type": ["hybrid"]}},
            "model.dimensions: `num_hidden_layers` (3) must be equal",
        ),
        ({"architecture": "transformer", "size": "130m", "dimensions": {"num_key_value_heads": 5}}, "12 is not a mult"),
        ({"architecture": "samba", "size": "130m", "dimensions": {"head_dim": 63}}, "head_dim 63 is odd"),
    ],
)
def test_mistakes_are_said(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(**keys)
    assert said in str(caught.value)


@pytest.mark.parametrize("architecture", ["mamba", "mamba2", "mamba3", "samba", "h3", "transformer"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden_size", 0, "a positive whole number is expected"),
        ("hidden_size", -64, "a positive whole number is expected"),
        ("hidden_size", 64.0, "a positive whole number is expected"),
        ("hidden_size", True, "a positive whole number is expected"),
        ("num_hidden_layers", 0, "a positive whole number is expected"),
        ("initializer_range", -1, "a number above 0 is expected"),
        ("tie_word_embeddings", "yes", "true or false is expected"),
        ("layer_norm_epsilon", "small", "a number above 0 is expected"),
        ("time_step_max", -1, "a number above 0 is expected"),
        ("time_step_min", 1, "time_step_min is 1.0, which is more than time_step_max 0.1"),
        ("time_step_rank", 0, "a positive whole number is expected"),
        ("time_step_rank", "full", "a positive whole number, or auto, is expected"),
        ("time_step_init_scheme", "normal", "random or constant is expected"),
        ("state_size", 0, "a positive whole number is expected"),
        ("expand", 0, "a positive whole number is expected"),
        ("conv_kernel", 0, "a positive whole number is expected"),
        ("chunk_size", 0, "a positive whole number is expected"),
        ("mimo_rank", -1, "a whole number from 0 is expected"),
        ("intermediate_size", 0, "a positive whole number is expected"),
        ("num_attention_heads", 0, "a positive whole number is expected"),
        ("hidden_act", "silly", "an activation such as silu is expected"),
        ("norm", "batch", "rms or layer is expected"),
        ("attention_dropout", 1.5, "a share from 0 to less than 1 is expected"),
        ("sliding_window", 0, "a positive whole number is expected"),
        ("rope_theta", 0, "a number above 0 is expected"),
    ],
)
def test_a_value_that_no_model_can_have_is_named(architecture: str, name: str, value: Any, said: str) -> None:
    """In a class of transformers or of ours alike; what another architecture has is named as unknown."""
    with pytest.raises(RecipeError) as caught:
        plan(architecture=architecture, dimensions={"hidden_size": 64, "num_hidden_layers": 2, name: value})
    assert len(caught.value.mistakes) == 1
    mistake = caught.value.mistakes[0]
    unknown = f"model.dimensions.{name} is not a dimension of {architecture}"
    assert mistake.startswith(unknown) or (f"model.dimensions.{name} is" in mistake and said in mistake), mistake


def test_whole_numbers_stand_for_fractions() -> None:
    """A recipe's `time_step_max: 1` is no mistake, though the class takes floats only."""
    config = plan(architecture="mamba", dimensions={"hidden_size": 64, "num_hidden_layers": 2, "time_step_max": 1})
    assert config.time_step_max == 1.0


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "mamba3"])
@pytest.mark.parametrize(
    "layers", [{"pattern": "M"}, {"pattern": "M-M-"}, {"attention_ratio": 0.08, "mlp_ratio": 0.5, "layers": 4}]
)
def test_hybrids_without_attention_evaluate_generate_and_load_again(mixer, layers, tmp_path, caplog) -> None:
    """Nemotron-H's class asks its cache for the attention's length, also where there is none."""
    keys = {"architecture": "hybrid", "mixer": mixer, "dimensions": {"hidden_size": 64, "state_size": 16}, **layers}
    model = meta_model(plan(**keys))
    assert ("model.attention_ratio: 0.08 of 4 layers is none at all" in caplog.text) == ("layers" in layers)
    model.to_empty(device="cpu")
    model.tie_weights()
    initialize(model, 0)
    model.eval()
    ids = torch.randint(3, 1000, (2, 12))
    with torch.no_grad():
        logits = model(ids).logits
        cached = model(ids[:, :11], use_cache=True)
        last = model(ids[:, 11:], cache=cached.cache).logits
    torch.testing.assert_close(last[:, 0], logits[:, 11], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, logits)
    assert again.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 15)


def test_zamba2_shares_every_sixth_layer_where_nothing_is_said() -> None:
    kinds = plan(architecture="zamba2", dimensions={"hidden_size": 64, "num_hidden_layers": 13}).layers_block_type
    assert [index for index, kind in enumerate(kinds) if kind == "hybrid"] == [5, 11]
    assert plan(architecture="zamba2", dimensions={"hidden_size": 64, "num_hidden_layers": 2}).layers_block_type == [
        "linear_attention",
        "hybrid",
    ]


def test_a_size_keeps_the_share_that_is_not_asked_for() -> None:
    kinds = plan(architecture="hybrid", size="130m", mlp_ratio=0.25).layers_block_type
    assert (kinds.count("full_attention"), kinds.count("mlp"), len(kinds)) == (2, 6, 24)


def test_a_pattern_is_repeated_to_the_layers_that_are_asked_for() -> None:
    keys = {"architecture": "hybrid", "mixer": "mamba3", "pattern": "M*M-", "layers": 8}
    assert plan(**keys, dimensions={"hidden_size": 64}).pattern == "M*M-M*M-"


@pytest.mark.parametrize("kind", [kind for kind in SECTIONS if not kind.startswith("mamba hybrid as")])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_tied_as_asked_or_the_wish_is_refused(kind: str, tied: bool) -> None:
    keys = SECTIONS[kind][0]
    keys = {**keys, "dimensions": {**keys["dimensions"], "tie_word_embeddings": tied}}
    if tied and SECTIONS[kind][1] == "NemotronHForCausalLM":
        with pytest.raises(RecipeError, match=r"model\.dimensions\.tie_word_embeddings: the head of this"):
            plan(**keys)
        return
    model = meta_model(plan(**keys))
    model.tie_weights()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
