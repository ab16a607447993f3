"""The journal: found again after a crash, cut at checkpoints, half a line counts as none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrl.record.journal import Journal, read_journal

KEY = (0, 0, 3, 1, 0)


Open = Callable[[Path, int], Journal]


@pytest.fixture
def journal_of() -> Iterator[Open]:
    """Opens journals; they are closed after the test, so that a process "dies" without closing its own."""
    opened: list[Journal] = []

    def open_one(path: Path, last_step: int) -> Journal:
        opened.append(Journal(path, last_step))
        opened[-1].begin()
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
    assert len(read_journal(path)) == 1
    for step in (1, 2, 3):
        journal.append(step, "verdict", KEY, {"status": "crash"})
        assert len(read_journal(path)) == 1 + step, "the header knows of it"
    journal.cut(1)
    assert [line["step"] for line in read_journal(path)[1:]] == [2, 3]
    journal.append(4, "verdict", KEY, {"status": "crash"})  # the file is open for more
    assert [line["step"] for line in read_journal(path)[1:]] == [2, 3, 4]
    journal.close()
    again = journal_of(path, 3)
    assert [line["step"] for line in read_journal(path)[1:]] == [4]
    assert again.find(3, "verdict", KEY) is None
    assert again.find(4, "verdict", KEY) is not None


@pytest.fixture
def written(journal_of: Open, tmp_path: Path) -> Path:
    """A journal of two decisions; the second one's line is on the disk, and the header does not know of it."""
    path = tmp_path / "journal.jsonl"
    journal = journal_of(path, 0)
    journal.append(1, "verdict", KEY, {"status": "timeout"})
    header = path.read_bytes().partition(b"\n")[0]
    journal.append(2, "verdict", KEY, {"status": "crash"})
    path.write_bytes(header + b"\n" + path.read_bytes().partition(b"\n")[2])
    return path


def test_every_flipped_bit_is_found(written: Path):
    """Of what the header vouches for."""
    content = written.read_bytes()
    vouched = len(content.partition(b"\n")[0]) + 1 + lines(written)[0]["bytes"]
    for at in range(vouched):
        for bit in range(8):
            written.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(ValueError, match=r"journal\.jsonl: damaged"):
                read_journal(written)


def test_every_cut_is_found_or_loses_a_line_that_was_being_written(written: Path):
    content = written.read_bytes()
    header = len(content.partition(b"\n")[0]) + 1
    vouched = header + lines(written)[0]["bytes"]
    for size in range(len(content)):
        written.write_bytes(content[:size])
        if size < vouched:
            with pytest.raises(ValueError, match=r"damaged .*: bring back the file as it was, or move it away"):
                read_journal(written)
        else:
            assert [entry["step"] for entry in read_journal(written)[1:]] == [1]
