"""Data come ahead of the device: what is measured of it, what a GPU gets by default, and workers that signals spare."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_streamed_runs import fit as fit_stream
from test_streamed_runs import settings
from tiny import tiny_model, tiny_tokenizer

from ssm_tune import training_arguments, tune
from ssm_tune.data import Collator, stream
from ssm_tune.data.blocks import StreamPlan
from ssm_tune.data.loading import send
from ssm_tune.data.stream_data import prepare_stream
from ssm_tune.recipe import recipe_from_dict

ROWS = [{"text": f"{number} and a few words"} for number in range(40)]
TRAINING = {"max_steps": 8, "max_length": 64, "logging_steps": 4, "report_to": [], "save_strategy": "no"}


def fit(kind: str, folder: Path, **more: Any) -> None:
    if kind == "stream":
        values = settings(folder, "run")
        values["training"] |= {**TRAINING, **more}
        fit_stream(values)
    else:
        model, tokenizer = tiny_model("mamba2"), tiny_tokenizer()
        tune(model, ROWS, task="pretrain", tokenizer=tokenizer, output_dir=folder / "run", **TRAINING, **more)


def waited(folder: Path) -> list[tuple[float, float]]:
    """Of each log: the share of the time, and seconds a step."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["data_wait_share"], line["data_wait_share"] * line["seconds_per_step"])
        for line in lines
        if "loss" in line
    ]


@pytest.mark.parametrize("kind", ["rows", "stream"])
@pytest.mark.parametrize("slow", [False, True])
def test_the_share_of_time_that_data_are_waited_for(kind: str, slow: bool, tmp_path: Path, monkeypatch: Any) -> None:
    call = Collator.__call__

    def late(collator: Collator, rows: Any) -> Any:
        time.sleep(0.2 if slow else 0.0)
        return call(collator, rows)

    monkeypatch.setattr(Collator, "__call__", late)
    fit(kind, tmp_path)
    found = waited(tmp_path)
    assert len(found) == 2
    for share, seconds in found:  # two batches came before the clock started: in the first four steps two are timed
        assert 0 < share < (1 if slow else 0.5), found
        assert seconds > 0.09 if slow else seconds < 0.09, found


def test_workers_are_in_no_group_that_a_signal_to_the_run_reaches(tmp_path: Path, monkeypatch: Any) -> None:
    call = Collator.__call__

    def noting(collator: Collator, rows: Any) -> Any:
        (tmp_path / f"{os.getpid()}.group").write_text(str(os.getpgid(0)))
        return call(collator, rows)

    monkeypatch.setattr(Collator, "__call__", noting)
    fit("rows", tmp_path, dataloader_num_workers=1)
    groups = [file.read_text() for file in tmp_path.glob("*.group") if file.stem != str(os.getpid())]
    assert groups and str(os.getpgid(0)) not in groups


def test_workers_of_a_stream_are_in_no_such_group_either(tmp_path: Path) -> None:
    section = recipe_from_dict(settings(tmp_path, "run")).data
    data = prepare_stream(section, tiny_tokenizer(), max_length=64, packing=True, seed=0, max_steps=1)
    assert data.stream is not None
    before = set(multiprocessing.active_children())
    batches = iter(stream.TokenStream(data.stream, 2, Collator(0, 64), workers=2))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    assert all(os.getpgid(worker.pid) != os.getpgid(0) for worker in workers)


@pytest.mark.parametrize(("given", "expected"), [(None, [8, 8]), (3, [3, 3])])
def test_a_stream_is_read_a_round_of_its_shards_ahead(given: int | None, expected: list[int], monkeypatch: Any) -> None:
    """All 16 shards need their next block at about the same time."""
    asked = []
    monkeypatch.setattr(stream, "_loader", lambda plan, share, prefetch: asked.append(prefetch) or [])
    batches = stream.TokenStream(StreamPlan([], [], 64), 2, Collator(0, 64), workers=2, prefetch=given)
    with pytest.raises(StopIteration):  # there are no blocks
        batches._feed()(0)
    assert asked == expected


def arguments(tmp_path: Path, monkeypatch: Any, *, gpu: bool, streaming: bool, **training: Any) -> SimpleNamespace:
    """What SFTConfig is made of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(training_arguments, "on_cpu", lambda training: not gpu)
    monkeypatch.setattr(training_arguments, "SFTConfig", lambda **values: SimpleNamespace(**values))
    values = settings(tmp_path, "run", streaming=streaming)
    values["training"] |= training
    return training_arguments.build_arguments(recipe_from_dict(values), "pretrain", tmp_path, has_eval=False)[0]


def test_what_a_gpu_gets_unless_the_recipe_says_otherwise(tmp_path: Path, monkeypatch: Any) -> None:
    found = vars(arguments(tmp_path, monkeypatch, gpu=True, streaming=True))
    assert found["dataloader_num_workers"] == 2 and found["accelerator_config"] == {"non_blocking": True}
    found = vars(arguments(tmp_path, monkeypatch, gpu=True, streaming=True, dataloader_num_workers=0))
    assert found["dataloader_num_workers"] == 0
    found = vars(arguments(tmp_path, monkeypatch, gpu=True, streaming=False, dataloader_pin_memory=False))
    assert "dataloader_num_workers" not in found and "accelerator_config" not in found
    found = vars(arguments(tmp_path, monkeypatch, gpu=False, streaming=True))
    assert "dataloader_num_workers" not in found and "accelerator_config" not in found


@pytest.mark.gpu
def test_a_batch_is_sent_without_waiting_for_the_gpu() -> None:
    device = torch.device("cuda")
    batch = {"input_ids": torch.arange(2**16).view(8, -1)}
    assert torch.equal(send(batch, device, pinned=True)["input_ids"].cpu(), batch["input_ids"])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    sent = send(batch, device, pinned=True)
    assert not torch.cuda.current_stream().query()  # still asleep
    assert torch.equal(sent["input_ids"].cpu(), batch["input_ids"])
