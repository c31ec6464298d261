from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssm_tune.data.files import list_files, read_file
from ssm_tune.recipe import RecipeError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        list(read_file(path))
    assert len(caught.value.mistakes) == 1
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_json_lines_keep_their_line_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": "two\u2028lines"}\r\n{"text": "three"}')
    assert list(read_file(path)) == [(1, {"text": "one"}), (3, {"text": "two\u2028lines"}), (4, {"text": "three"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    body = {"a.jsonl": '{"text": "x"}', "a.json": '[{"text": "x"}]', "a.csv": "text\nx\n", "a.txt": "x"}[name]
    [(_, row)] = read_file(write(tmp_path / name, b"\xef\xbb\xbf" + body.encode()))
    assert row == {"text": "x"}


def test_broken_json_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": "three\n{"text": "four"}\n')
    assert f"{path}, line 3: not valid JSON" in refusal(path)


def test_an_indented_object_in_a_jsonl_file_gets_a_hint(tmp_path):
    assert "one whole object on each line" in refusal(write(tmp_path / "a.jsonl", '[\n{"text": "x"}\n]'))


def test_broken_json_in_a_json_file_is_named_with_its_line(tmp_path):
    assert "line 3: not valid JSON" in refusal(write(tmp_path / "a.json", '[\n{"text": "one"},\n{"text": }\n]'))


@pytest.mark.parametrize(
    "content",
    ['[{"text": "x"}, {"text": "y"}]', '{"data": [{"text": "x"}, {"text": "y"}]}', '{"text": "x"}\n{"text": "y"}'],
)
def test_json_files_are_lists_or_lines(tmp_path, content):
    assert [row for _, row in read_file(write(tmp_path / "a.json", content))] == [{"text": "x"}, {"text": "y"}]


def test_one_conversation_in_a_json_file_is_one_row(tmp_path):
    row = {"messages": [{"role": "user", "content": "x"}]}
    assert list(read_file(write(tmp_path / "a.json", json.dumps(row)))) == [(1, row)]


def test_invalid_utf8_is_named_with_its_line(tmp_path):
    assert "line 2: not valid UTF-8 (byte 0xff)" in refusal(
        write(tmp_path / "a.jsonl", b'{"text": "x"}\n{"text": "\xff"}')
    )
    assert "line 3: not valid UTF-8" in refusal(write(tmp_path / "a.txt", b"one\ntwo\nthree\xe9 four"))


def test_utf16_is_recognised(tmp_path):
    assert "UTF-16" in refusal(write(tmp_path / "a.jsonl", '{"text": "x"}'.encode("utf-16")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_an_empty_file_is_refused(tmp_path, name):
    assert "the file is empty" in refusal(write(tmp_path / name, ""))
    assert "the file is empty" in refusal(write(tmp_path / name, " \n\n"))


def test_csv_values_stay_text(tmp_path):
    path = write(tmp_path / "a.csv", 'question,answer\n"6 times\n7?",42\n"None, or what?",None\n')
    rows = [{"question": "6 times\n7?", "answer": "42"}, {"question": "None, or what?", "answer": "None"}]
    assert list(read_file(path)) == [(2, rows[0]), (4, rows[1])]


def test_other_delimiters_and_wrong_cells(tmp_path):
    assert list(read_file(write(tmp_path / "a.csv", "a;b\n1;2\n"))) == [(2, {"a": "1", "b": "2"})]
    assert list(read_file(write(tmp_path / "a.tsv", "a\tb\n1\t2\n"))) == [(2, {"a": "1", "b": "2"})]
    assert "line 3: 3 cells where the header has 2" in refusal(write(tmp_path / "b.csv", "a,b\n1,2\n1,2,3\n"))
    assert "two columns have the same name" in refusal(write(tmp_path / "c.csv", "a,a\n1,2\n"))
    assert "not valid CSV" in refusal(write(tmp_path / "d.csv", 'a,b\n1,"2\n'))


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x", None], "n": [1, 2]}), path)
    assert list(read_file(path)) == [(1, {"text": "x", "n": 1}), (2, {"text": None, "n": 2})]
    assert "not a readable Parquet file" in refusal(write(tmp_path / "b.parquet", b"PAR1 but not really"))


def test_a_text_file_is_one_document(tmp_path):
    assert list(read_file(write(tmp_path / "a.txt", "one\r\n\r\ntwo\n"))) == [(1, {"text": "one\n\ntwo\n"})]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}')
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_a_file_that_vanishes_is_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "gone.jsonl")


def test_folders(tmp_path):
    for name in ("b.jsonl", "a.txt", "sub/c.csv", ".hidden/d.jsonl", "notes.md"):
        write(tmp_path / name, "x")
    assert [path.name for path in list_files(tmp_path)] == ["a.txt", "b.jsonl", "c.csv"]
    with pytest.raises(RecipeError, match="has 'test' in its name"):
        list_files(tmp_path, "test")


def test_a_folder_with_split_words_gives_that_split(tmp_path):
    for name in ("rows-train-00.jsonl", "rows-train-01.jsonl", "rows-validation.jsonl", "test/x.jsonl"):
        write(tmp_path / name, "x")
    assert [path.name for path in list_files(tmp_path)] == ["rows-train-00.jsonl", "rows-train-01.jsonl"]
    assert [path.name for path in list_files(tmp_path, "eval")] == ["rows-validation.jsonl"]
    assert [path.name for path in list_files(tmp_path, "test")] == ["x.jsonl"]


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no such file or folder"):
        list_files(tmp_path / "none.jsonl")
    with pytest.raises(RecipeError, match="not a kind of file"):
        list_files(write(tmp_path / "a.docx", "x"))
    with pytest.raises(RecipeError, match=r"holds no .*, but a\.docx"):
        list_files(tmp_path)
    with pytest.raises(RecipeError, match="one file has no split 'test'"):
        list_files(write(tmp_path / "a.jsonl", "x"), "test")
