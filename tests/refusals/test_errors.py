"""How errors end a command: one sentence and a status for each kind, a traceback for a bug, whatever the standard
streams are."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.types import RunFailed

ROOT = Path(__file__).resolve().parents[2]


def test_prompts_on_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"good\ncaf\xe9\n"), encoding="utf-8"))
    assert main(["generate", "--model", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("jaxrl: standard input: not UTF-8 text (byte 8)\n")


@pytest.mark.parametrize(
    ("error", "sentence", "status"),
    [
        (ValueError("file.jsonl, line 3:\n  not\tJSON"), "file.jsonl, line 3: not JSON", 2),
        (ValueError("the folder \x1b[31mred\x07"), "the folder ?[31mred?", 2),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), "a.bin: no such file or directory", 2),
        (PermissionError(13, "Permission denied", b"b.bin"), "b.bin: permission denied", 2),
        (OSError(28, "No space left on device", "run/x"), "run/x: no space left on the device", 1),
        (RunFailed("every update was skipped"), "every update was skipped", 1),
        (MemoryError("Unable to allocate 7 TiB"), "out of memory (Unable to allocate 7 TiB)", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_every_kind_of_error_has_its_sentence_and_status(
    error: BaseException,
    sentence: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("jaxrl.commands.completion.script", fail)
    assert main(["completion", "bash"]) == status
    assert capsys.readouterr() == ("", f"jaxrl: {sentence}\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxrl.report.page.write_report", lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        main(["report", "run"])


@pytest.mark.parametrize(
    ("command", "err", "status"),
    [
        ("options | true", "", 0),
        ("options <&- >&- 2>&-", "", 0),
        ("options > /dev/full", "no space left on the device\n", 1),
    ],
    ids=["reader-gone", "all-closed", "full"],
)
def test_whatever_standard_output_is(command: str, err: str, status: int):
    """Buffered, or not: an error shows where the output is written, or where it is flushed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment |= {"PYTHON": sys.executable, "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    for more in ({}, {"PYTHONUNBUFFERED": "1"}) if err else ({},):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; $PYTHON -m jaxrl {command}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment | more,
        )
        assert done.returncode == status
        if err:
            assert done.stderr in (f"jaxrl: {err}", f"jaxrl: standard output: {err}")
        else:
            assert done.stderr == ""
        assert "Traceback" not in done.stdout
