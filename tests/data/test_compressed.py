"""Compressed data files: read as what they hold, and refused when damaged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest
import zstandard

from ssm_tune.data.compressed import COMPRESSED
from ssm_tune.data.files import list_files, read_file
from ssm_tune.data.sources import open_sources, read_examples
from ssm_tune.data.stream_data import open_stream
from ssm_tune.recipe import DataSource, RecipeError

PACK = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
TEXTS = [f"document {number} of these" for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def packed(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(PACK[path.suffix](content))
    return path


def test_every_kind_is_tried() -> None:
    assert set(PACK) == set(COMPRESSED)


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize(
    ("kind", "content"),
    [(".jsonl", LINES), (".json", LINES), (".csv", ("text\n" + "\n".join(TEXTS)).encode())],
)
def test_rows_are_those_of_the_file_before_it_was_compressed(tmp_path, suffix, kind, content):
    path = packed(tmp_path, f"c4-train.00000-of-01024{kind}{suffix}", content)
    assert [row["text"] for _, row in read_file(path)] == TEXTS
    entry = DataSource(str(path))
    assert [example.text for _, example in read_examples(open_sources([entry]), "pretrain")] == TEXTS
    assert list_files(tmp_path) == [path]
    reader = open_stream([entry], "data.train")[0].reader(0, 1)
    assert [reader.read().text for _ in TEXTS] == TEXTS


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_stream_goes_on_inside_a_compressed_text(tmp_path, suffix):
    text = "".join(f"line {number}\n" for number in range(60_000))
    path = packed(tmp_path, f"book.txt{suffix}", text.encode())
    source = open_stream([DataSource(str(path))], "data.train")[0]
    reader = source.reader(0, 1)
    pieces = [reader.read() for _ in range(4)]
    again = source.reader(0, 1)
    again.restore(reader.position())
    while not pieces[-1].last:
        pieces.append(reader.read())
        assert again.read() == pieces[-1]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_frames_of_zstandard_follow_each_other(tmp_path):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(LINES[at : at + 1000]) for at in range(0, len(LINES), 1000)))
    assert [row["text"] for _, row in read_file(path)] == TEXTS


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("damage", ["cut", "changed", "never compressed"])
def test_a_damaged_file_is_refused_by_name(tmp_path, suffix, damage):
    whole = PACK[suffix](LINES)
    middle = len(whole) // 2
    content = {
        "cut": whole[:middle],
        "changed": whole[: middle - 40] + bytes(80) + whole[middle + 40 :],
        "never compressed": LINES,
    }[damage]
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(content)

    def read_stream() -> None:
        reader = open_stream([DataSource(str(path))], "data.train")[0].reader(0, 1)
        while not reader.epoch:
            reader.read()

    for read in (lambda: list(read_file(path)), read_stream):
        with pytest.raises(RecipeError) as caught:
            read()
        assert len(caught.value.mistakes) == 1
        assert caught.value.mistakes[0].startswith(str(path))
        # Changed bytes of a .gz are first read as other text, which is wrong in its line.
        assert damage == "changed" or f"not a readable {suffix} file" in str(caught.value)


def test_zstandard_without_its_package_names_what_to_install(tmp_path, monkeypatch):
    path = packed(tmp_path, "rows.jsonl.zst", LINES)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RecipeError) as caught:
        list(read_file(path))
    assert caught.value.mistakes == [f"{path}: reading .zst files needs a package: pip install 'ssm-tune[stream]'."]


def test_a_folder_may_mix_compressed_files_with_others(tmp_path):
    packed(tmp_path, "a.jsonl.gz", LINES)
    packed(tmp_path, "b.jsonl.zst", LINES)
    (tmp_path / "c.jsonl").write_bytes(LINES)
    source = open_stream([DataSource(str(tmp_path))], "data.train")[0]
    reader = source.reader(0, 1)
    assert [reader.read().text for _ in range(900)] == TEXTS * 3
    assert reader.epoch == 0


@pytest.mark.parametrize("name", ["rows.parquet.gz", "rows.gz", "rows.tar.gz"])
def test_other_compressed_files_are_refused(tmp_path, name):
    path = packed(tmp_path, name, LINES)
    with pytest.raises(RecipeError, match="not a kind of file that is read"):
        list_files(path)
