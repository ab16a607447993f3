"""Results as dated files: the runs, their code and calibration, and every step."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxrl.record import run_dir
from papers.runs import Steps
from papers.setups import Case

SCHEMA = 1


def header(
    began: datetime, paper: str, arguments: Sequence[str] | None, calibration: Path, tiny: bool
) -> dict[str, Any]:
    """Date, command, commit, and when the calibration file was committed: before the runs, or it is no calibration."""
    given = sys.argv[1:] if arguments is None else arguments
    shown = [Path(word).name if "/" in word else word for word in given]
    return {
        "schema": SCHEMA,
        "paper": paper,
        "date": began.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "scripts/reproduce_papers.py", *shown]),
        "commit": run_dir.commit(),
        "tiny": tiny,
        "calibration": {"file": calibration.name, "committed": _committed(calibration)},
    }


def _committed(file: Path) -> str:
    """The last commit that touched a file, and its date; empty where there is none, or the file has changed since."""
    at = ["git", "-C", str(file.resolve().parent)]
    changed = subprocess.run(
        [*at, "status", "--porcelain", "--", file.name], capture_output=True, text=True, check=False
    )
    if changed.returncode or changed.stdout.strip():
        return ""
    log = subprocess.run(
        [*at, "log", "-1", "--format=%h %cI", "--", file.name], capture_output=True, text=True, check=False
    )
    return log.stdout.strip()


def read(file: Path) -> tuple[dict[str, Any], list[Steps]]:
    """A result: its header and its runs. Raises ValueError for a file of another schema."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{file}: schema {found.get('schema')!r} must be {SCHEMA}")
    runs = []
    for entry in found.pop("runs"):
        case = entry.pop("case")
        runs.append(
            Steps(
                case=Case(**{**case, "tasks": tuple(case["tasks"]), "degrees": tuple(case.get("degrees", ()))}), **entry
            )
        )
    return found, runs
