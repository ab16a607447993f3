"""The benchmark of many simulated hosts, tried with `--quick`."""

from __future__ import annotations

import json
from pathlib import Path

import bench_host_scale
import pytest


def test_a_record_has_each_order_and_kind_of_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_host_scale.main(["--quick", f"--json={tmp_path}"]) == 0
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["bench"] == "host-scale"
    assert record["plan_ms"]["8"] > 0
    cases = {(case["hosts"], case["round"], case["order"]): case for case in record["results"]}
    assert cases.keys() == {(3, kind, order) for kind in ("short", "long") for order in ("logical", "arrival")}
    for (_, _, order), case in cases.items():
        assert case["share"][1] > 0
        assert 0 < case["ms_per_plan"][1] < 100
        assert ("longer" in case) == (order == "logical")
    assert "longer than by arrival" in capsys.readouterr().out
