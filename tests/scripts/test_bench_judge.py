"""The benchmark of a judge beside the rollout, at the smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_quick_run_measures_every_case(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts" / "bench_judge.py"), "--quick", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("judge-*.jsonl")
    cases = {case["case"]: case for case in json.loads(file.read_text())["results"]["cases"]}
    assert set(cases) == {"resident", "pipelined", "serial", "rollout", "gaps", "after"}
    assert cases["resident"]["over"] == cases["rollout"]["over"] == 1
    assert cases["gaps"]["gap_turns"] > 0
    assert cases["pipelined"]["steps"] == cases["serial"]["steps"] == cases["resident"]["steps"] > 0


def test_nonsense_is_refused():
    command = [sys.executable, str(ROOT / "scripts" / "bench_judge.py"), "--quick", "--resident", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (
        2,
        "bench_judge: --resident (9) must be at most the model's layers (2)\n",
    )
