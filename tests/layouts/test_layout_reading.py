"""Checkpoints of every layout are recognised and read exactly, or refused with the key or file that is at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layouts import original_tensors, write_mistral, write_state_spaces
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from ssm_tune.layouts import detect, open_checkpoint
from ssm_tune.recipe import RecipeError


def tiny_original(kind: str) -> Any:
    """A model whose vocabulary is a multiple of 16, so that an original config's padding gives it."""
    return tiny_model(kind, vocab_size=304)


@pytest.fixture
def hybrid_free(tmp_path: Path) -> Path:
    model = tiny_model("mamba2")
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_detects_each_layout(tmp_path: Path, hybrid_free: Path) -> None:
    write_state_spaces(tmp_path / "one", tiny_original("mamba"))
    write_state_spaces(tmp_path / "two", tiny_original("mamba2"), safetensors=True)
    write_mistral(tmp_path / "three", tiny_model("codestral"))
    assert detect(hybrid_free).name == "huggingface"
    assert detect(tmp_path / "one").name == "state-spaces"
    assert detect(tmp_path / "two").name == "state-spaces"
    assert detect(tmp_path / "three").name == "mistral"


def test_hugging_face_wins_in_a_folder_with_two(tmp_path: Path) -> None:
    model = tiny_model("codestral")
    write_mistral(tmp_path, tiny_model("codestral", seed=1))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.layout.name == "huggingface"
    assert torch.equal(checkpoint.weights()["backbone.norm_f.weight"].load(), model.backbone.norm_f.weight)


def test_the_layout_that_was_downloaded_whole_is_read(tmp_path: Path) -> None:
    write_mistral(tmp_path, tiny_model("codestral"))
    tiny_model("codestral").config.save_pretrained(tmp_path)  # config.json without its weights
    assert detect(tmp_path).name == "mistral"


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "codestral"])
@pytest.mark.parametrize("safetensors", [False, True])
def test_original_tensors_come_back_exactly(tmp_path: Path, kind: str, safetensors: bool) -> None:
    model = tiny_original(kind)
    write_state_spaces(tmp_path, model, safetensors=safetensors, tie_embeddings=kind != "codestral")
    weights = open_checkpoint(str(tmp_path)).weights()
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name].load(), value), name
        assert weights[name].shape == tuple(value.shape)
        assert weights[name].dtype == value.dtype


def test_mamba1_config_of_an_old_file(tmp_path: Path) -> None:
    write_state_spaces(tmp_path, tiny_original("mamba"))
    checkpoint = open_checkpoint(str(tmp_path))
    config = checkpoint.config
    assert config.model_type == "mamba"
    assert (config.hidden_size, config.num_hidden_layers, config.state_size) == (32, 2, 8)
    assert config.vocab_size == 304  # 301 in the file
    assert config.time_step_rank == 2
    assert config.tie_word_embeddings is True  # the key is not in old files
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 0, 0)
    assert config.name_or_path == str(tmp_path)
    assert checkpoint.default_tokenizer == "EleutherAI/gpt-neox-20b"


def test_mamba2_defaults_are_the_original_packages(tmp_path: Path) -> None:
    """transformers' own defaults are Codestral's: 8 groups, an untied head, eos 2."""
    (tmp_path / "config.json").write_text(
        json.dumps({"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
                    "pad_vocab_size_multiple": 16})
    )  # fmt: skip
    config = open_checkpoint(str(tmp_path)).config
    assert config.model_type == "mamba2"
    assert (config.num_heads, config.head_dim, config.n_groups, config.state_size) == (24, 64, 1, 128)
    assert (config.chunk_size, config.conv_kernel, config.expand) == (256, 4, 2)
    assert config.vocab_size == 50288
    assert config.tie_word_embeddings is True
    assert config.eos_token_id == 0
    assert list(config.time_step_limit) == [0.0, float("inf")]


def test_ssm_cfg_reaches_the_config(tmp_path: Path) -> None:
    ssm = {"layer": "Mamba1", "d_state": 24, "d_conv": 3, "expand": 3, "dt_rank": 5, "dt_min": 0.01, "dt_max": 0.2,
           "dt_init": "constant", "dt_scale": 2.0, "dt_init_floor": 1e-3, "conv_bias": False, "bias": True,
           "use_fast_path": False}  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps({"d_model": 64, "n_layer": 3, "vocab_size": 80, "ssm_cfg": ssm, "residual_in_fp32": False})
    )
    config = open_checkpoint(str(tmp_path)).config
    assert (config.state_size, config.conv_kernel, config.expand, config.time_step_rank) == (24, 3, 3, 5)
    assert (config.time_step_min, config.time_step_max, config.time_step_floor) == (0.01, 0.2, 1e-3)
    assert (config.time_step_init_scheme, config.time_step_scale) == ("constant", 2.0)
    assert (config.use_conv_bias, config.use_bias, config.residual_in_fp32) == (False, True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rms_norm": 3}, "rms_norm"),
        ({"d_intermediate": "wide"}, "d_intermediate"),
        ({"attn_layer_idx": [7]}, "attn_layer_idx"),
        ({"attn_layer_idx": [1]}, "attn_cfg.num_heads"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4}}, "attn_cfg.causal"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4, "causal": True, "alibi": 1}}, "attn_cfg.alibi"),
        ({"ssm_cfg": {"layer": "Mamba1"}, "rms_norm": False}, "rms_norm"),
        ({"ssm_cfg": {"layer": "Mamba1"}, "d_intermediate": 128}, "d_intermediate"),
        ({"ssm_cfg": {"layer": "Mamba1"}, "attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"ssm_cfg": {"layer": "Mamba3"}, "attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"ssm_cfg": {"layer": "Mamba3", "d_conv": 4}}, "ssm_cfg.d_conv"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "ssm_cfg.d_ssm"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "ssm_cfg.D_has_hdim"),
        ({"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, "ssm_cfg.rmsnorm"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "ssm_cfg.norm_before_gate"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_rank": 4}}, "ssm_cfg.dt_rank"),
        ({"ssm_cfg": {"headdim": 64}}, "ssm_cfg.headdim"),
        ({"ssm_cfg": {"layer": "Mamba4"}}, "Mamba4"),
        ({"ssm_cfg": [1]}, "ssm_cfg"),
        ({"d_model": "wide"}, "d_model"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write_state_spaces(tmp_path, tiny_original("mamba2"), **change)
    with pytest.raises(RecipeError, match=named.replace(".", r"\.")) as caught:
        open_checkpoint(str(tmp_path))
    assert "config.json" in str(caught.value)


def test_every_mistake_of_a_config_is_said_at_once(tmp_path: Path) -> None:
    write_state_spaces(tmp_path, tiny_original("mamba"), rms_norm=False, d_intermediate=4, nonsense=1)
    with pytest.raises(RecipeError) as caught:
        open_checkpoint(str(tmp_path))
    assert len(caught.value.mistakes) == 3


def test_codestral_config(tmp_path: Path) -> None:
    model = tiny_model("codestral", num_heads=2, head_dim=64, n_groups=2, state_size=128, vocab_size=304)
    write_mistral(tmp_path, model)
    checkpoint = open_checkpoint(str(tmp_path))
    config = checkpoint.config
    assert (config.model_type, config.n_groups, config.num_heads, config.vocab_size) == ("mamba2", 2, 2, 304)
    assert (config.tie_word_embeddings, config.eos_token_id) == (False, 2)
    expected = model.state_dict()
    weights = checkpoint.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name].load(), value) for name, value in expected.items())


@pytest.mark.parametrize(("change", "named"), [({"n_heads": 8}, "n_heads"), ({"rms_norm": False}, "rms_norm")])
def test_codestral_refusals(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write_mistral(tmp_path, tiny_model("codestral"), **change)
    with pytest.raises(RecipeError, match=named):
        open_checkpoint(str(tmp_path))


def test_codestral_with_a_key_missing(tmp_path: Path) -> None:
    write_mistral(tmp_path, tiny_model("codestral"))
    params = json.loads((tmp_path / "params.json").read_text())
    del params["n_groups"]
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(RecipeError, match="n_groups is missing"):
        open_checkpoint(str(tmp_path))


def test_shards_of_both_kinds(tmp_path: Path) -> None:
    model = tiny_model("mamba")
    model.save_pretrained(tmp_path / "safetensors", max_shard_size="20KB")
    assert (tmp_path / "safetensors" / "model.safetensors.index.json").is_file()
    tensors = dict(model.state_dict())
    halves = list(tensors)[::2], list(tensors)[1::2]
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    weight_map = {}
    for number, names in enumerate(halves):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, pickled / file)
        weight_map |= dict.fromkeys(names, file)
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for folder in ("safetensors", "pickled"):
        weights = open_checkpoint(str(tmp_path / folder)).weights()
        for name, tensor in weights.items():
            assert torch.equal(tensor.load(), tensors[name]), name
        assert tensors.keys() - weights.keys() <= {"lm_head.weight"}  # tied: safetensors hold it once


def test_safetensors_are_preferred_to_pickles(hybrid_free: Path) -> None:
    torch.save({}, hybrid_free / "pytorch_model.bin")
    assert open_checkpoint(str(hybrid_free)).weights()


def test_a_pickle_from_before_torch_1_6(tmp_path: Path) -> None:
    model = tiny_original("mamba")
    write_state_spaces(tmp_path, model)
    torch.save(original_tensors(model), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    weights = open_checkpoint(str(tmp_path)).weights()
    assert torch.equal(weights["backbone.embeddings.weight"].load(), model.backbone.embeddings.weight)


# -- files that are broken: one message that names the file -------------------------------------------------------


def refusal(folder: Path | str) -> str:
    with pytest.raises(RecipeError) as caught:
        open_checkpoint(str(folder)).weights()
    assert len(caught.value.mistakes) == 1
    return str(caught.value)


def test_a_folder_that_is_not_there() -> None:
    assert "model.name: there is no folder ./nowhere" in refusal("./nowhere")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt" in refusal(tmp_path)


def test_a_file_in_place_of_a_folder(hybrid_free: Path) -> None:
    assert "is a file" in refusal(hybrid_free / "model.safetensors")


def test_no_weights(hybrid_free: Path) -> None:
    (hybrid_free / "model.safetensors").unlink()
    assert "weights are not" in refusal(hybrid_free)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors(hybrid_free: Path, keep: float) -> None:
    path = hybrid_free / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert str(path) in refusal(hybrid_free)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
@pytest.mark.parametrize("new_format", [True, False])
def test_truncated_pickle(tmp_path: Path, keep: float, new_format: bool) -> None:
    model = tiny_original("mamba")
    write_state_spaces(tmp_path, model)
    path = tmp_path / "pytorch_model.bin"
    torch.save(original_tensors(model), path, _use_new_zipfile_serialization=new_format)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert str(path) in refusal(tmp_path)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    write_state_spaces(tmp_path, tiny_original("mamba"))
    torch.save({"backbone.embedding.weight": Trap()}, tmp_path / "pytorch_model.bin")
    assert "could run code" in refusal(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_of_no_tensors(tmp_path: Path) -> None:
    write_state_spaces(tmp_path, tiny_original("mamba"))
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    assert "not a table of tensors" in refusal(tmp_path)


def test_a_git_lfs_pointer(hybrid_free: Path) -> None:
    (hybrid_free / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal(hybrid_free)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(tmp_path)


@pytest.mark.parametrize("entry", ["../outside.safetensors", "/etc/passwd", 3])
def test_an_index_that_points_elsewhere(tmp_path: Path, entry: Any) -> None:
    tiny_model("mamba").config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
    assert "no file of this checkpoint" in refusal(tmp_path)


def test_both_names_of_the_embedding(tmp_path: Path) -> None:
    model = tiny_model("mamba")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "backbone.embedding.weight" in refusal(tmp_path)


def test_config_that_is_no_json(hybrid_free: Path) -> None:
    (hybrid_free / "config.json").write_text('{\n"model_type": "mamba2",\n"hidden_size": \n')
    message = refusal(hybrid_free)
    assert "config.json" in message and "line" in message


def test_config_of_the_wrong_type(hybrid_free: Path) -> None:
    config = json.loads((hybrid_free / "config.json").read_text())
    (hybrid_free / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    assert "hidden_size" in refusal(hybrid_free)


def test_a_model_type_that_is_not_supported(hybrid_free: Path) -> None:
    (hybrid_free / "config.json").write_text(json.dumps({"model_type": "mamba9"}))
    message = refusal(hybrid_free)
    assert "'mamba9'" in message and "mamba2" in message and "falcon_mamba" in message
