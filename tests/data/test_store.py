"""Large data kept between starts: the same prompts as without, read once, and made anew where anything differs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data_files import config, write

from jaxrl.config import Config
from jaxrl.data import files, rendered, store
from jaxrl.data.chat_template import ChatTemplate
from jaxrl.data.prompts import PromptSource, load_train, load_validation
from jaxrl.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_path(tiny_model)


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """A file of each kind; the long rows are dropped."""
    found = [{"question": "q" * (i % 40) + str(i), "answer": str(i), "source": "ab"[i % 2]} for i in range(50)]
    table = pyarrow.Table.from_pylist([{**row, "cost": Decimal("1.50")} for row in found])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    return [write(tmp_path / "a.jsonl", found), write(tmp_path / "b.jsonl.gz", found), str(tmp_path / "c.parquet")]


@pytest.fixture
def kept(rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Data that is kept, however small."""
    monkeypatch.setattr(store, "CACHED_BYTES", 1)
    return config(train_files=rows, source_key="source", max_prompt_length=50, cache_dir=str(tmp_path / "cache"))


def folders(c: Config, pattern: str = "*") -> set[Path]:
    return set(Path(c.data.cache_dir).glob(pattern))


def without(c: Config) -> Config:
    return replace(c, data=replace(c.data, cache_dir=""))


def source_of(c: Config, tokenizer: Any) -> PromptSource:
    return PromptSource(load_train(c), tokenizer, c)


def unread(*_: Any) -> Iterator[Any]:
    raise AssertionError("read once more")
    yield


def test_prompts_are_those_of_a_list_and_are_read_once(
    kept: Config, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    plain = source_of(without(kept), tokenizer)
    wanted = plain.next(300)
    assert 0 < plain.num_filtered < 150
    for number in range(2):
        source = source_of(kept, tokenizer)
        assert (source.num_prompts, source.num_filtered) == (plain.num_prompts, plain.num_filtered)
        found = source.next(300)
        assert found == wanted == [source.get(*prompt.key) for prompt in found]
        assert source.state() == plain.state()
        if not number:
            monkeypatch.setattr(files, "_lines", unread)
            monkeypatch.setattr(files, "_parquet_rows", unread)
            monkeypatch.setattr(Tokenizer, "encode_batch", unread)
    with pytest.raises(ValueError, match="no such problem"):
        source.get(0, 39)
    assert load_train(kept)[-1].extra["cost"] == Decimal("1.50")
    assert len(load_train(kept)[3:9:2]) == 3


def test_quotas_and_held_out_problems(kept: Config, tokenizer: Tokenizer, rows: list[str], tmp_path: Path):
    held_out = [*({"question": f"new{i}", "answer": 1} for i in range(3)), {"question": " qqq3\n", "answer": 1}]
    data = {"source_quotas": {"a": 3, "b": 5}, "val_files": [write(tmp_path / "v.jsonl", held_out)], "source_key": ""}
    c = replace(kept, data=replace(kept.data, **(data | {"source_key": "source"})))
    found = [p.source for p in source_of(c, tokenizer).next(80)]
    assert (found.count("a"), found.count("b")) == (30, 50)
    kept_out = load_validation(replace(c, data=replace(c.data, source_key="")), load_train(c))
    assert [p.question for p in kept_out] == ["new0", "new1", "new2"]


def test_what_differs_is_kept_apart(kept: Config, tokenizer: Tokenizer, rows: list[str]):
    source_of(kept, tokenizer)
    (problems,) = folders(kept)
    assert len(folders(kept, "*/tokens-*")) == 1

    longer = replace(kept, data=replace(kept.data, max_prompt_length=60))
    assert source_of(longer, tokenizer).num_filtered < source_of(kept, tokenizer).num_filtered
    assert (len(folders(kept)), len(folders(kept, "*/tokens-*"))) == (1, 2)
    other = Tokenizer.__new__(Tokenizer)
    other.__dict__ |= {k: v for k, v in tokenizer.__dict__.items() if k != "fingerprint"}
    other.chat_templates = {"default": ChatTemplate("{{ messages[0].content }}!", "here")}
    assert source_of(kept, other).next(1)[0].text.endswith("!")
    assert len(folders(kept, "*/tokens-*")) == 3

    Path(rows[0]).write_text(Path(rows[0]).read_text().replace('"answer": "7"', '"answer": "8"'))
    assert load_train(kept)[7].answer == "8"
    assert len(folders(kept) - {problems}) == 1
    load_train(replace(kept, data=replace(kept.data, source_key="")))
    assert len(folders(kept)) == 3


def test_a_template_with_the_date_is_of_a_day(kept: Config, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    other = Tokenizer.__new__(Tokenizer)
    other.__dict__ |= {k: v for k, v in tokenizer.__dict__.items() if k != "fingerprint"}
    other.chat_templates = {"default": ChatTemplate("{{ strftime_now('%d') }}{{ messages[0].content }}", "here")}
    for day in ("2026-01-01", "2026-01-02"):
        monkeypatch.setattr(rendered, "_today", lambda day=day: day)
        source_of(kept, other)
        source_of(kept, tokenizer)
    assert len(folders(kept, "*/tokens-*")) == 3, "two days of one template, and one of the other"


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-3], flipped, lambda content: bytes(len(content)), lambda _: b"", lambda _: b"[]"],
    ids=["cut", "one bit", "zeros", "empty", "another file"],
)
@pytest.mark.parametrize(
    "file", ["problems.jsonl", "ends.npy", "identities.npy", "sums.json", "tokens-*/tokens", "tokens-*/ends.npy"]
)
def test_what_is_not_whole_is_made_anew(
    file: str, damage: Any, kept: Config, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    first = source_of(kept, tokenizer).next(20)
    assert not caplog.text.count("damaged")
    (damaged,) = folders(kept, f"*/{file}")
    damaged.write_bytes(damage(damaged.read_bytes()))
    assert source_of(kept, tokenizer).next(20) == first
    assert f"data.cache_dir: {damaged.parent} is damaged and is made anew" in caplog.text
    assert len(folders(kept)) == 1, "nothing is left over"


def test_a_missing_and_a_foreign_file_are_damage(kept: Config, tokenizer: Tokenizer):
    first = source_of(kept, tokenizer).next(20)
    (folder,) = folders(kept)
    for change in (folder.joinpath("ends.npy").unlink, folder.joinpath("more.npy").touch):
        change()
        assert source_of(kept, tokenizer).next(20) == first
        assert {f.name for f in folder.iterdir() if f.is_file()} == {
            *("problems.jsonl", "ends.npy", "identities.npy", "source_ids.npy", "sources.json", "sums.json")
        }


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_not_read(
    mode: int, kept: Config, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    first = source_of(kept, tokenizer).next(20)
    (folder,) = folders(kept)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    assert source_of(kept, tokenizer).next(20) == first
    assert f"data.cache_dir ({kept.data.cache_dir}): {folder} is another user's, or others can write" in caplog.text


def test_values_that_only_parquet_has(tmp_path: Path, kept: Config, caplog: pytest.LogCaptureFixture):
    """Each comes back equal and of its type, as from a list."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901)
    row = {
        **{"question": "q", "answer": "1", "source": "a", "cost": Decimal("1.50"), "raw": b"\x00\xff"},
        **{"day": moment.date(), "moment": moment, "clock": moment.time(), "zoned": moment.replace(tzinfo=UTC)},
        **{"took": timedelta(-1, 5, 7), "nested": [{"costs": [Decimal("0.1"), None]}], "half": 0.1, "big": 2**62},
    }
    mapping = pyarrow.array([[(3, "x")]], pyarrow.map_(pyarrow.int64(), pyarrow.string()))
    table = pyarrow.Table.from_pylist([row]).append_column("mapping", mapping)
    pyarrow.parquet.write_table(table, tmp_path / "v.parquet")
    c = replace(kept, data=replace(kept.data, train_files=[str(tmp_path / "v.parquet")]))
    assert list(load_train(c)) == load_train(without(c))
    (problem,) = load_train(c)
    assert (problem.extra["mapping"], problem.extra["took"]) == ([(3, "x")], row["took"])
    assert not caplog.text


def test_a_value_that_cannot_be_kept(tmp_path: Path, kept: Config, caplog: pytest.LogCaptureFixture):
    (tmp_path / "k.jsonl").write_text('{"question": "q", "answer": "1", "source": "a", "x": {"\\u0000kind": 1}}\n')
    c = replace(kept, data=replace(kept.data, train_files=[str(tmp_path / "k.jsonl")]))
    assert load_train(c) == load_train(without(c))
    assert "a value of the type dict, which cannot be kept; the data is read anew" in caplog.text
    assert not folders(c), "nothing is left over"


def test_what_killed_starts_left_is_removed(kept: Config, tokenizer: Tokenizer):
    """A folder that was written to within the hour may be another start's."""
    cache = Path(kept.data.cache_dir)
    for name, age_s in (("old-new-1", 4000), ("busy-new-2", 4000), ("young-new-3", 0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "problems.jsonl").write_text("x")
        for file in (cache / name / "problems.jsonl", cache / name):
            if file.name != "problems.jsonl" or name != "busy-new-2":
                os.utime(file, (time.time() - age_s,) * 2)
    source_of(kept, tokenizer)
    assert {folder.name for folder in folders(kept, "*-new-*")} == {"busy-new-2", "young-new-3"}


def test_another_process_was_first(tmp_path: Path):
    folder = tmp_path / "cache" / "key"

    def write_late(new: Path) -> None:
        (new / "mine").write_text("x")
        store.kept(folder, lambda other: (other / "theirs").write_text("y"))

    assert store.kept(folder, write_late) == folder
    assert {file.name for file in folder.iterdir()} == {"theirs", "sums.json"}
    assert list(folder.parent.iterdir()) == [folder]


def test_a_refused_row_leaves_nothing(kept: Config, rows: list[str]):
    with Path(rows[0]).open("a") as file:
        file.write('{"question": 1}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 51: 'question'"):
        load_train(kept)
    assert not folders(kept)


def test_where_nothing_can_be_kept_a_warning_says_so(
    kept: Config, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plain = source_of(without(kept), tokenizer).next(9)
    (tmp_path / "file").touch()
    c = replace(kept, data=replace(kept.data, cache_dir=str(tmp_path / "file")))
    assert source_of(c, tokenizer).next(9) == plain
    assert "read anew at every start" in caplog.text
    problems = load_train(kept)
    shutil.rmtree(kept.data.cache_dir)
    Path(kept.data.cache_dir).touch()
    assert PromptSource(problems, tokenizer, kept).next(9) == plain, "what is mapped stays readable"
    assert "tokenised anew" in caplog.text
