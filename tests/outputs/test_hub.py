"""Publishing, through huggingface_hub's own client, to a small server on this machine that speaks the Hub's API."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import TOKEN, Hub
from huggingface_hub import constants

from ssm_tune.outputs.hub import push_folder
from ssm_tune.outputs.run import Run
from ssm_tune.recipe import RecipeError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def open_run(folder: Path) -> Run:
    return Run(model=None, tokenizer=None, metrics={}, output_dir=folder)


MakeRun = Callable[..., tuple[Path, Any]]


def test_an_adapter_is_one_commit_of_what_a_reader_needs(hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba", train_also=["D"])
    (folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-1" / "adapter_model.safetensors").write_text("large")
    address = open_run(folder).push("me/demo", private=True)
    assert address == f"{hub.address}/me/demo/commit/1"
    assert hub.private == {"me/demo": True}
    (commit,) = hub.repositories["me/demo"]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "ssm_parameters.safetensors"} <= set(
        commit
    )
    assert {"recipe.yaml", "tokenizer.json"} <= set(commit)
    home = {"run.json", "recipe.resolved.yaml", "metrics.jsonl"}
    assert not home & set(commit)
    assert not any(name.startswith(("checkpoints", "merged")) for name in commit)
    assert commit["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()


def test_a_merged_model_is_merged_first_and_has_its_own_card(hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    open_run(folder).push("me/whole", what="merged")
    (commit,) = hub.repositories["me/whole"]
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= set(commit)
    assert "adapter_config.json" not in commit
    assert b"library_name: transformers" in commit["README.md"]


def test_a_base_that_readers_have_not_is_said(hub: Hub, make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = make_run("mamba")
    open_run(folder).push("me/demo")
    assert "which readers have not" in caplog.text


def test_a_second_push_adds_a_commit(hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    for _ in range(2):
        open_run(folder).push("me/demo")
    assert len(hub.repositories["me/demo"]) == 2


def test_a_push_that_breaks_leaves_the_repository_as_it_was(hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    open_run(folder).push("me/demo")
    hub.refuse["/commit/"] = 403
    (folder / "README.md").write_text("changed")
    with pytest.raises(RecipeError, match="may not write"):
        open_run(folder).push("me/demo")
    assert len(hub.repositories["me/demo"]) == 1


def test_what_an_earlier_push_left_is_taken_away(hub: Hub, make_run: MakeRun) -> None:
    """Beside a merged model, an adapter's configuration would be loaded on top of it."""
    folder, _ = make_run("mamba")
    open_run(folder).push("me/demo")
    hub.repositories["me/demo"].append({"notes.txt": b"mine", "samples/tokenizer_a.wav": b"mine"})
    open_run(folder).push("me/demo", what="merged")
    shown = hub.show("me/demo")
    assert {"config.json", "model.safetensors", "notes.txt", "samples/tokenizer_a.wav"} <= shown.keys()
    assert not {"adapter_config.json", "adapter_model.safetensors"} & shown.keys()
    open_run(folder).push("me/demo")
    shown = hub.show("me/demo")
    assert "adapter_config.json" in shown and "model.safetensors" not in shown


def test_weights_that_cannot_be_sent_change_nothing(hub: Hub, make_run: MakeRun) -> None:
    """hf_xet sends them, and finds no such service at this server."""
    folder, _ = make_run("mamba")
    open_run(folder).push("me/demo")
    hub.large = (".safetensors",)
    with pytest.raises(RecipeError, match="the upload broke off, and changed nothing there"):
        open_run(folder).push("me/demo")
    assert len(hub.repositories["me/demo"]) == 1


def test_a_push_that_breaks_in_the_middle_of_the_weights_leaves_it_too(
    hub: Hub, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.large = (".safetensors",)
    folder, _ = make_run("mamba")
    open_run(folder).push("me/demo")
    (commit,) = hub.repositories["me/demo"]
    assert commit["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    hub.refuse["half"] = 403
    (folder / "README.md").write_text("changed")
    (folder / "adapter_model.safetensors").write_bytes(b"changed" * 1000)
    with pytest.raises(RecipeError, match="me/demo"):
        open_run(folder).push("me/demo")
    assert hub.repositories["me/demo"] == [commit]


def test_what_was_measured_is_in_the_card_that_is_pushed(hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    open_run(folder).merge()
    results = {"results": {"piqa": {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": 0.1}}, "n-shot": {"piqa": 0}}
    (folder / "eval.json").write_text(json.dumps(results))
    for what in ("adapter", "merged"):
        open_run(folder).push(f"me/{what}", what=what)
        (commit,) = hub.repositories[f"me/{what}"]
        header = yaml.safe_load(commit["README.md"].decode().split("---")[1])
        (index,) = header["model-index"]
        assert [metric["value"] for result in index["results"] for metric in result["metrics"]] == [0.625]


def test_a_token_in_a_recipe_is_never_pushed(hub: Hub, make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    folder, _ = make_run("mamba")
    (folder / "recipe.yaml").write_text(f"# pushed with {TOKEN}\n" + (folder / "recipe.yaml").read_text())
    with pytest.raises(RecipeError, match=r"recipe\.yaml holds your token") as error:
        open_run(folder).push("me/demo")
    assert hub.repositories == {}
    assert TOKEN not in str(error.value) + caplog.text


def test_the_token_is_in_no_log_and_no_file_of_a_push(
    hub: Hub, make_run: MakeRun, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    folder, _ = make_run("mamba")
    address = open_run(folder).push("me/demo")
    printed = capfd.readouterr()
    assert TOKEN not in caplog.text + printed.out + printed.err + address
    assert not any(TOKEN.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert not any(TOKEN.encode() in data for data in hub.repositories["me/demo"][0].values())


@pytest.mark.parametrize(("status", "said"), [(401, "log in"), (403, "may not write"), (404, "may not see")])
def test_refusals_are_explained(status: int, said: str, hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    hub.refuse["/api/repos/create"] = status
    with pytest.raises(RecipeError, match=said):
        open_run(folder).push("me/demo")


def test_a_wrong_token_is_said_and_never_shown(
    hub: Hub, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_and_secret")
    folder, _ = make_run("mamba")
    with pytest.raises(RecipeError, match="hf auth login") as error:
        open_run(folder).push("me/demo")
    assert "wrong_and_secret" not in str(error.value) + caplog.text
    for file in folder.rglob("*"):
        if file.is_file():
            assert b"wrong_and_secret" not in file.read_bytes()


@pytest.mark.parametrize("repo", ["", "a/b/c", "white space", "-x/y"])
def test_names_that_cannot_be_are_refused_before_anything_is_sent(repo: str, hub: Hub, make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    with pytest.raises(RecipeError, match=r"hub\.repo"):
        open_run(folder).push(repo)
    assert hub.repositories == {}


def test_what_is_adapter_or_merged(make_run: MakeRun) -> None:
    folder, _ = make_run("mamba")
    with pytest.raises(RecipeError, match="neither adapter nor merged"):
        open_run(folder).push("me/demo", what="weights")


def test_no_network_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(RecipeError, match="cannot be reached"):
        push_folder(tmp_path, "me/demo", message="x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE"):
        push_folder(tmp_path, "me/demo", message="x")
