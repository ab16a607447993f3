"""The benchmark of runs in several processes, tried with `--quick`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benches import ROOT, assert_refused

sys.path.insert(0, str(ROOT / "scripts"))

import bench_hosts_overhead


@pytest.mark.slow
@pytest.mark.parametrize("against", [False, True], ids=["processes", "against itself"])
def test_a_record_has_the_seconds_of_each_case(tmp_path: Path, against: bool):
    more = ["--against", str(ROOT)] if against else []
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_hosts_overhead.py"), "--quick", f"--json={tmp_path}", *more],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["bench"] == "hosts-overhead"
    if against:
        (result,) = record["results"]
        assert all(0 < least <= median <= most for median, least, most in [result["ratio"]["step"]])
        return
    one, two = record["results"]
    assert (one["processes"], two["processes"]) == (1, 2)
    for case in (one, two):
        assert case["seconds"]["step"][0] >= case["seconds"]["gen"][0] > 0
        assert case["sync_bytes_per_s"][0] > 0
    assert "hosts" not in one
    assert two["exchange_bytes_per_s"][0] > 0
    assert two["hosts"]["hosts/stream_batches"][0] > 0
    assert two["board"]["get 1 KiB"]["p50_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--processes", "2", "3"], r"--devices \(4\) must be a multiple of --processes \(3\)"),
        (["--skip", "12"], r"--skip \(12\) must be at least 0 and below --steps \(12\)"),
        (["--against", "/nowhere"], r"--against \(/nowhere\) must be a checkout of this project"),
    ],
)
def test_refusals(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert_refused(bench_hosts_overhead.main, "bench_hosts_overhead", arguments, sentence, capsys)
