"""A real world of processes without a model beside its simulation, tried with `--quick`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benches import ROOT, assert_refused

sys.path.insert(0, str(ROOT / "scripts"))

import bench_host_world
from bench.host_world import MessageLog


def world(tmp_path: Path, *words: str) -> dict[str, dict[str, float]]:
    status = bench_host_world.main([*words, f"--json={tmp_path}"])
    (file,) = tmp_path.iterdir()
    (found,) = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert status == int(any(not 0.5 <= ratio <= 2 for ratio in found["ratios"].values()))
    return found


def test_two_processes_decide_what_their_simulation_decides_and_take_about_as_long(tmp_path: Path):
    """Decisions are compared by the benchmark itself; how long a busy machine takes is a matter of chance."""
    found = world(tmp_path, "--quick")
    assert found["real"].keys() == found["simulated"].keys()
    assert 0.2 < found["ratios"]["rollout"] < 5
    assert found["real"]["notice"] > 0 < found["real"]["batch"]


@pytest.mark.slow
def test_twelve_processes_agree_with_their_simulation_within_a_factor_of_two(tmp_path: Path):
    found = world(tmp_path)
    assert 0.5 <= found["ratios"]["rollout"] <= 2


def test_figures_take_what_was_read_from_what_any_process_has_written():
    first = MessageLog([2.0, 4.0, 3.0], [0.5], {"s/items/0": 1.0}, {"s/notices/1/0": 5.0, "s/notices/1/1": 8.0})
    second = MessageLog([2.5], [1.5], {"s/notices/1/0": 4.0, "s/notices/1/1": 4.0}, {"s/items/0": 1.25})
    found = bench_host_world.figures([first, second])
    assert found == {"rollout": 3.0, "order wait": 1.0, "notice": 2.5, "batch": 0.25}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--processes", "1"], r"--processes \(1\) must be at least 2"),
        (["--steps", "0"], r"--steps \(0\) must be at least 1"),
        (["--step-s", "0"], r"--step-s must be above 0"),
    ],
)
def test_refusals(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert_refused(bench_host_world.main, "bench_host_world", arguments, sentence, capsys)
