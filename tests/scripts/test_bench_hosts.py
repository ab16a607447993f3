"""The benchmark of process 0 beside other hosts, tried with `--quick`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benches import ROOT, assert_refused, run_quick

sys.path.insert(0, str(ROOT / "scripts"))

import bench_hosts


def test_a_record_has_what_every_number_of_hosts_costs(tmp_path: Path):
    record, _ = run_quick(tmp_path, "bench_hosts")
    assert record["bench"] == "hosts"
    assert [case["hosts"] for case in record["results"]] == [2, 4]
    for case in record["results"]:
        assert case["events"] > case["hosts"] * 8, "a batch has as many responses as there are rows"
        assert case["us_per_event"] > 0
        assert case["share"] > 0
        assert case["keys_left"] < 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hosts", "4", "0"], r"--hosts \(0\) must be at least 1"),
        (["--spread", "1"], r"--spread \(1.0\) must be at least 0 and below 1"),
        (["--hosts", "2", "--rows", "4", "--samples", "9"], r"--samples \(9\) must be at most --hosts × --rows"),
    ],
)
def test_refusals(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert_refused(bench_hosts.main, "bench_hosts", arguments, sentence, capsys)
