"""The journal: found again after a crash, cut at checkpoints, half a line counts as none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrl.record.journal import Journal

KEY = (0, 0, 3, 1, 0)


Open = Callable[[Path, int], Journal]


@pytest.fixture
def journal_of() -> Iterator[Open]:
    """Opens journals; they are closed after the test, so that a process "dies" without closing its own."""
    opened: list[Journal] = []

    def open_one(path: Path, last_step: int) -> Journal:
        opened.append(Journal(path, last_step))
        return opened[-1]

    yield open_one
    for journal in opened:
        journal.close()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_decided_is_found_by_the_next_process(journal_of: Open, tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    journal = journal_of(path, 0)
    assert journal.find(1, "verdict", KEY) is None
    journal.append(1, "verdict", KEY, {"status": "timeout", "error": "é\n"})
    assert lines(path)[1] == {"step": 1, "kind": "verdict", "key": list(KEY), "status": "timeout", "error": "é\n"}
    # not closed: the process may die here
    again = journal_of(path, 0)
    found = again.find(1, "verdict", KEY)
    assert found is not None
    assert (found["status"], found["error"]) == ("timeout", "é\n")
    assert again.find(2, "verdict", KEY) is None
    assert again.find(1, "layout", KEY) is None
    assert again.find(1, "verdict", (9, *KEY[1:])) is None


def test_lines_that_a_checkpoint_holds_are_dropped(journal_of: Open, tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    journal = journal_of(path, 0)
    for step in (1, 2, 3):
        journal.append(step, "verdict", KEY, {"status": "crash"})
    journal.cut(1)
    assert [line["step"] for line in lines(path)[1:]] == [2, 3]
    journal.append(4, "verdict", KEY, {"status": "crash"})  # the file is open for more
    journal.close()
    again = journal_of(path, 3)
    assert [line["step"] for line in lines(path)[1:]] == [4]
    assert again.find(3, "verdict", KEY) is None
    assert again.find(4, "verdict", KEY) is not None


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_cut_off_by_a_crash_counts_as_not_written(journal_of: Open, tmp_path: Path, cut: int):
    path = tmp_path / "journal.jsonl"
    journal = journal_of(path, 0)
    journal.append(1, "verdict", KEY, {"status": "timeout"})
    whole = path.read_bytes()
    journal.append(1, "verdict", (1, 1), {"status": "timeout", "error": "a line of more than forty bytes"})
    journal.close()
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    again = journal_of(path, 0)
    assert again.find(1, "verdict", KEY) is not None
    assert again.find(1, "verdict", (1, 1)) is None
    again.append(1, "verdict", (2, 2), {"status": "crash"})
    assert [line.get("key") for line in lines(path)] == [None, list(KEY), [2, 2]]


@pytest.mark.parametrize("content", [b"", b'{"jour'])
def test_a_header_cut_off_is_written_again(journal_of: Open, tmp_path: Path, content: bytes):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    journal_of(path, 0)
    assert lines(path) == [{"journal": 1}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"journal": 2}\n', "line 1: .*header of a journal of schema 1, found .*2"),
        (b"[1]\n", "line 1: .*journal of schema"),
        (b"hello\n", "line 1: damaged .not valid JSON"),
        (b'{"journal": 1}\nhello\n', "line 2: damaged .not valid JSON"),
        (b'{"journal": 1}\n{"step": 1, "kind": "verdict"}\n', "line 2: damaged .'key' is missing"),
        (b'{"journal": 1}\n{"step": "1", "kind": "verdict", "key": [1]}\n', "line 2: .*step must be a whole number"),
        (b'{"journal": 1}\n{"step": 1, "kind": "verdict", "key": ["a"]}\n', "line 2: .*key whole numbers"),
        (b'{"journal": 1}\n{"step": 1, "kind": 7, "key": [1]}\n', "line 2: .*kind text"),
        (b'{"journal": 1}\n[1]\n', "line 2: damaged"),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Journal(path, last_step=0)
    assert path.read_bytes() == content
