"""The battery of bad inputs (`tests/refusals`): a command, what is wrong with it, and the sentence that answers first
(`tests/refusals/test_all_mistakes.py` has answers of several)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxrl.cli import main


def nothing(folder: Path) -> None:
    """Prepares nothing."""


def problems(folder: Path) -> None:
    rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True, slots=True)
class Refusal:
    """One bad input: what `prepare` writes into an empty folder, where the command runs, and the first line of
    stderr after `jaxrl: `. `{tmp}` stands for that folder, `{model}` for a tiny model's."""

    arguments: tuple[str, ...]
    sentence: str
    prepare: Callable[[Path], object] = nothing


def check_all(
    refusals: Iterable[Refusal],
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, wrong = 0, []
    for count, refusal in enumerate(refusals, 1):
        own = folder / str(count)
        own.mkdir()
        try:
            check(refusal, own, model, capsys, monkeypatch)
        except Exception as error:  # the others are run all the same
            said = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            wrong.append(f"jaxrl {' '.join(refusal.arguments):.300}: {said}")
        shutil.rmtree(own)
    assert count, "no case"
    assert not wrong, "\n\n".join([f"{len(wrong)} of {count} were not refused as they must be", *wrong])


def check(
    refusal: Refusal, folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2, the sentence on one line, and every file as it was, without a new one beside it."""

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(folder)).replace("{model}", str(model))

    refusal.prepare(folder)
    monkeypatch.chdir(folder)
    before = contents(folder)
    capsys.readouterr()
    status = main([filled(argument) for argument in refusal.arguments])
    captured = capsys.readouterr()
    assert captured.err.splitlines()[:1] == [f"jaxrl: {filled(refusal.sentence)}"]
    assert status == 2
    # on a loaded machine a start takes long enough to say what goes on
    assert [line for line in captured.out.splitlines() if not line.endswith(" ...")] == []
    after = contents(folder)
    changed = sorted(name for name in {*before, *after} if after.get(name) != before.get(name))
    assert not changed, f"written, changed or removed: {', '.join(changed)}"


def contents(folder: Path) -> dict[str, str]:
    """What is under a folder: by relative name the digest of a file, or the word folder, link or special."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "special"
    return found
