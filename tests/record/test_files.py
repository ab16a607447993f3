"""Files that a crash at any moment leaves readable: whole lines or a tail that counts as none, old content or new."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxrl.record.files import (
    JsonLines,
    file_problem,
    leftover_temporaries,
    read_lines,
    refuse_folder,
    temporary_path,
    write_whole,
    writing_whole,
)

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


def test_each_entry_is_a_line(path: Path):
    write(path, ENTRIES[:2])
    assert path.read_bytes() == b'{"step": 1, "text": "\\u00e9\\n"}\n{"step": 3, "x": 0.5}\n'
    write(path, ENTRIES[2:4], compact=True)
    assert path.read_bytes().split(b"\n")[2:] == [b'{"note":"no step"}', b'{"step":2}', b""]
    assert read_lines(path) == ENTRIES[:4]


def test_the_file_is_there_from_the_first_line_or_when_it_is_asked_for(path: Path):
    lines = JsonLines(path)
    assert not path.exists()
    assert read_lines(path) == []
    lines.open()
    assert path.read_bytes() == b""
    lines.append({"step": 1})
    assert read_lines(path) == [{"step": 1}], "no close: a line is on its way at once"
    lines.close()


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


@pytest.mark.parametrize("tail", [b"", b'{"step": 1', b'{"step": 1}'])
def test_lines_of_other_steps_are_dropped_wherever_they_stand(path: Path, tail: bytes):
    write(path, ENTRIES)
    path.write_bytes(path.read_bytes() + tail)
    write(path, [], last_step=2)
    assert path.read_bytes() == b"".join(json.dumps(ENTRIES[i]).encode() + b"\n" for i in (0, 2, 3))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"nonsense", "JSONDecodeError: "),
        (b'{"step": 1', "JSONDecodeError: "),
        (b'{"x": "\xff"}', "UnicodeDecodeError: "),
        (b"[" * 100_000, "RecursionError: "),
    ],
)
def test_a_damaged_line_is_noted_by_its_readers_and_stays(path: Path, line: bytes, what: str):
    path.write_bytes(b'{"step": 9}\n' + line + b'\n{"step": 1}\n')
    notes: list[str] = []
    assert read_lines(path, note=notes.append) == [{"step": 9}, {"step": 1}]
    assert notes[0].startswith(f"{path}, line 2: damaged ({what}")
    write(path, [], last_step=3)
    assert path.read_bytes() == line + b'\n{"step": 1}\n', "someone may want to mend it"


def test_a_file_is_read_and_not_written_before_it_is_begun(path: Path):
    write(path, ENTRIES)
    path.write_bytes(path.read_bytes() + b'{"st')
    content = path.read_bytes()
    lines = JsonLines(path, 2)
    lines.close()
    assert path.read_bytes() == content
    lines.begin()
    assert read_lines(path) == [ENTRIES[i] for i in (0, 2, 3)]


def test_numbers_that_are_not_finite_are_text(path: Path):
    """NaN is no JSON: other readers stop at it."""
    nan, inf = float("nan"), np.float64("inf")
    write(path, [{"step": 1, "x": nan, "y": [inf, (-inf, 0.5)], "z": {"a": {"b": nan}}}])
    line = path.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "x": "nan",
        "y": ["inf", ["-inf", 0.5]],
        "z": {"a": {"b": "nan"}},
    }


def test_a_file_is_not_written_again_for_nothing(path: Path, monkeypatch: pytest.MonkeyPatch):
    write(path, ENTRIES)
    monkeypatch.setattr(os, "replace", None)
    write(path, [], last_step=3)
    assert read_lines(path) == ENTRIES


# ---------------------------------------------------------------- replaced as a whole


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "a.json"
    write_whole(path, "é")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("moment", ["open", "write", "replace"])
def test_a_crash_while_it_is_replaced_leaves_the_old_content(path: Path, moment: str, monkeypatch: pytest.MonkeyPatch):
    """An error leaves no temporary file; one that a killed process left is in nothing's way."""
    write(path, ENTRIES)
    old = path.read_bytes()
    leftover = path.with_name(f".jaxrl-{path.name}-000000000000.tmp")
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


# ---------------------------------------------------------------- what is not ours


def test_a_temporary_file_of_another_program_is_left_alone(path: Path):
    other = path.with_name(path.name + ".tmp")
    other.write_text("mine")
    write_whole(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "mine")


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


def test_an_error_inside_leaves_the_old_content_and_no_temporary_file(path: Path):
    write_whole(path, "old")

    def interrupted() -> None:
        with writing_whole(path) as file:
            file.write(b"half")
            assert len(list(path.parent.iterdir())) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [(path.name, "old")]


def test_the_temporary_files_of_one_file_are_told_from_others(tmp_path: Path):
    file = tmp_path / "a.json"
    found = [temporary_path(file), temporary_path(file)]
    others = [temporary_path(tmp_path / name) for name in ("b.json", "a.json-2")]
    for each in (*found, *others, tmp_path / "a.tmp"):
        each.write_text("")
    temporary_path(file).mkdir()
    assert sorted(leftover_temporaries(file)) == sorted(found)


def test_an_error_names_the_file_and_not_its_temporary_one(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError) as caught:
        write_whole(tmp_path / "file" / "a.json", "")
    assert ".tmp" not in str(caught.value)
    with pytest.raises(OSError, match="No space left") as caught, writing_whole(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "a.json")


def test_places_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert refuse_folder(tmp_path / "a" / "b", "x") == tmp_path / "a" / "b"
    for given, words in {
        tmp_path / "file": f"x: {tmp_path}/file is not a folder",
        tmp_path / "file" / "a" / "b": f"x: {tmp_path}/file/a/b cannot be made: {tmp_path}/file is not a folder",
        "/dev/null": "x: /dev/null is not a folder",
    }.items():
        with pytest.raises(ValueError, match="x: ") as caught:
            refuse_folder(given, "x")
        assert str(caught.value) == words
    assert file_problem(tmp_path / "a" / "b") is None
    assert file_problem(tmp_path) == f"({tmp_path}) is a folder: name a file in it"
    inside = tmp_path / "file" / "a"
    assert file_problem(inside) == f"({inside}) cannot be written: {tmp_path}/file is not a folder"
    assert [file.name for file in tmp_path.iterdir()] == ["file"], "nothing was made"


def test_where_the_system_makes_no_file_though_a_superuser_may_write(tmp_path: Path):
    """As in /proc, of which root is told that it may write there. What is looked at stays as it was."""
    assert file_problem("/proc/x") == "(/proc/x) cannot be written: no permission to write in /proc"
    with pytest.raises(
        ValueError, match=r"^--out: /proc/x/y cannot be written: /proc may not be changed by this user$"
    ):
        refuse_folder("/proc/x/y", "--out")
    assert file_problem(tmp_path / "new" / "file") is None
    assert list(tmp_path.iterdir()) == []
