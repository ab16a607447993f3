"""The benchmark of host threads over two workers: what it draws, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benches import ROOT, run_quick

sys.path.insert(0, str(ROOT / "scripts"))

import bench_workers


@pytest.mark.slow
def test_a_trial(tmp_path: Path):
    record, _ = run_quick(tmp_path, "bench_workers")
    cases = record["results"]["cases"]
    assert [(case["case"], case["decode_steps"]) for case in cases] == [
        ("alone", 2),
        ("one-thread", 2),
        ("two-threads", 2),
    ]
    assert cases[0]["speed_over_alone"] == 1.0
    assert all(case["seconds"] > 0 and 0 <= case["late"] <= 1 and case["speed_over_alone"] > 0 for case in cases)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--devices", "3"], "bench_workers: --devices (3) must be 2: one for each worker"),
        (["--decode-steps", "0"], "bench_workers: --decode-steps (0) must be at least 1"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert bench_workers.main(arguments) == 2
    assert capsys.readouterr().err == sentence + "\n"
