"""Whole runs over all mechanisms are as recorded: `tests/support/record_runs.py` says how, `recorded_runs.py` which.

`data/recorded-runs.tar.xz` is a recording. A run that is started twice goes on here from the directory that the
recording's first start left, so a run directory of that commit resumes. A change that is meant to alter what runs write
needs a new recording (the command is in `record_runs.py`).
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from record_runs import compare, record_here
from recorded_masks import masked
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


def test_what_changes_is_told(recorded: Path, tmp_path: Path):
    name = "simulated/partial"
    at = tmp_path / name
    shutil.copytree(recorded / name, at)
    assert compare(recorded, tmp_path, [name]) == []
    lines = [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()]

    def changed(**values: float) -> list[str]:
        last = lines[-1] | values
        (at / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines[:-1], last]))
        return [*compare(recorded, tmp_path, [name]), *compare(recorded, tmp_path, [name], close=True)]

    length = lines[-1]["response_length/mean"]
    assert changed() == []
    assert len(changed(**{"response_length/mean": length * (1 + 1e-12)})) == 1, "rounding is for another machine"
    assert len(changed(new=1.0)) == 1
    exact, close = changed(**{"response_length/mean": length + 1})
    assert exact.startswith("simulated/partial: metrics.jsonl, line 9:")
    assert close.startswith("simulated/partial: metrics.jsonl, /8/response_length/mean: ")
    changed()
    (at / "samples.jsonl").rename(at / "other.jsonl")
    assert compare(recorded, tmp_path, [name], close=True) == [f"{name}: samples.jsonl is only in {recorded}"]
    assert len(compare(recorded, tmp_path, [name])) == 2


def test_a_masked_value_keeps_its_name():
    line = '{"step": 1, "time": 5.5, "timing_s/gen": 0.25, "rollout/preemptions": 3}\n'
    assert json.loads(masked("metrics.jsonl", line, simulated=True)) == {
        **{"step": 1, "time": "-", "timing_s/gen": 0.25},
        "rollout/preemptions": 3,
    }
    assert json.loads(masked("metrics.jsonl", line, simulated=False))["timing_s/gen"] == "-"
