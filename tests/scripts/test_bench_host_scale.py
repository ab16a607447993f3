"""The benchmark of many simulated hosts, tried with `--quick`."""

from __future__ import annotations

import json
from pathlib import Path

import bench_host_scale
import pytest
from bench.host_scale import PARTS, Stopwatch


def test_a_record_has_each_spread_order_and_kind_of_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_host_scale.main(["--quick", f"--json={tmp_path}"]) == 0
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["bench"] == "host-scale"
    cases = {(case["spread"], case["round"], case["order"]): case for case in record["results"]}
    assert cases.keys() == {
        (spread, kind, order) for spread in (0.0, 0.1) for kind in ("short", "long") for order in ("logical", "arrival")
    }
    for (_, _, order), case in cases.items():
        assert set(case["cpu_s"]) == set(PARTS)
        assert all(seconds > 0 for seconds in case["cpu_s"].values())
        assert 0 < case["share"][1] < 1
        assert ("longer" in case) == (order == "logical")
        assert order == "logical" or case["order_wait_s"] == [0, 0, 0]
    assert "longer than by arrival" in capsys.readouterr().out


def test_a_missed_bar_is_an_exit_status(capsys: pytest.CaptureFixture[str]):
    words = ["--quick", "--bar", "0.00001", "--spreads", "0", "--orders", "logical", "--steps", "1"]
    assert bench_host_scale.main(words) == 1
    assert "more than 0.001 %" in capsys.readouterr().err


def test_an_inner_part_is_not_an_outer_one():
    class Machine:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            sum(range(2_000_000))

    machine, watch = Machine(), Stopwatch()
    watch.around(machine, "inner", "round")
    watch.around(machine, "outer", "events")
    machine.outer()
    found = watch.take()
    assert found["round"] > 5 * found["events"]
    assert watch.take() == dict.fromkeys(PARTS, 0.0)
