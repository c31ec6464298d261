"""convert: between all layouts and back without a bit changed; refusals that leave nothing; one tensor in memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import write_megatron
from original_layouts import forward_original, original_tensors, write_mistral, write_state_spaces
from safetensors.torch import load_file, save_file
from tiny import HYBRID, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from ssm_tune.conversion import convert
from ssm_tune.model import load_model
from ssm_tune.recipe import RecipeError

TOKENS = torch.randint(3, 290, (1, 21), generator=torch.Generator().manual_seed(3))


def tiny_original(kind: str, **changes: Any) -> Any:
    """A model that the original layouts have words for; Codestral's key file has fixed widths."""
    if kind == "codestral":
        changes = {"num_heads": 2, "head_dim": 64, "n_groups": 2, "state_size": 128, "chunk_size": 256, **changes}
    return tiny_model(kind, vocab_size=384, **changes)


def write_huggingface(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


WRITERS: dict[str, Callable[[Path, Any], Any]] = {
    "hf": write_huggingface,
    "state-spaces": lambda folder, model: write_state_spaces(
        folder, model, tie_embeddings=model.config.tie_word_embeddings
    ),
    "mistral": write_mistral,
    "megatron": lambda folder, model: write_megatron(folder, model, 1, 2, fp32_residual_connection=True),
}


def assert_same_weights(one: Any, other: Any) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name


# -- round trips --------------------------------------------------------------------------------------------------


# Mistral's layout has Codestral's widths alone, Megatron's has no Mamba-1.
PAIRS = [(source, target, kind) for source in WRITERS for target in WRITERS
         for kind in ("mamba", "mamba2", "untied", "codestral")
         if (kind == "codestral" or "mistral" not in (source, target))
         and (kind != "mamba" or "megatron" not in (source, target))]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "kind"), PAIRS)
def test_every_pair_of_layouts_and_back(tmp_path: Path, source: str, target: str, kind: str) -> None:
    changes = {"tie_word_embeddings": False} if kind == "untied" else {}
    model = tiny_original("mamba2" if kind == "untied" else kind, **changes)
    WRITERS[source](tmp_path / "a", model)
    convert(tmp_path / "a", tmp_path / "b", to=target)
    convert(tmp_path / "b", tmp_path / "c", to=source)
    for folder in ("b", "c"):
        loaded = load_model(tmp_path / folder)
        assert_same_weights(model, loaded)
        ours, theirs = loaded.config.to_dict(), model.config.to_dict()
        ids = ("pad_token_id", "bos_token_id", "eos_token_id")  # for which the originals have no words
        different = {key for key in theirs if ours.get(key) != theirs[key] and key not in ids}
        left_out = {"chunk_size"} if source == "megatron" else set()
        assert different <= {"_name_or_path", "architectures", "time_step_limit", "use_cache", *left_out}


def test_original_folder_from_hugging_faces(tmp_path: Path) -> None:
    """What the original package reads: one pickle with every parameter, and its own config."""
    for kind in ("mamba", "mamba2"):
        model = tiny_original(kind)
        model.save_pretrained(tmp_path / f"{kind}-hf")
        folder = convert(tmp_path / f"{kind}-hf", tmp_path / kind, to="state-spaces")
        assert {file.name for file in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
        written = torch.load(folder / "pytorch_model.bin", weights_only=True)
        expected = original_tensors(model)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], value) for name, value in expected.items())
        config = json.loads((folder / "config.json").read_text())
        logits = model(input_ids=TOKENS, use_cache=False).logits[0]
        original = forward_original(written, config["ssm_cfg"], TOKENS[0])
        assert (logits - original).abs().max() <= 2e-5 * original.abs().max()
        # A tied weight is one storage, not two.
        size = sum(value.nbytes for name, value in expected.items() if name != "lm_head.weight")
        assert (folder / "pytorch_model.bin").stat().st_size < size + 20_000


def test_original_config_says_what_differs_from_its_defaults(tmp_path: Path) -> None:
    model = tiny_model(
        "mamba2", vocab_size=304, n_groups=2, use_bias=True, time_step_limit=(0.0, 0.5), residual_in_fp32=False
    )
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((convert(tmp_path / "hf", tmp_path / "o", to="state-spaces") / "config.json").read_text())
    assert config == {
        "d_model": 32,
        "d_intermediate": 0,
        "n_layer": 2,
        "vocab_size": 304,
        "ssm_cfg": {
            "layer": "Mamba2",
            "bias": True,
            "d_state": 16,
            "headdim": 16,
            "ngroups": 2,
            "chunk_size": 16,
            "dt_limit": [0.0, 0.5],
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": False,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }


def test_a_vocabulary_that_is_no_multiple(tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(tmp_path / "hf")  # 300 rows
    convert(tmp_path / "hf", tmp_path / "o", to="state-spaces")
    assert json.loads((tmp_path / "o" / "config.json").read_text())["pad_vocab_size_multiple"] == 1
    assert load_model(tmp_path / "o").config.vocab_size == 300


def test_stock_transformers_loads_what_was_an_original_folder(tmp_path: Path) -> None:
    model = tiny_original("mamba2")
    write_state_spaces(tmp_path / "o", model)
    tiny_tokenizer().save_pretrained(tmp_path / "o")
    folder = convert(tmp_path / "o", tmp_path / "hf", to="hf")
    stock, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert_same_weights(model, stock)
    assert set(load_file(folder / "model.safetensors")) == set(model.state_dict()) - {"lm_head.weight"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Mamba2ForCausalLM"] and config["dtype"] == "float32"
    assert str(tmp_path) not in (folder / "config.json").read_text()
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", HYBRID)
def test_hybrids_within_hugging_faces_layout(tmp_path: Path, kind: str) -> None:
    """From a pickle to safetensors; experts keep the names that they have in files."""
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    convert(tmp_path / "a", tmp_path / "b", to="hf")
    assert_same_weights(model, load_model(tmp_path / "b"))


# -- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["hf", "state-spaces"])
def test_dtype_casts_all_but_ssm_parameters(tmp_path: Path, target: str) -> None:
    model = tiny_original("mamba2")
    model.save_pretrained(tmp_path / "a")
    folder = convert(tmp_path / "a", tmp_path / "b", to=target, dtype="bfloat16")
    loaded = load_model(folder, dtype="auto")
    for name, value in model.state_dict().items():
        kept = name.endswith(("A_log", ".D", "dt_bias"))
        assert loaded.state_dict()[name].dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(loaded.state_dict()[name], value if kept else value.bfloat16()), name
    assert {file.name for file in folder.iterdir()} <= {
        "config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"
    }  # fmt: skip
    if target == "hf":
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_mixed_dtypes_are_kept_and_aligned(tmp_path: Path) -> None:
    model = tiny_original("mamba")
    model.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    mixed = {
        name: value if name.endswith(("A_log", "norm.weight")) else value.half() for name, value in tensors.items()
    }
    mixed["backbone.layers.0.mixer.D"] = mixed["backbone.layers.0.mixer.D"].to(torch.bfloat16)
    save_file(mixed, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "a", tmp_path / "b", to="state-spaces")
    convert(tmp_path / "b", tmp_path / "c", to="hf")
    written = load_file(tmp_path / "c" / "model.safetensors")
    assert written.keys() == mixed.keys()
    assert all(
        written[name].dtype == value.dtype and torch.equal(written[name], value) for name, value in mixed.items()
    )


# -- refusals: one message, nothing written ------------------------------------------------------------------------


def refusal(tmp_path: Path, src: Path, to: str = "state-spaces", **options: Any) -> str:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecipeError) as caught:
        convert(src, tmp_path / "new", to=to, **options)
    assert sorted(tmp_path.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "to", "named"),
    [
        ("falcon_mamba", {}, "state-spaces", "falcon_mamba"),
        ("bamba", {}, "state-spaces", "bamba"),
        ("mamba", {}, "mistral", "Mamba-2 alone"),
        ("mamba2", {"layer_norm_epsilon": 1e-6}, "state-spaces", "layer_norm_epsilon is 1e-06"),
        ("mamba2", {}, "mistral", "head_dim is 16"),
        ("mamba2", {"use_bias": True}, "mistral", "use_bias is True"),
        ("mamba", {}, "megatorn", "hf, state-spaces, mistral"),
    ],
)
def test_what_a_target_cannot_express(tmp_path: Path, kind: str, changes: dict[str, Any], to: str, named: str) -> None:
    tiny_model(kind, **changes).save_pretrained(tmp_path / "a")
    assert named in refusal(tmp_path, tmp_path / "a", to)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit(tmp_path: Path, change: str) -> None:
    tiny_model("mamba").save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    name = "backbone.layers.1.mixer.x_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = torch.ones(2)
    else:
        name = "backbone.layers.9.mixer.x_proj.weight"
        tensors[name] = torch.ones(2)
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    assert name in refusal(tmp_path, tmp_path / "a")


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    model = tiny_original("mamba")
    write_state_spaces(tmp_path / "a", model)
    tensors = original_tensors(model)
    tensors["lm_head.weight"][5] += 1
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    assert "the two differ" in refusal(tmp_path, tmp_path / "a", "hf")


def test_a_target_that_exists(tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(RecipeError, match="exists already"):
        convert(tmp_path / "a", tmp_path / "b", to="hf")


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    assert "Merge it first" in refusal(tmp_path, tmp_path / "a")


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert "convert: there is no folder" in refusal(tmp_path, tmp_path / "nowhere")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_original("mamba").save_pretrained(tmp_path / "a")

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ssm_tune.layouts.writing._write_safetensors", fail)
    assert "the disk is full" in refusal(tmp_path, tmp_path / "a", "hf")


def test_a_truncated_source(tmp_path: Path) -> None:
    tiny_original("mamba").save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert "truncated" in refusal(tmp_path, tmp_path / "a")


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("to", "dtype"), [("state-spaces", None), ("state-spaces", "bfloat16"), ("hf", "bfloat16")])
def test_memory_holds_one_tensor_at_a_time(tmp_path: Path, to: str, dtype: str | None) -> None:
    """Of 330 MB of weights, no more than copies of the largest tensor (50 MB) are ever in anonymous memory."""
    from ssm_tune.model import init_model
    from ssm_tune.recipe import ModelSection

    dimensions = {"hidden_size": 1024, "num_hidden_layers": 10, "tie_word_embeddings": False}
    init_model(ModelSection(architecture="mamba", dimensions=dimensions), 12_288).save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").stat().st_size > 300e6
    peak, done = [anonymous_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_memory())

    before = anonymous_memory()
    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.05)
    convert(tmp_path / "a", tmp_path / "b", to=to, dtype=dtype)
    done.set()
    watcher.join()
    assert peak[0] - before < 110e6


def anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status).group(1))  # type: ignore[union-attr]
