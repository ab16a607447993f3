"""What the last lines of a run say: evaluations, and rewards that failed."""

from __future__ import annotations

import json
from pathlib import Path

from jaxrl.record.summary import summary_of


def write(folder: Path, *lines: dict[str, float]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 0.0} | line) + "\n" for line in lines))


def test_the_first_and_the_last_evaluation(tmp_path: Path):
    write(tmp_path, {"step": 0, "val/reward": 0.25}, {"step": 1}, {"step": 2, "val/reward": 0.3})
    assert summary_of(tmp_path) == {"held-out": "reward 0.250 at step 0, 0.300 at step 2"}


def test_one_evaluation_or_none(tmp_path: Path):
    assert summary_of(tmp_path) == {}
    write(tmp_path, {"step": 1}, {"step": 2, "val/reward": 0.5}, {"step": 3, "val/reward": float("nan")})
    assert summary_of(tmp_path) == {"held-out": "reward 0.500 at step 2"}


def test_failed_rewards(tmp_path: Path):
    write(tmp_path, {"step": 1, "reward/num_scored": 8, "reward/errors": 3})
    assert summary_of(tmp_path)["rewards"].startswith("3 of 8 failed")
