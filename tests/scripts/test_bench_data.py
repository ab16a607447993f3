"""The benchmark of large data, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import bench_data
import pytest

from jaxrl.data import store


@pytest.mark.slow
def test_a_trial(tmp_path: Path, tiny_model: Path):
    rows = tmp_path / "rows.jsonl"
    bench_data.write_rows(rows, 200)
    each = rows.stat().st_size / 200
    count = int(1.1 * store.CACHED_BYTES / each)
    assert bench_data.main([f"--model={tiny_model}", f"--rows={count}", f"--json={tmp_path}"]) == 0
    (file,) = tmp_path.glob("data-*.jsonl")
    found = json.loads(file.read_text())["results"]
    assert list(found) == ["first", "second", "nothing kept"]
    assert found["second"]["tokenised_s"] < 0.2 * found["nothing kept"]["tokenised_s"]
    assert bench_data.main(["--model=nowhere", "--rows=1"]) == 2
