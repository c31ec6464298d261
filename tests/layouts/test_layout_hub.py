"""Checkpoints on the Hub: only the chosen layout's files are fetched, and what cannot be had is said by name.

A small server on this machine speaks as much of the Hub's protocol as downloading needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import write_megatron
from original_layouts import write_mistral, write_state_spaces
from tiny import tiny_model

from ssm_tune.layouts import open_checkpoint
from ssm_tune.model import load_model, read_config
from ssm_tune.recipe import RecipeError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by name, what was asked of them, and how to answer."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                owner, name, _, revision, filename = self.path.lstrip("/").split("/", 4)
                repo = f"{owner}/{name}"
                if repo in hub.gated:
                    return self.refuse(403, "GatedRepo")
                if repo not in hub.folders:
                    return self.refuse(404, "RepoNotFound")
                if revision not in ("main", "v2", COMMIT):
                    return self.refuse(404, "RevisionNotFound")
                file = hub.folders[repo] / filename
                if not file.is_file():
                    return self.refuse(404, "EntryNotFound")
                content = file.read_bytes()
                self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hash((repo, filename)) & 0xFFFFFFFF:08x}"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    hub.fetched.append(filename)
                    self.wfile.write(content)
                return None

            def refuse(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.server.shutdown()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def publish(hub: Hub, name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hub.folders[name] = folder
    return folder


def test_the_ranks_of_megatron(hub: Hub, tmp_path: Path) -> None:
    stock = tiny_model("mamba2", n_groups=2, vocab_size=256)
    folder = write_megatron(publish(hub, "nvidia/mamba2", tmp_path / "repo"), stock, 2, release=True)
    (folder / "README.md").write_text("a card")
    model = load_model("nvidia/mamba2")
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
    ranks = [f"release/mp_rank_{rank:02d}/model_optim_rng.pt" for rank in range(2)]
    assert sorted(hub.fetched) == ["latest_checkpointed_iteration.txt", *ranks]


def test_only_hugging_faces_files_of_a_repository_with_two_layouts(hub: Hub, tmp_path: Path) -> None:
    folder = publish(hub, "mistral/both", tmp_path / "repo")
    write_mistral(folder, tiny_model("codestral", seed=1))
    stock = tiny_model("codestral")
    stock.save_pretrained(folder, max_shard_size="100KB")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "README.md").write_text("a card")
    model = load_model("mistral/both")
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
    shards = {file.name for file in folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    expected = {"config.json", "model.safetensors.index.json", "generation_config.json"} | shards
    assert set(hub.fetched) == expected
    assert len(hub.fetched) == len(expected)  # none of them twice
    assert model.config.name_or_path == "mistral/both"


def test_a_config_alone_is_read_without_weights(hub: Hub, tmp_path: Path) -> None:
    write_state_spaces(publish(hub, "state-spaces/mamba", tmp_path / "repo"), tiny_model("mamba", vocab_size=304))
    assert read_config("state-spaces/mamba").model_type == "mamba"
    assert hub.fetched == ["config.json"]


def test_an_original_repository(hub: Hub, tmp_path: Path) -> None:
    source = tiny_model("mamba2", vocab_size=304)
    write_state_spaces(publish(hub, "state-spaces/mamba2", tmp_path / "repo"), source)
    model = load_model("state-spaces/mamba2")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())
    assert set(hub.fetched) == {"config.json", "pytorch_model.bin"}


def test_mistrals_own_repository(hub: Hub, tmp_path: Path) -> None:
    source = tiny_model("codestral", num_heads=2, head_dim=64, n_groups=2, state_size=128, vocab_size=304)
    write_mistral(publish(hub, "mistral/only", tmp_path / "repo"), source)
    model = load_model("mistral/only")
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)
    assert set(hub.fetched) == {"params.json", "consolidated.safetensors"}


def test_everything_is_of_one_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("mamba").save_pretrained(publish(hub, "a/b", tmp_path / "repo"))
    checkpoint = open_checkpoint("a/b", "v2")
    assert checkpoint.source.commit == COMMIT
    weights = checkpoint.weights()
    assert all(COMMIT in str(tensor.file) for tensor in weights.values())


def test_offline_what_is_in_the_cache_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = tiny_model("mamba")
    stock.save_pretrained(publish(hub, "a/b", tmp_path / "repo"))
    load_model("a/b")
    fetched = list(hub.fetched)
    go_offline(monkeypatch)
    model = load_model("a/b")
    assert torch.equal(model.backbone.norm_f.weight, stock.backbone.norm_f.weight)
    assert hub.fetched == fetched


def test_local_only_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(publish(hub, "a/b", tmp_path / "repo"))
    with pytest.raises(RecipeError, match=r"model\.name a/b is no folder here and not in the local Hub cache"):
        read_config("a/b", local_only=True)
    assert hub.fetched == []
    read_config("a/b")
    assert read_config("a/b", local_only=True).model_type == "mamba"


def test_offline_and_not_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch)
    with pytest.raises(RecipeError, match=r"(?s)model\.name a/b .*HF_HUB_OFFLINE"):
        load_model("a/b")


def test_offline_with_the_config_alone_in_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("mamba").save_pretrained(publish(hub, "a/b", tmp_path / "repo"))
    read_config("a/b")
    go_offline(monkeypatch)
    with pytest.raises(RecipeError, match=r"model\.name a/b: .*weights are not"):
        load_model("a/b")


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("a/nothing", None, "model.name a/nothing is no folder here and no public repository"),
        ("a/b", "v9", "model.revision: a/b has no revision 'v9'"),
        ("a/gated", None, "model.name a/gated: access is restricted"),
        ("a/other", None, "of no known layout"),
        ("not a name", None, "neither a folder nor a name on the Hub"),
    ],
)
def test_what_cannot_be_had(hub: Hub, tmp_path: Path, name: str, revision: str | None, said: str) -> None:
    tiny_model("mamba").save_pretrained(publish(hub, "a/b", tmp_path / "repo"))
    publish(hub, "a/other", tmp_path / "other")
    hub.gated.add("a/gated")
    with pytest.raises(RecipeError) as caught:
        load_model(name, revision=revision)
    assert said in str(caught.value)
    assert len(caught.value.mistakes) == 1


def test_the_hub_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(RecipeError, match=r"model\.name a/b: the Hub cannot be reached"):
        load_model("a/b")
