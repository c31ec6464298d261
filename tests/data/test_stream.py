"""Streams: one order for every number of processes and workers, exact resume, shares, what is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from streams import LENGTH, TOKENIZER, documents_of, plan_of, take, texts, write_lines

from ssm_tune.data import documents
from ssm_tune.data.blocks import StreamPlan
from ssm_tune.data.documents import VIRTUAL_SHARDS, DocumentSource, FileSource, RowSource
from ssm_tune.data.hub_stream import HubSource
from ssm_tune.data.stream import TokenStream, read_state, write_state
from ssm_tune.data.stream_data import bounded_part, check_stream_sources, is_streamed, prepare_stream, stream_texts
from ssm_tune.recipe import DataSection, DataSource, RecipeError


def source_of(kind: str, folder: Path, count: int = 200) -> DocumentSource:
    """A source of `count` documents that is read in one of the ways there are."""
    rows = texts(count)
    if kind == "jsonl":
        return FileSource("rows", [write_lines(folder / f"{n}.jsonl", rows[n::3]) for n in range(3)])
    if kind == "parquet":
        table = pyarrow.table({"text": rows, "other": [1] * count})
        parquet.write_table(table, folder / "rows.parquet", row_group_size=30)
        return FileSource("rows", [folder / "rows.parquet"])
    if kind == "csv":
        (folder / "rows.csv").write_text("text,other\n" + "".join(f'"{text}",1\n' for text in rows))
        return FileSource("rows", [folder / "rows.csv"])
    if kind == "memory":
        return RowSource("rows", [(number, {"text": text}) for number, text in enumerate(rows)])
    if kind == "hub, files":
        folder.mkdir(exist_ok=True)
        for n in range(VIRTUAL_SHARDS + 3):
            own = rows[n :: VIRTUAL_SHARDS + 3]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
            (folder / f"train-{n:02}.json.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind == "hub, row groups":
        parquet.write_table(pyarrow.table({"text": rows}), folder / "train.parquet", row_group_size=10)
    else:
        write_lines(folder / "train.jsonl", rows)
    return HubSource(str(folder))


HUB_NOTE = "owner/name train: on the Hub, not looked into"
KINDS = ["jsonl", "parquet", "csv", "memory", "hub, files", "hub, row groups", "hub, one file"]


def first_epoch(plan: StreamPlan) -> list[str]:
    """The documents of every virtual shard's first epoch."""
    found = []
    for shard in range(plan.shards):
        mixture = plan.mixture(shard)
        while True:
            document = mixture.draw()
            if any(mixture.epochs()):
                break
            found.append(document.text)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_comes_once_an_epoch_and_resume_is_exact(kind: str, tmp_path: Path) -> None:
    """Past the first epoch too: a resumed source must know in which it is."""
    plan = plan_of(source_of(kind, tmp_path), seed=3)
    assert sorted(first_epoch(plan)) == sorted(texts(200))
    whole, _ = take(plan, 90)
    for batches in (0, 37, 81):
        _, stream = take(plan, batches + 1)
        (tmp_path / "state").mkdir(exist_ok=True)
        write_state(tmp_path / "state", 0, stream.state_at(batches))
        rest, _ = take(plan, 90 - batches, state=read_state(tmp_path / "state"))
        assert torch.equal(rest, whole[4 * batches :])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int, tmp_path: Path) -> None:
    source = source_of("hub, one file", tmp_path)
    whole, _ = take(plan_of(source), 60)
    ours, stream = take(plan_of(source), 41, workers=workers)
    assert torch.equal(ours, whole[: 4 * 41])
    rest, _ = take(plan_of(source), 20, workers=workers, state=stream.state_at(40))
    assert torch.equal(rest, whole[4 * 40 :])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_rows_do_not_depend_on_the_number_of_processes(world: int, tmp_path: Path) -> None:
    """Also where the processes do not divide the virtual shards (3); and a run may go on with another number."""
    source = source_of("jsonl", tmp_path)
    whole, _ = take(plan_of(source), 72)
    parts = [take(plan_of(source), 24, 2, rank=rank, world_size=world) for rank in range(world)]
    ours = torch.stack([rows for rows, _ in parts], 1).flatten(0, 1)
    count = min(len(ours), len(whole))
    assert torch.equal(ours[:count], whole[:count])
    (tmp_path / "state").mkdir()
    for rank, (_, stream) in enumerate(parts):
        write_state(tmp_path / "state", rank, stream.state_at(23))
    state = read_state(tmp_path / "state")
    assert state["row"] == 23 * 2 * world
    alone, _ = take(plan_of(source), 4, state=state)
    if state["row"] + 16 <= len(whole):
        assert torch.equal(alone, whole[state["row"] : state["row"] + 16])


def test_rows_are_full_and_documents_kept_apart(tmp_path: Path) -> None:
    plan = plan_of(source_of("jsonl", tmp_path))
    rows, stream = take(plan, 50)
    assert (rows == TOKENIZER.pad_token_id).float().mean() < 0.05
    batch = next(iter(stream))
    for ids, borders in zip(batch["input_ids"], batch["seq_idx"], strict=True):
        ends = (ids == TOKENIZER.eos_token_id).nonzero().flatten().tolist()
        assert all(end + 1 == LENGTH or borders[end + 1] != borders[end] for end in ends)
    joined, stream = take(plan_of(source_of("jsonl", tmp_path), isolate=False), 50)
    assert not (joined == TOKENIZER.pad_token_id).any()
    assert not next(iter(stream))["seq_idx"].any()
    dropped = documents_of(take(plan_of(source_of("jsonl", tmp_path), too_long="drop"), 50)[0])
    assert all(text.split()[0].isdigit() for text in dropped)  # no piece of a cut document


def test_the_seed_and_the_epoch_change_the_order(tmp_path: Path) -> None:
    source = source_of("jsonl", tmp_path)
    first, other = take(plan_of(source, seed=1), 8)[0], take(plan_of(source, seed=2), 8)[0]
    assert not torch.equal(first, other)
    assert torch.equal(first, take(plan_of(source, seed=1), 8)[0])


def test_weights_are_shares_of_documents(tmp_path: Path) -> None:
    many = FileSource("many", [write_lines(tmp_path / "many.jsonl", [f"m{n}" for n in range(300)])])
    few = FileSource("few", [write_lines(tmp_path / "few.jsonl", [f"f{n}" for n in range(20)])])
    mixture = plan_of(many, few, weights=[3, 1]).mixture(0)
    assert Counter(mixture.draw().text[0] for _ in range(400)) == {"m": 300, "f": 100}
    state = mixture.state()
    following = [mixture.draw().text for _ in range(50)]
    resumed = plan_of(many, few, weights=[3, 1]).mixture(0, state)
    assert [resumed.draw().text for _ in range(50)] == following


def test_a_text_file_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_SEGMENT", 100)
    file = tmp_path / "book.txt"
    file.write_text("".join(f"{number} {'wörd ' * 5}\n" for number in range(700)))
    plan = plan_of(FileSource("book", [file]))
    reader = plan.sources[0].reader(0, 1)
    pieces = [reader.read()]
    while not pieces[-1].last:
        pieces.append(reader.read())
    count = len(pieces)
    assert count > 128
    assert "".join(piece.text for piece in pieces) == file.read_text()
    assert [piece.first for piece in pieces] == [True] + [False] * (count - 1)
    assert [piece.last for piece in pieces] == [False] * (count - 1) + [True]
    ends = [ids[-1] == TOKENIZER.eos_token_id for ids in plan.encoder.encode(pieces)]
    assert ends == [piece.last for piece in pieces]  # a piece that breaks off does not end


def test_unusable_rows(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [*texts(40), "", "  "])
    with file.open("a") as more:
        more.write(json.dumps({"text": None}) + "\n")
    rows, _ = take(plan_of(FileSource("rows", [file])), 20)  # empty and null are passed over
    assert len(rows) == 80
    with file.open("a") as more:
        more.write('{"text": "half\n')
    with pytest.raises(RecipeError, match=r"rows\.jsonl, line 44: not valid JSON"):
        FileSource("rows", [file])
    write_lines(tmp_path / "late.jsonl", texts(600))
    with (tmp_path / "late.jsonl").open("a") as more:
        more.write('{"texts": "a"}\n')
    for workers in (0, 2):
        with pytest.raises(RecipeError, match=r"^.*late\.jsonl, line 601: pretraining needs a column text.*texts") as e:
            take(plan_of(FileSource("late", [tmp_path / "late.jsonl"])), 900, workers=workers)
        assert len(e.value.mistakes) == 1 and "\n" not in str(e.value)
    with pytest.raises(RecipeError, match="no usable row"):
        FileSource("none", [write_lines(tmp_path / "none.jsonl", ["", ""])])


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", texts(300))
    section = DataSection(train=[DataSource(str(file))], eval_fraction=0.1, streaming=True)
    data = prepare_stream(section, TOKENIZER, max_length=LENGTH, packing=True, seed=0, max_steps=5)
    assert data.eval is not None and data.stream is not None
    assert [line.startswith("held out: ") for line in data.report.lines()[:3]] == [False, False, True]
    held = {text.split()[0] for row in data.eval["input_ids"] for text in TOKENIZER.decode(row).split("<e>") if text}
    held = {number for number in held if number.isdigit()}
    trained = {text.split()[0] for text in first_epoch(data.stream)}
    assert 15 <= len(held) <= 50 and not held & trained and len(trained) + len(held) == 300
    assert not {text.split()[0] for text in stream_texts(section)} & held
    with pytest.raises(RecipeError, match="holds out every document"):
        take(plan_of(FileSource("rows", [file]), held_out=0.9999999), 1)


def test_held_out_rows_of_a_hub_data_set_are_a_part_of_a_split(tmp_path: Path, monkeypatch) -> None:
    write_lines(tmp_path / "owner" / "name" / "train.jsonl", texts(200))
    write_lines(tmp_path / "owner" / "name" / "validation.jsonl", [f"{n} held" for n in range(50)])
    monkeypatch.chdir(tmp_path)
    source = HubSource("owner/name", "validation")
    rows = [row["text"] for _, row in source.head(*bounded_part("validation[10:13]", "data.eval.0")[1:])]
    assert rows == ["10 held", "11 held", "12 held"]
    for split in ("validation[:10%]", "validation[-5:]"):
        with pytest.raises(RecipeError, match=r"data\.eval\.0\.split"):
            bounded_part(split, "data.eval.0")


def test_settings_that_a_stream_cannot_follow(tmp_path: Path) -> None:
    file = str(write_lines(tmp_path / "rows.jsonl", texts(200)))
    good = {"max_length": LENGTH, "packing": True, "seed": 0, "max_steps": 5}
    for section, settings, words in (
        ({}, {"max_steps": -1}, "max_steps"),
        ({}, {"packing": False}, "packing"),
        ({}, {"max_length": None}, "max_length"),
        ({"train": [DataSource(file), DataSource(file)]}, {}, "weight"),
        ({"train": [DataSource(file, "train[:10]")]}, {}, r"train\.0\.split"),
        ({"train": [DataSource("gone.jsonl")]}, {}, "gone.jsonl"),
        ({"train": [DataSource("owner/none")]}, {}, "owner/none"),
        ({"train": [DataSource(file, columns={"text": "body"})]}, {}, "column body"),
    ):
        with pytest.raises(RecipeError, match=words):
            prepare_stream(DataSection(**{"train": [DataSource(file)], **section}), TOKENIZER, **{**good, **settings})
    assert not is_streamed(DataSection()) and is_streamed(DataSection(prepared="x"))


def test_a_folder_of_compressed_files_is_read_as_the_hub_is(tmp_path: Path) -> None:
    source_of("hub, files", tmp_path / "rows")
    section = DataSection(train=[DataSource(str(tmp_path / "rows"))], streaming=True)
    data = prepare_stream(section, TOKENIZER, max_length=LENGTH, packing=True, seed=0, max_steps=5)
    assert data.stream is not None and sorted(first_epoch(data.stream)) == sorted(texts(200))
    section.train.append(DataSource("owner/name", weight=1))
    assert check_stream_sources(section) == [f"{tmp_path / 'rows'} train: streamed", HUB_NOTE]
    section.train.append(DataSource(str(write_lines(tmp_path / "bad.jsonl", [""]))))
    with pytest.raises(RecipeError, match=r"bad\.jsonl: there is no usable row"):
        check_stream_sources(section)


def test_the_report_says_held_out_of_what_is(tmp_path: Path) -> None:
    section = DataSection(train=[DataSource(str(write_lines(tmp_path / "rows.jsonl", texts(200))))], streaming=True)
    data = prepare_stream(section, TOKENIZER, max_length=LENGTH, packing=True, seed=0, max_steps=5)
    assert data.eval is None and not any("held out" in line for line in data.report.lines())


def test_a_checkpoint_without_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--resume: .* is not of a run that streams"):
        read_state(tmp_path)
    plan = plan_of(source_of("memory", tmp_path))
    for rank in range(2):
        stream = TokenStream(plan, 2, lambda rows: {}, rank=rank, world_size=2)
        write_state(tmp_path, rank, stream.state_at(0))
    (tmp_path / "stream-1.pt").unlink()
    with pytest.raises(RecipeError, match=r"does not hold the stream's virtual shards \[1, 3"):
        take(plan, 1, state=read_state(tmp_path))
