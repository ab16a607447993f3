"""What is gone or changed in a run's files is told when the run goes on, and nothing where all is as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from damage import cut, flip

from jaxrl.config import from_mapping
from jaxrl.record.files import JsonLines
from jaxrl.record.integrity import lost_lines, missing_journal
from jaxrl.record.run_dir import RunDir

NAME, SAVED = "samples.jsonl", 4
CHANGED = "has changed since it was written: some of its first 10 lines may say what was not"
CONFIG = from_mapping({"model": {"path": "m", "random_init": True}, "data": {"task": "leg_counting"}})


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """Of a run that was killed after step 6, with two lines of each; checkpoint 4 was complete at the end of step 5."""
    with closing(RunDir(tmp_path)) as run_dir, closing(JsonLines(tmp_path / NAME, lambda step: True)) as lines:
        run_dir.record_start(CONFIG, {}, 0)
        for step in range(1, 7):
            for i in range(2):
                lines.append({"step": step, "text": "x" * i})
            if step == 5:
                run_dir.record_checkpoint(SAVED, {NAME: lines.written})
        yield run_dir


def start_of(file: Path, at: int) -> int:
    """The first byte of a line."""
    return sum(len(line) for line in file.read_bytes().splitlines(keepends=True)[:at])


def drop(*gone: int) -> Callable[[Path], object]:
    """Takes lines away."""

    def harm(file: Path) -> None:
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(line for i, line in enumerate(lines) if i not in gone))

    return harm


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda file: flip(file, 2), CHANGED),
        (lambda file: flip(file, start_of(file, 4) + 9), CHANGED),
        (drop(4, 5), "has no line of step 3: what was recorded there is lost"),
        (drop(4, 10, 11), "has 9 of its 10 lines: what was recorded in the others is lost"),
        (lambda file: cut(file, start_of(file, 2) + 3), "has no line of step 2, 3, 4: what was recorded there is lost"),
        (cut, "has no line of step 1, 2, 3, 4: what was recorded there is lost"),
        (Path.unlink, "is gone, and with it what its 10 lines held"),
    ],
    ids=["key", "step", "middle", "some", "cut", "emptied", "removed"],
)
def test_harm_is_told(run_dir: RunDir, harm: Callable[[Path], object], told: str):
    file = run_dir.file(NAME)
    harm(file)
    assert lost_lines(run_dir, SAVED) == [f"{file} {told}"]


def test_many_steps_are_counted(run_dir: RunDir):
    cut(run_dir.file(NAME))
    assert "no line of step 1, 2, 3, 4, 5 and 2 more:" in lost_lines(run_dir, 7)[0]


@pytest.mark.parametrize("size", ["as it was", "mid-line", "at the checkpoint's commit"])
def test_nothing_is_told_of_what_was_not_vouched_for(run_dir: RunDir, size: str):
    file = run_dir.file(NAME)
    cut(file, {"as it was": 1 << 20, "mid-line": -3}.get(size, start_of(file, 10)))
    assert lost_lines(run_dir, SAVED) == []


def test_lines_that_a_start_drops_are_not_missed(run_dir: RunDir):
    """It may be killed at any moment."""
    file = run_dir.file(NAME)
    run_dir.record_start(CONFIG, {}, SAVED, checkpoint=SAVED)
    assert lost_lines(run_dir, SAVED) == []
    with closing(JsonLines(file, lambda step: step <= SAVED)) as lines:
        assert lost_lines(run_dir, SAVED) == []
        run_dir.record_checkpoint(SAVED, {NAME: lines.written})
        lines.append({"step": 5})
        assert lost_lines(run_dir, SAVED) == []
    flip(file, 2)
    assert len(lost_lines(run_dir, SAVED)) == 1


def test_a_file_that_nothing_was_written_of(tmp_path: Path):
    """In a new folder, and in that of an older version."""
    with closing(RunDir(tmp_path)) as run_dir:
        assert (lost_lines(run_dir, 3), missing_journal(run_dir)) == ([], None)
        (tmp_path / "run.json").write_text(json.dumps({"devices": {}, "checkpoint": 3}))
        assert (lost_lines(run_dir, 3), missing_journal(run_dir)) == ([], None)


def test_a_journal_that_is_gone(run_dir: RunDir):
    told = "is gone: steps after the last checkpoint ask the clock again, and may come out another way"
    file = run_dir.file("journal.jsonl")
    assert missing_journal(run_dir) == f"{file} {told}"
    file.write_text("")
    assert missing_journal(run_dir) is None, "its reader refuses it"
