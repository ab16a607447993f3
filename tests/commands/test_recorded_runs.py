"""Whole runs over all mechanisms are as recorded: `tests/support/record_runs.py` says how, `recorded_runs.py` which.

`data/recorded-runs.tar.xz` is a recording. A run that is started twice goes on here from the directory that the
recording's first start left, so a run directory of that commit resumes. A change that is meant to alter what runs write
needs a new recording (the command is in `record_runs.py`).
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from record_runs import compare, record_here
from recorded_runs import RUNS

from jaxrl.cli import main

QUICK = (
    *("simulated/resumed_hosts", "simulated/resumed_partial", "simulated/over_provisioning", "simulated/switch_both"),
    *("simulated/rollout_scored", "simulated/two_tier", "simulated/stream"),
    *("simulated/adaptive_timeouts", "simulated/judge", "simulated/two_tasks", "real/stopped"),
)
"""The fewest that pass through the code of every room of a mechanism."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(Path(__file__).parent / "data" / "recorded-runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_run_is_as_recorded(name: str, recorded: Path, tmp_path: Path):
    record_here(tmp_path, name, first=recorded)
    assert not compare(recorded, tmp_path, [name], close=True)


@pytest.mark.parametrize("name", ["simulated/resumed.first", "real/stopped.first"])
def test_an_old_run_has_a_report(name: str, recorded: Path, tmp_path: Path):
    assert main(["report", str(recorded / name), "--out", str(tmp_path / "page.html")]) == 0
    assert "<svg" in (tmp_path / "page.html").read_text()
