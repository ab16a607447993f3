"""Runs recorded at commit 04af1cb, before modules moved into rooms: a run directory of that commit resumes and reports
today, and simulations give the same results.

`data/recorded-runs.tar.xz` holds

- `real/`: a training run of a tiny model in float64 (tail batching, a TP planner, evaluation), killed after step 5 with
  a checkpoint of step 4, and in `expected/` what the same code wrote when it went on from there;
- `simulated/`: the outputs of `jaxrl simulate` on `base.yaml` with the options in `OPTIONS`, and a run that stopped
  after step 3 beside the same run gone on to the end.

A change that is meant to alter what a simulation writes needs a new recording: `OPTIONS` says how each was made.
Recorded again since: `tail_filter` and `rollout_scored` (dynamic sampling launches ahead of verdicts), `oneoff` (a
round's seconds stand in the line of its batch), `adapt2` and `resumed` (all-reduces by one kernel, rows dealt evenly,
an evaluation's place in the journal); the metrics of all of them (saving is the first thing in the next step),
and their states (which carry a digest; `resumed-at-3` is as it was).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny_model

from jaxrl.cli import main

ROOT = Path(__file__).resolve().parents[2]
ADAPTS = ("rollout.layout.switch=true", "rollout.layout.profile=modelled", "rollout.layout.min_gain=0.0")
OPTIONS = {
    "tail_filter": ("rollout.tail_batching.enable=true", "algorithm.filter_groups.enable=true"),
    "partial": ("rollout.partial_rollout.enable=true", "rollout.partial_rollout.max_staleness=2"),
    "oneoff": ("trainer.one_step_off=true", "rollout.num_devices=2"),
    "adapt2": (
        *ADAPTS,
        "rollout.layout.direction=both",
        "rollout.layout.bound=expected",
        "rollout.tail_batching.enable=true",
        "rollout.decode_steps=4",
    ),
    "rollout_scored": (
        "reward.score_when=rollout",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_unscored_groups=2",
    ),
}
RESUMED = ("rollout.tail_batching.enable=true", "rollout.layout.planner=true")
FILES = ("metrics.jsonl", "samples.jsonl", "layouts.jsonl", "state.json")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(Path(__file__).parent / "data" / "recorded-runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def same(found: Any, expected: Any) -> bool:
    """Equal, up to what another machine's logarithm may round differently, and to names that have been added since.
    The wall clock ("time") is not compared."""
    match expected:
        case dict():
            return found.keys() >= expected.keys() and all(
                key == "time" or same(found[key], value) for key, value in expected.items()
            )
        case list():
            return len(found) == len(expected) and all(map(same, found, expected))
        case float():
            return isinstance(found, float | int) and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
        case _:
            return found == expected


def content(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare(run: Path, expected: Path) -> None:
    names = [name for name in FILES if (expected / name).exists()]
    assert {"metrics.jsonl", "samples.jsonl", "state.json"} <= set(names)
    for name in names:
        found, wanted = content(run / name), content(expected / name)
        assert len(found) == len(wanted), f"{name}: {len(found)} lines, recorded {len(wanted)}"
        for number, (line, other) in enumerate(zip(found, wanted, strict=True), 1):
            assert same(line, other), f"{name}, line {number}:\n{line}\nrecorded:\n{other}"


@pytest.mark.parametrize("name", OPTIONS)
def test_simulated_runs_are_as_recorded(name: str, recorded: Path, tmp_path: Path):
    run, base = tmp_path / "run", recorded / "simulated" / "base.yaml"
    assert main(["simulate", "--config", str(base), f"simulate.run_dir={run}", *OPTIONS[name]]) == 0
    compare(run, recorded / "simulated" / name)


def test_an_old_simulated_run_goes_on_as_recorded(recorded: Path, tmp_path: Path):
    run, base = tmp_path / "run", recorded / "simulated" / "base.yaml"
    shutil.copytree(recorded / "simulated" / "resumed-at-3", run)
    assert main(["simulate", "--config", str(base), f"simulate.run_dir={run}", *RESUMED]) == 0
    compare(run, recorded / "simulated" / "resumed")


def test_an_old_run_goes_on_as_recorded_and_reports(recorded: Path, tmp_path: Path):
    """Sums are in float64: samples and rewards agree on any machine, and numbers closely."""
    folder = tmp_path / "real"
    shutil.copytree(recorded / "real", folder)
    (folder / "run" / "journal.jsonl").unlink()  # of a schema that is not read any more; it had no decision
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_tiny_model(folder / "model", **sizes)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(ROOT),
    }

    def jaxrl(*arguments: str) -> str:
        command = [sys.executable, "-m", "jaxrl", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    jaxrl("report", "run", "--out", "before.html")
    assert "resuming" in jaxrl("train", "--config", "config.yaml")
    jaxrl("report", "run", "--out", "after.html")
    assert all("<svg" in (folder / page).read_text() for page in ("before.html", "after.html"))
    assert same(content(folder / "run" / "samples.jsonl"), content(folder / "expected" / "samples.jsonl"))
    found, wanted = (content(folder / part / "metrics.jsonl") for part in ("run", "expected"))
    assert [line["step"] for line in found] == [line["step"] for line in wanted] == [1, 2, 3, 4, 5, 6]
    for line, other in zip(found, wanted, strict=True):
        # a sample that the round drops may have been scored by then, or not
        clocked = ("timing_s/", "perf/", "reward/seconds", "reward/num_scored", "reward/errors", "rollout/recompiles")
        assert line.keys() >= other.keys()
        for metric in other.keys() - {"time"}:
            if not metric.startswith(clocked):
                # the mean reward of held-out prompts was called so
                today = "val/reward" if metric == "val/accuracy" and "val/reward" in line else metric
                assert line[today] == pytest.approx(other[metric], rel=1e-6, abs=1e-9), (line["step"], metric)
