"""Files that a crash at any moment leaves readable: whole lines or a tail that counts as none, old content or new."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxrl.record.files import JsonLines, read_lines, write_whole

ENTRIES = [{"step": 1, "text": "é\n"}, {"step": 3, "x": 0.5}, {"note": "no step"}, {"step": 2}, {"step": 3}]


def write(path: Path, entries: list[dict], last_step: int = 9, **options: bool) -> None:
    lines = JsonLines(path, lambda step: step <= last_step, **options)
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
    lines = JsonLines(path, lambda step: True)
    assert not path.exists()
    assert read_lines(path) == []
    lines.make()
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


def test_lines_can_be_dropped_between_two_writes(path: Path):
    lines = JsonLines(path, lambda step: True, sync=True)
    for entry in ENTRIES:
        lines.append(entry)
    lines.keep(lambda step: step > 2)
    lines.append({"step": 7})
    assert read_lines(path) == [ENTRIES[i] for i in (1, 2, 4)] + [{"step": 7}]
    lines.close()


@pytest.mark.parametrize("line", ["nonsense", "[1]", "7", '{"step": "1"}', '{"step": 1'])
def test_a_damaged_line_is_named_and_the_file_left_alone(path: Path, line: str):
    content = b'{"step": 9}\n' + line.encode() + b'\n{"step": 1}\n'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2: not a line of some \(\w+Error: "):
        JsonLines(path, lambda step: step <= 3)
    assert path.read_bytes() == content


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
    """What a crash leaves of the draft is overwritten by the next one."""
    write(path, ENTRIES)
    old = path.read_bytes()
    draft = path.with_name("some.jsonl.draft")
    with monkeypatch.context() as patch:
        if moment == "open":
            draft.mkdir()
        elif moment == "write":
            patch.setattr(os, "fsync", _crash)
        else:
            patch.setattr(os, "replace", _crash)
        with pytest.raises(OSError):  # noqa: PT011 - of the operating system, whichever
            write(path, [], last_step=1, sync=True)
    assert path.read_bytes() == old
    if moment == "open":
        draft.rmdir()
    else:
        draft.write_bytes(b'{"st')
    write(path, [], last_step=1, sync=True)
    assert read_lines(path) == [ENTRIES[0], ENTRIES[2]]
    assert not draft.exists()


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
