"""The benchmark of runs in several processes, tried with `--quick`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        timeout=1500,  # on a loaded machine
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


class MadeUp:
    """Runs that take no time: the first of each case is the slow one that fills the cache."""

    weight_bytes = 3000

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[tuple[int, str]]()

    def train(self, processes: int, source: Path = ROOT, *, ordered: bool = True) -> dict[str, float]:
        self.asked.append((processes, source.name))
        step_s = (9.0 if self.asked.count(self.asked[-1]) == 1 else 1.0) * processes * (0.5 if source != ROOT else 1)
        found = {f"timing_s/{name}": step_s for name in bench_hosts_overhead.PHASES} | {"tokens": 7.0, "seconds": 1.0}
        several = ("gate_s", "stream_s", "stream_batches", "stream_bytes", "waited_s", "exchange_s", "exchange_bytes")
        return found | {f"hosts/{name}": 2.0 for name in several if processes > 1}

    def hosts(self, processes: int) -> dict[str, Any]:
        return {"board": {"gate": {"p50_ms": 1.0, "p95_ms": 2.0}}, "collectives": {"all-gather": {"bytes_per_s": 1e6}}}


def test_medians_of_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first run of each case does not; those of an earlier call in the same folder do."""
    for runs in (2, 3):
        made: Any = MadeUp(tmp_path)
        one, two = bench_hosts_overhead._cases(made, [1, 2], runs)
        made.asked.clear()
    assert (one["runs"], two["runs"]) == (5, 5)
    assert one["seconds"]["step"] == [1.0, 1.0, 9.0], "the second call's first is one of an earlier folder's"
    assert two["seconds"]["gen"][0] == 2.0
    assert two["sync_bytes_per_s"][0] == 1500.0
    assert two["exchange_bytes_per_s"][0] == 1.0
    assert "2 processes\n" in capsys.readouterr().out


def test_the_ratio_of_two_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made: Any = MadeUp(tmp_path)
    (result,) = bench_hosts_overhead._against(made, tmp_path, 3)
    assert made.asked == [(1, ROOT.name), (1, tmp_path.name)] * 4, "in turns"
    assert (result["runs"], result["ratio"]["step"], result["there"]) == (3, [2.0, 2.0, 2.0], "unknown")
    assert "ratio 2.000 (2.000 to 2.000)" in capsys.readouterr().out


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
