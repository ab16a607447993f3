"""Benchmarks as a user runs them, and as one misuses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_quick(folder: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The one record that a trial on one CPU device leaves in `folder`, and what it prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--quick", f"--json={folder}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    (line,) = file.read_text(encoding="utf-8").splitlines()
    return json.loads(line), done.stdout


def run_repeated(folder: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The same of a benchmark that tries each case twice."""
    record, stdout = run_quick(folder, script, *arguments)
    for case in record["results"]["cases"]:
        assert case["kept"] + case["dropped"] == 2
    return record, stdout


def assert_refused(
    main: Callable[[Sequence[str]], int],
    script: str,
    arguments: Sequence[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2, and one line on stderr that begins with the script's name and has the sentence (a pattern)."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{script}: ")
    assert error.count("\n") == 1
    assert re.search(sentence, error), error
