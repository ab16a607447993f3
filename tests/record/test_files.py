"""Files that a crash at any moment leaves readable: whole lines or a tail that counts as none, old content or new."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxrl.record.files import JsonLines, file_problem, is_full, read_lines, system_error, write_whole

ENTRIES = [{"step": 1, "text": "é\n"}, {"step": 3, "x": 0.5}, {"note": "no step"}, {"step": 2}, {"step": 3}]


def write(path: Path, entries: list[dict], last_step: int = 9, **options: bool) -> None:
    lines = JsonLines(path, last_step, **options)
    lines.begin()
    for entry in entries:
        lines.append(entry)
    lines.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


def test_a_crash_at_any_byte_loses_the_line_that_was_being_written_and_no_other(path: Path):
    write(path, ENTRIES)
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert read_lines(path) == ENTRIES[:whole], "the reader does not wait for a writer"
        write(path, [{"step": 4}])
        assert path.read_bytes() == content[: ends[whole - 1] if whole else 0] + b'{"step": 4}\n'


def test_a_damaged_line_is_noted_by_its_readers_and_stays(path: Path):
    for line, what in ((b"nonsense", "JSONDecodeError"), (b'{"x": "\xff"}', "UnicodeDecodeError")):
        path.write_bytes(b'{"step": 9}\n' + line + b'\n{"step": 1}\n')
        notes: list[str] = []
        assert read_lines(path, note=notes.append) == [{"step": 9}, {"step": 1}]
        assert notes[0].startswith(f"{path}, line 2: damaged ({what}: ")
        write(path, [], last_step=3)
        assert path.read_bytes() == line + b'\n{"step": 1}\n', "someone may want to mend it"


def test_numbers_that_are_not_finite_are_text(path: Path):
    """NaN is no JSON: other readers stop at it."""
    nan, inf = float("nan"), np.float64("inf")
    write(path, [{"step": 1, "x": nan, "y": [inf, (-inf, 0.5)], "z": {"a": {"b": nan}}}])
    written = {"step": 1, "x": "nan", "y": ["inf", ["-inf", 0.5]], "z": {"a": {"b": "nan"}}}
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == written


@pytest.mark.parametrize("moment", ["open", "write", "replace"])
def test_a_crash_while_it_is_replaced_leaves_the_old_content(path: Path, moment: str, monkeypatch: pytest.MonkeyPatch):
    """An error leaves no temporary file; one that a killed process left is in nothing's way."""
    write(path, ENTRIES)
    old = path.read_bytes()
    leftover = path.with_name(f".jaxrl-{path.name}-{os.getpid():06x}000000.tmp")
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
        if moment == "open":
            leftover.mkdir()
        elif moment == "write":
            patch.setattr(os, "fsync", _crash)
        else:
            patch.setattr(os, "replace", _crash)
        with pytest.raises(OSError):  # noqa: PT011 - of the operating system, whichever
            write(path, [], last_step=1, sync=True)
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir() if file != leftover] == [path.name]
    if moment == "open":
        assert leftover.is_dir(), "it is not ours"
    else:
        assert not leftover.exists()
    write(path, [], last_step=1, sync=True)
    assert read_lines(path) == [ENTRIES[0], ENTRIES[2]]


def _crash(*_: object) -> None:
    raise OSError("the machine is gone")


@pytest.mark.parametrize("sync", [True, False])
def test_what_must_be_on_the_disk_is_there_before_it_counts(path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    replace = os.replace

    def spy_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", os.fstat(fd).st_size)))
    monkeypatch.setattr(os, "replace", spy_replace)
    write(path, [{"step": 1}, {"step": 2}], sync=sync)
    write(path, [], last_step=1, sync=sync)
    line = len(b'{"step": 1}\n')
    synced = [("fsync", line), ("fsync", 2 * line), ("fsync", line), ("replace", line)]
    assert calls == (synced if sync else [("replace", line)])


def test_a_link_is_followed_and_stays(path: Path, tmp_path: Path):
    target = tmp_path / "elsewhere" / "real"
    write_whole(target, "old")
    path.symlink_to(target)
    write_whole(path, "new")
    assert path.is_symlink()
    assert target.read_text() == "new"
    assert [file.name for file in target.parent.iterdir()] == ["real"]


def test_what_is_no_file_is_written_and_not_replaced(tmp_path: Path):
    """As `--out /dev/null`: a rename would put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert file_problem(pipe) is None
    assert file_problem(tmp_path) == f"({tmp_path}) is a folder: name a file in it"


def test_a_systems_error_is_found_behind_others():
    """TensorStore's has the number in its text; a full disk comes before what it has led to."""
    error = RuntimeError("Error writing [os_error_code='28' No space]")
    error.__cause__, error.__context__ = PermissionError(13, "no"), error
    assert is_full(system_error(error) or OSError())
    assert system_error(ValueError("OS errors")) is None
