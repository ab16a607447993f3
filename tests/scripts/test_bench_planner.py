"""The bench of the planner's rules, with few seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_planner  # noqa: E402


def test_the_papers_rule_ratchets_and_the_other_does_not(capsys: pytest.CaptureFixture[str]):
    assert bench_planner.main(["--seeds", "5", "--rounds", "40", "--means", "100", "--scatter", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("command: ")
    noise = {line.split()[0]: line for line in lines if " noise " in line}
    assert "seeds that stayed 0," in noise["paper"]
    assert noise["confident"].endswith("seeds that stayed 1, rounds at tp 2 1, tp 8 in round -")
    assert sum("after 16" in line for line in lines) == 6


def test_scatter_below_that_of_poisson_counts_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench_planner.main(["--scatter", "0.5"])
    assert "--scatter must be at least 1" in capsys.readouterr().err
