"""The run folder: whole files or none, one writer, checkpoints that are complete or do not count."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ssm_tune.recipe import RecipeError
from ssm_tune.run_folder import COMPLETE, RUNNING, STOPPED, RunFolder, is_disk_full


def test_create_makes_and_discard_unmakes(tmp_path):
    folder = RunFolder.create(tmp_path / "runs" / "one")
    folder.write_state(RUNNING)
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_discard_keeps_a_folder_that_was_there(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.write_state(RUNNING)
    folder.discard()
    assert tmp_path.is_dir() and list(tmp_path.iterdir()) == []


def test_an_existing_run_is_refused_without_resume(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_state(STOPPED)
    with pytest.raises(RecipeError, match="--resume"):
        RunFolder.create(tmp_path / "run")
    assert RunFolder.create(tmp_path / "run", resume=True).read_state()["status"] == STOPPED


def test_a_complete_run_is_not_resumed(tmp_path):
    RunFolder.create(tmp_path / "run").write_state(COMPLETE)
    with pytest.raises(RecipeError, match="complete"):
        RunFolder.create(tmp_path / "run", resume=True)


def test_a_live_run_is_not_resumed(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_state(RUNNING)
    state = folder.read_state()
    folder.write_json("run.json", {**state, "pid": os.getppid()})
    with pytest.raises(RecipeError, match="still training"):
        RunFolder.create(tmp_path / "run", resume=True)


def test_resume_without_a_run_is_refused(tmp_path):
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(RecipeError, match="not a run folder"):
        RunFolder.create(tmp_path, resume=True)
    with pytest.raises(RecipeError, match="exists already"):
        RunFolder.create(tmp_path)
    with pytest.raises(RecipeError, match="is a file"):
        RunFolder.create(tmp_path / "file.txt")


def test_a_damaged_state_is_said(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "run.json").write_text('{"status": "run')
    with pytest.raises(RecipeError, match="damaged"):
        folder.read_state()


def test_staging_leaves_nothing_of_a_failure(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(OSError, match="full"), folder.staging("model") as scratch:
        (scratch / "model.safetensors").write_text("half")
        raise OSError("full")
    assert list(folder.path.iterdir()) == []


def test_staging_moves_the_config_last(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run")
    order = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda source, target: (order.append(target.name), replace(source, target)))
    with folder.staging("model") as scratch:
        for name in ("config.json", "adapter_config.json", "model.safetensors", "tokenizer.json"):
            (scratch / name).write_text("{}")
    assert sorted(order[-2:]) == ["adapter_config.json", "config.json"]


def _checkpoint(folder: RunFolder, step: int, content: str = "weights") -> None:
    staged = folder.checkpoints / ".partial" / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_text(content)
    folder.commit_checkpoint(staged)


def test_the_last_checkpoint_is_the_newest_whole_one(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    for step in (5, 20, 10):
        _checkpoint(folder, step)
    (folder.checkpoints / "checkpoint-30").mkdir()  # never finished: no list of files
    assert folder.last_checkpoint().name == "checkpoint-20"


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_truncated_checkpoint_is_named(tmp_path, damage):
    folder = RunFolder.create(tmp_path / "run")
    _checkpoint(folder, 5)
    _checkpoint(folder, 10)
    file = folder.checkpoints / "checkpoint-10" / "model.safetensors"
    file.write_text("wei") if damage == "cut" else file.unlink()
    with pytest.raises(RecipeError, match=r"model.safetensors (has 3 bytes|is missing).*checkpoint-5"):
        folder.last_checkpoint()


def test_there_may_be_no_checkpoint_yet(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    (folder.checkpoints / ".partial" / "checkpoint-5").mkdir(parents=True)
    assert folder.last_checkpoint() is None


def test_disk_full_is_recognised_in_every_dress():
    assert is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert is_disk_full(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"))
    assert is_disk_full(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 82432 vs 82320"))
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))


def test_state_keeps_what_was_recorded(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_state(RUNNING, task="sft")
    folder.write_state(COMPLETE, metrics={"loss": 1.5})
    state = json.loads((folder.path / "run.json").read_text())
    assert state["task"] == "sft" and state["metrics"] == {"loss": 1.5} and state["status"] == COMPLETE
