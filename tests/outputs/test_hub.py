"""Publishing, through huggingface_hub's own client, to a small server on this machine that speaks the Hub's API."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ssm_tune.outputs.hub import push_folder
from ssm_tune.outputs.run import Run
from ssm_tune.recipe import RecipeError

TOKEN = "hf_very_secret"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a list of commits: path -> contents. `refuse`: a path part -> the status it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.refuse: dict[str, int] = {}
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        for part, status in self.server.refuse.items():
            if part in self.path:
                return self.answer(status, {"error": "refused"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
            if name in self.server.repositories:
                return self.answer(409, {"error": "exists", "url": f"{self.server.address}/{name}"})
            self.server.repositories[name] = []
            self.server.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return self.answer(200, {"url": f"{self.server.address}/{name}", "id": name, "name": name})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.server.repositories[name].append(files)
            return self.answer(
                200, {"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
            )
        return self.answer(404, {"error": f"no {self.path}"})


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
