"""The bench of speculation, at a size that takes seconds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_speculation  # noqa: E402


def test_a_forged_index_is_right_as_often_as_asked():
    rng, options = np.random.default_rng(0), argparse.Namespace(width=4)
    response = rng.integers(1000, size=400).astype(np.int32)
    for right in (0.0, 0.5, 1.0):
        index = bench_speculation.forged(rng, response, options, right)
        hits = [index.draft(response[place - 7 : place], 1) == response[place] for place in range(7, 399)]
        assert all(len(hit) == 1 for hit in hits), "a draft at every place"
        assert np.mean(hits) == pytest.approx(right, abs=0.1)


@pytest.mark.slow
def test_it_compares_drafts_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_speculation.main(["--quick", "--acceptance", "1", "--new", "40", "--json", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2 rows, ")]
    assert [line.split(":")[0] for line in lines] == ["2 rows, plain", "2 rows, 1"]
    (record,) = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    plain, drafted = record["results"]["cases"]
    assert (plain["faster"], plain["tokens_per_step"], plain["other"]) == (1, 1, 0)
    assert drafted["accept_rate"] == 1
    assert drafted["tokens_per_step"] > 3
    assert drafted["other"] == 0
