"""Megatron-LM's rank files: read and written as Megatron has them, for any number of ranks; hostile ones refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import megatron_arguments, rank_tensors, write_megatron
from safetensors.torch import load_file, save_file
from tiny import carry_state, tiny_model
from transformers import AutoModelForCausalLM

from ssm_tune.architectures.configs import Mamba2HybridConfig
from ssm_tune.conversion import convert
from ssm_tune.layouts import detect, open_checkpoint
from ssm_tune.layouts.inert_pickle import read_inertly
from ssm_tune.model import load_model
from ssm_tune.recipe import RecipeError

TOKENS = torch.randint(3, 290, (1, 21), generator=torch.Generator().manual_seed(3))
LAYERS = ["linear_attention", "full_attention", "mlp", "linear_attention"]


def make(kind: str, **changes: Any) -> Any:
    """A Mamba-2, its head tied or not, or a Nemotron-H that bounds step sizes as little as Megatron does."""
    if kind == "hybrid":
        sizes = {"n_groups": 4, "layers_block_type": LAYERS, "num_attention_heads": 8, "time_step_min": 1e-30}
        return tiny_model("nemotron_h", **sizes, **changes)
    sizes = {"n_groups": 4, "num_hidden_layers": 4, "tie_word_embeddings": kind == "tied"}
    return tiny_model("mamba2", **sizes, **changes)


def assert_same_weights(model: Any, loaded: Any) -> None:
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def shards(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(folder.glob("iter_0000000/mp_rank_*/model_optim_rng.pt"))
    with torch.serialization.safe_globals([argparse.Namespace]):
        return {file.parent.name: torch.load(file) for file in files}


# -- against files written by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "hybrid"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (2, 4)])
def test_a_checkpoint_of_megatron_is_read(tmp_path: Path, kind: str, tp: int, pp: int) -> None:
    model = make(kind)
    write_megatron(tmp_path, model, tp, pp, release=tp == 1)
    assert detect(tmp_path).name == "megatron"
    loaded = load_model(tmp_path, dtype="float32").eval()
    assert loaded.config.vocab_size == -(-300 // (128 * tp)) * 128 * tp  # it does not say how many rows are tokens
    with torch.no_grad():
        logits = loaded(TOKENS, use_cache=False).logits[..., :300]
        expected = model(TOKENS, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["tied", "untied", "hybrid"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 2)])
def test_what_is_written_is_what_megatron_has(tmp_path: Path, kind: str, tp: int, pp: int) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "m", to="megatron", tp=tp, pp=pp)
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "0"
    written = shards(tmp_path / "m")
    assert len(written) == tp * pp
    given = megatron_arguments(model)
    for stage in range(pp):
        layers = range(stage * 4 // pp, (stage + 1) * 4 // pp)
        for rank in range(tp):
            content = written[f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")]
            tensors = {name: value for name, value in content["model"].items() if value is not None}
            expected = rank_tensors(model, rank, tp, layers, last=stage == pp - 1)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], value) for name, value in expected.items())
            arguments = vars(content["args"])
            assert (arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]) == (tp, pp)
            assert arguments["padded_vocab_size"] == -(-300 // (128 * tp)) * 128 * tp
            assert arguments["hybrid_layer_pattern"].replace("|", "") == given["hybrid_override_pattern"]
            same = set(given) - {"exit_signal", "num_attention_heads", "kv_channels", "ffn_hidden_size"}
            same -= set() if kind == "hybrid" else {"num_query_groups"}
            assert {name: arguments[name] for name in same} == {name: given[name] for name in same}
            assert content["checkpoint_version"] == 3.0


@pytest.mark.parametrize("way", ["bars in the pattern", "other names", "a pickle from before torch 1.6"])
def test_other_ways_to_say_the_same(tmp_path: Path, way: str) -> None:
    model = make("hybrid")
    bars = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M*|-M"} if "bars" in way else {}
    write_megatron(tmp_path, model, 1, 2, legacy="pickle" in way, **bars)
    if way == "other names":
        path = tmp_path / "iter_0000042" / "mp_rank_00_000" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        renamed = {
            "decoder.layers.0.norm.weight": "decoder.layers.0.mixer.in_proj.layer_norm_weight",
            "decoder.layers.0.mixer.conv1d.bias": "decoder.layers.0.mixer.conv1d_bias",
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.1.input_layernorm.weight",
        }
        content["model"] = {renamed.get(name, name): value for name, value in content["model"].items()}
        torch.save(content, path)
    loaded = load_model(tmp_path, dtype="float32").eval()
    with torch.no_grad():
        logits, expected = loaded(TOKENS).logits[..., :300], model(TOKENS).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


# -- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "hybrid"])
def test_from_any_ranks_to_any_others(tmp_path: Path, kind: str) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "0")
    sizes = [(2, 1), (4, 4), (1, 2), (2, 2), (1, 1)]
    for number, (tp, pp) in enumerate(sizes):
        convert(tmp_path / f"{number}", tmp_path / f"{number + 1}", to="megatron", tp=tp, pp=pp)
    convert(tmp_path / f"{len(sizes)}", tmp_path / "hf", to="hf")
    loaded = load_model(tmp_path / "hf", dtype="float32")
    assert_same_weights(model, loaded)  # the padding of the vocabulary is off again
    stock, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert_same_weights(model, stock)
    assert not any(report.values())
    files = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("0", "hf")]
    assert files[0] == files[1]  # named as transformers names them
    ours, theirs = loaded.config.to_dict(), model.config.to_dict()
    assert {key for key in theirs if ours[key] != theirs[key]} <= {"_name_or_path", "architectures"}


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "M*-M", "rotary_dim": 6, "mlp_gated": True, "tie_word_embeddings": True},
        {"pattern": "M-M-", "mlp_gated": False, "hidden_act": "relu2", "tie_word_embeddings": True},
        {"pattern": "M*M*", "rotary_dim": 8, "rope_theta": 500.0, "rope_interleaved": True, "num_key_value_heads": 4},
    ],
)
def test_hybrids_that_nemotron_has_no_words_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Positions, gates and tied heads, in our own class; logits through Megatron's files are the model's."""
    sizes = {"vocab_size": 80, "hidden_size": 32, "state_size": 8, "mamba_head_dim": 16, "n_groups": 2}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_conv_kernel": 0}
    defaults = {"tie_word_embeddings": False, "mlp_gated": True, "residual_in_fp32": False}
    model = AutoModelForCausalLM.from_config(Mamba2HybridConfig(**{**sizes, **defaults, **changes})).eval()
    carry_state(model)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "m", to="megatron", tp=2, pp=2)
    loaded = load_model(tmp_path / "m", dtype="float32").eval()
    if loaded.config.model_type == "mamba2_hybrid":
        assert_same_weights(model, loaded)
    with torch.no_grad():
        logits, expected = loaded(TOKENS % 80).logits, model(TOKENS % 80).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_gate_is_split_apart_from_what_it_gates(tmp_path: Path) -> None:
    """Each rank's fc1 has its rows of the gate, then its rows of the other half (megatron/core/transformer/mlp.py)."""
    sizes = {"vocab_size": 80, "hidden_size": 32, "state_size": 8, "mamba_head_dim": 16, "n_groups": 2}
    model = AutoModelForCausalLM.from_config(Mamba2HybridConfig(**sizes, pattern="M-", intermediate_size=48))
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "m", to="megatron", tp=2)
    second = shards(tmp_path / "m")["mp_rank_01"]["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    mlp = model.backbone.layers[1].mixer
    assert torch.equal(second, torch.cat([mlp.gate_proj.weight[24:], mlp.up_proj.weight[24:]]))


def test_dtype_and_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    model = make("tied")
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "m", to="megatron", tp=2, pp=2, dtype="bfloat16")
    last = shards(tmp_path / "m")["mp_rank_01_001"]
    assert last["args"].params_dtype is torch.bfloat16 and last["args"].bf16
    assert last["model"]["output_layer.weight"].dtype is torch.bfloat16
    assert last["model"]["decoder.layers.0.mixer.A_log"].dtype is torch.float32
    loaded = load_model(tmp_path / "m", dtype="auto")
    assert loaded.lm_head.weight is loaded.backbone.embeddings.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


# -- refusals ------------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_model(folder)
    return str(caught.value)


def rewrite(folder: Path, rank: str = "mp_rank_00", **content: Any) -> None:
    path = folder / "iter_0000042" / rank / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | content, path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"normalization": "LayerNorm"}, "normalization is LayerNorm"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon is 1e-06"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is learned_absolute"),
        ({"hybrid_override_pattern": "M*EM"}, "has E"),
        ({"hybrid_override_pattern": "M*-M/MM/MM"}, "has /"),
        ({"mamba_head_dim": "wide"}, "mamba_head_dim is 'wide'"),
        ({"hidden_size": None}, "do not say hidden_size"),
        ({"tensor_model_parallel_size": 3}, "mp_rank_01/model_optim_rng.pt is missing"),
        ({"mamba_state_dim": 16}, "decoder.layers.0.mixer.in_proj.weight is"),
        ({"hybrid_override_pattern": "M*-MM"}, "missing: decoder.layers.4.mixer.A_log"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    ranks = {name: changes.pop(name) for name in ("tensor_model_parallel_size",) if name in changes}
    write_megatron(tmp_path, make("hybrid"), **changes)
    if ranks:
        path = tmp_path / "iter_0000042" / "mp_rank_00" / "model_optim_rng.pt"
        arguments = vars(torch.load(path, weights_only=False)["args"])
        rewrite(tmp_path, args=argparse.Namespace(**{**arguments, **ranks}))
    assert named in refusal(tmp_path)


@pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_01"])
@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit(tmp_path: Path, change: str, rank: str) -> None:
    write_megatron(tmp_path, make("hybrid"), 2)
    path = tmp_path / "iter_0000042" / rank / "model_optim_rng.pt"
    tensors = torch.load(path, weights_only=False)["model"]
    name = "decoder.layers.3.mixer.out_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = torch.zeros(32, 31)
    else:
        name = "decoder.layers.3.mixer.x_proj.weight"
        tensors[name] = torch.zeros(2, 2)
    rewrite(tmp_path, rank, model=tensors)
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    ("tp", "pp", "named"),
    [(3, 1, "n_groups: 4"), (8, 1, "n_groups: 4"), (1, 3, "4 layers"), (0, 1, "--tp is 0")],
)
def test_ranks_that_cannot_share(tmp_path: Path, tp: int, pp: int, named: str) -> None:
    make("hybrid").save_pretrained(tmp_path / "hf")
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path / "hf", tmp_path / "m", to="megatron", tp=tp, pp=pp)
    assert named in str(caught.value) and not (tmp_path / "m").exists()


def test_ranks_for_a_layout_without(tmp_path: Path) -> None:
    make("tied").save_pretrained(tmp_path / "hf")
    with pytest.raises(RecipeError, match="--tp is for the megatron layout"):
        convert(tmp_path / "hf", tmp_path / "o", to="state-spaces", tp=2)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mamba", {}, "no mamba"),
        ("mamba2", {"use_bias": True}, "use_bias is True"),
        ("mamba2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ("mamba2", {"time_step_limit": (0.0, 0.5)}, "time_step_limit is (0.0, 0.5)"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is True"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is silu"),
    ],
)
def test_what_megatron_has_no_words_for(tmp_path: Path, kind: str, changes: dict[str, Any], named: str) -> None:
    tiny_model(kind, **changes).save_pretrained(tmp_path / "hf")
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path / "hf", tmp_path / "m", to="megatron")
    assert named in str(caught.value)


class Trap:
    """Unpickled as a call of whatever it is given."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("call", [(os.mkdir, "sprung"), (eval, "1 / 0"), (subprocess.call, ["touch", "sprung"])])
def test_a_pickle_that_would_run_code_is_not_run(
    tmp_path: Path, call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_megatron(tmp_path, make("tied"))
    rewrite(tmp_path, rng_state=Trap(*call))
    assert "names code to run" in refusal(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_that_would_change_a_function_is_refused(tmp_path: Path) -> None:
    """What makes tensors is found, but may not be given new attributes."""
    import torch._utils

    path = tmp_path / "file"
    path.write_bytes(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x05\x00\x00\x00evilrK\x01s\x86b.")
    with pytest.raises(RecipeError, match=r"names code to run \(a state for"):
        read_inertly(path)
    assert not hasattr(torch._utils._rebuild_tensor_v2, "evilr")


def test_what_is_unknown_in_a_pickle_does_nothing(tmp_path: Path) -> None:
    """Not refused, and not run: what a training left in its checkpoint beside the weights."""
    model = make("tied")
    write_megatron(tmp_path, model)
    rewrite(tmp_path, rng_state=Trap(Path.touch, Path(tmp_path / "sprung")), extra={"x": Trap(Path, "a")})
    assert load_model(tmp_path).config.num_hidden_layers == 4
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("value", [Trap(Path.touch, Path("sprung")), [1, 2], 3.0])
def test_what_is_no_tensor_among_the_tensors(tmp_path: Path, value: Any) -> None:
    write_megatron(tmp_path, make("tied"))
    tensors = rank_tensors(make("tied"), 0, 1, range(4), last=True) | {"decoder.layers.0.mixer.D": value}
    rewrite(tmp_path, model=tensors)
    assert "decoder.layers.0.mixer.D is a" in refusal(tmp_path)
    assert not Path("sprung").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_files(tmp_path: Path, keep: float) -> None:
    write_megatron(tmp_path, make("tied"))
    path = tmp_path / "iter_0000042" / "mp_rank_00" / "model_optim_rng.pt"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert str(path) in refusal(tmp_path)


def test_other_folders_of_megatron(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("soon")
    assert "holds 'soon'" in refusal(tmp_path)
    tracker.write_text("7")
    assert "iter_0000007/mp_rank_00/model_optim_rng.pt is missing" in refusal(tmp_path)
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "iter_0000007" / ".metadata").write_text("")
    assert "distributed checkpoint" in refusal(tmp_path)


def test_a_virtual_pipeline_and_a_file_of_something_else(tmp_path: Path) -> None:
    write_megatron(tmp_path, make("tied"))
    rewrite(tmp_path, model0={})
    assert "virtual pipeline" in refusal(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "iter_0000042" / "mp_rank_00" / "model_optim_rng.pt")
    assert "no checkpoint of Megatron" in refusal(tmp_path)


def test_hugging_face_wins_beside_megatrons_files(tmp_path: Path) -> None:
    model = make("tied")
    write_megatron(tmp_path, make("untied"))
    (tmp_path / "config.json").write_text(json.dumps(json.loads(model.config.to_json_string())))
    save_file({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    assert open_checkpoint(str(tmp_path)).layout.name == "huggingface"
