"""Prepared tokens: what is written is what the text says; interrupted, damaged, made for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import TOKENIZER, texts, write_lines
from tiny import tiny_tokenizer

from ssm_tune.data.blocks import TextEncoder, is_held_out
from ssm_tune.data.shard_source import permuted
from ssm_tune.data.stream_data import prepare_stream, shard_writer
from ssm_tune.data.token_shards import ShardWriter, TokenShards, tokenizer_mark
from ssm_tune.recipe import DataSection, DataSource, RecipeError, recipe_from_dict
from ssm_tune.shards import prepare_shards


class Killed(BaseException):
    """The end of the process."""


def section_of(folder: Path, **settings: Any) -> DataSection:
    first = write_lines(folder / "first.jsonl", texts(3000))
    second = write_lines(folder / "second.jsonl", [f"second {number}" for number in range(200)])
    train = [DataSource(str(first), weight=2), DataSource(str(second), weight=1)]
    return DataSection(train=train, prepared=str(folder / "tokens"), **settings)


def written(section: DataSection, part_tokens: int = 20_000) -> TokenShards:
    writer = shard_writer(section, TOKENIZER)
    writer.part_tokens = part_tokens
    writer.resume()
    writer.write()
    return TokenShards(Path(section.prepared))


def documents_of(shards: TokenShards, entry: int) -> list[str]:
    source = shards.source(entry, "source")
    return [TOKENIZER.decode(source.document(number)) for number in range(len(source))]


def test_every_document_is_there_once(tmp_path: Path) -> None:
    section = section_of(tmp_path, eval_fraction=0.1)
    shards = written(section)
    shards.check(whole=True)
    kept = [text for text in texts(3000) if not is_held_out(text, 0.1)]
    assert documents_of(shards, 0) == [f"{text}<e>" for text in kept]
    held = [TOKENIZER.decode(tokens) for tokens in shards.held_out(10**9)]
    assert len(shards.parts) > 6 and len(held) + len(kept) + len(documents_of(shards, 1)) == 3200
    assert np.memmap(tmp_path / "tokens" / shards.parts[0].file, np.uint16, "r")[0] == TOKENIZER("0")["input_ids"][0]
    data = prepare_stream(section, TOKENIZER, max_length=48, packing=True, seed=0, max_steps=3)
    assert data.stream is not None and data.eval is not None
    seen = set()
    for shard in range(data.stream.shards):
        mixture = data.stream.mixture(shard)
        while not mixture.epochs()[0]:
            seen.add(TOKENIZER.decode(mixture.draw().tokens))
    assert seen >= {f"{text}<e>" for text in kept}


def test_preparing_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = section_of(tmp_path, eval_fraction=0.1)
    whole = written(section)
    names = sorted(file.name for file in (tmp_path / "tokens").rglob("*"))
    inner, calls = ShardWriter._commit, []

    def commit(writer: ShardWriter, *args: Any) -> None:
        calls.append(args)
        if len(calls) in (4, 9):  # between the parts of one round, and of another
            raise Killed
        inner(writer, *args)

    monkeypatch.setattr(ShardWriter, "_commit", commit)
    section.prepared = str(tmp_path / "broken")
    for _ in range(2):
        with pytest.raises(Killed):
            written(section)
        with pytest.raises(RecipeError, match="not finished"):
            TokenShards(tmp_path / "broken")
    broken = written(section)
    assert broken.parts == whole.parts  # the checksums too
    assert sorted(file.name for file in (tmp_path / "broken").rglob("*")) == names


def test_damage_and_other_recipes_are_told(tmp_path: Path) -> None:
    section = section_of(tmp_path)
    shards = written(section)
    shards.check_recipe(TOKENIZER, section)
    with pytest.raises(RecipeError, match=r"tokenised with another tokenizer"):
        other = tiny_tokenizer()
        other.add_tokens(["word"])
        shards.check_recipe(other, section)
    with pytest.raises(RecipeError, match=r"made of other data: train first\.jsonl.*third\.jsonl"):
        shards.check_recipe(TOKENIZER, DataSection(train=[DataSource("/x/third.jsonl"), section.train[1]]))
    with pytest.raises(RecipeError, match="2 sources, the recipe names 1"):
        shards.check_recipe(TOKENIZER, DataSection(train=section.train[:1], eval_fraction=0.5))
    file = tmp_path / "tokens" / shards.parts[1].file
    good = file.read_bytes()
    file.write_bytes(good[:-2] + b"ab")
    with pytest.raises(RecipeError, match=r"part-00001\.tokens is damaged"):
        TokenShards(tmp_path / "tokens").check()
    file.write_bytes(good[:-2])
    with pytest.raises(RecipeError, match=r"part-00001\.tokens has .* were written"):
        TokenShards(tmp_path / "tokens")
    with pytest.raises(RecipeError, match=r"not there yet.*ssm-tune prepare"):
        TokenShards(tmp_path / "nowhere")


def test_a_file_that_has_changed_since_is_told(tmp_path: Path) -> None:
    section = section_of(tmp_path)
    shards = written(section)
    shards.check_recipe(TOKENIZER, section)
    second = tmp_path / "second.jsonl"
    second.write_text(second.read_text() + '{"text": "more"}\n')
    with pytest.raises(RecipeError, match=r"was made of [\d,]+ bytes of second.jsonl, which has [\d,]+ now"):
        shards.check_recipe(TOKENIZER, section)
    second.unlink()  # no longer needed: the tokens are there
    shards.check_recipe(TOKENIZER, section)


@pytest.mark.parametrize("lost", ["format", "sources", "dtype", "parts", "sha256"])
def test_an_index_that_lacks_something_is_told(lost: str, tmp_path: Path) -> None:
    written(section_of(tmp_path))
    file = tmp_path / "tokens" / "index.json"
    index = json.loads(file.read_text())
    del (index["parts"][0] if lost == "sha256" else index)[lost]
    file.write_text(json.dumps(index))
    with pytest.raises(RecipeError, match=r"index\.json is not of this version's format"):
        TokenShards(tmp_path / "tokens")


def test_another_size_for_a_tokenizer_that_was_trained_is_told(tmp_path: Path) -> None:
    """Also where the data gave fewer tokens than were asked for."""
    section = section_of(tmp_path)
    values = {
        "model": {"architecture": "mamba", "size": "130m"},
        "tokenizer": {"train": True, "vocab_size": 2000},
        "data": {
            "train": [{"path": source.path, "weight": 1} for source in section.train],
            "prepared": section.prepared,
        },
        "training": {"max_steps": 1},
    }
    prepare_shards(recipe_from_dict(values))
    prepare_shards(recipe_from_dict(values))
    for size in (1999, 2001, None):
        with pytest.raises(RecipeError, match=r"was made for 2,000, with [\d,]+ tokens"):
            prepare_shards(recipe_from_dict({**values, "tokenizer": {"train": True, "vocab_size": size}}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    write_lines(tmp_path / "rows.jsonl", texts(200))
    write_lines(tmp_path / "held.jsonl", ["held out"] * 3)
    values = {
        "model": {"architecture": "mamba", "size": "130m"},
        "tokenizer": {"name": str(tmp_path / "tokenizer")},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval": [{"path": str(tmp_path / "held.jsonl")}]},
        "training": {"max_steps": 3},
    }
    with pytest.raises(RecipeError, match=r"data\.prepared is missing"):
        prepare_shards(recipe_from_dict(values))
    values["data"]["prepared"] = str(tmp_path / "tokens")
    prepare_shards(recipe_from_dict(values))
    index = json.loads((tmp_path / "tokens" / "index.json").read_text())
    assert [(part["split"], part["documents"]) for part in index["parts"]] == [("train", 200), ("eval", 3)]
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "tokens").rglob("*")}
    prepare_shards(recipe_from_dict(values))
    assert "prepared already; its checksums are right" in capsys.readouterr().err
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "tokens").rglob("*")}
    values["data"]["prepared"] = str(tmp_path)
    with pytest.raises(RecipeError, match="holds something else"):
        prepare_shards(recipe_from_dict(values))


def test_the_mark_of_a_tokenizer_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    assert tokenizer_mark(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_mark(TOKENIZER)


def test_encoding_in_batches_is_encoding() -> None:
    from ssm_tune.data.documents import Document

    found = TextEncoder(TOKENIZER).encode([Document("a<e>", ""), Document("b", "", last=False), Document("", "")])
    ids = [TOKENIZER(text)["input_ids"] for text in ("a<e>", "b", "<e>")]
    assert [tokens.tolist() for tokens in found] == ids


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 1025])
def test_permutations(size: int) -> None:
    orders = [[permuted(index, size, key) for index in range(size)] for key in range(3)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 10:
        assert orders[0] != orders[1] != orders[2]
        moved = np.abs(np.array(orders[0]) - np.arange(size)).mean()
        assert moved > size / 5  # a third for a random one
