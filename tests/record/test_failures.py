"""Failed rewards of a run, counted from metrics and explained by batches or samples, and its summary's lines."""

from __future__ import annotations

import json
from pathlib import Path

from jaxrl.record.failures import reward_failures, summary_of

OK = {"step": 1, "reward/num_scored": 8.0, "reward/errors": 0.0, "reward/timeouts": 0.0, "reward/crashes": 0.0}
BAD = {"step": 2, "reward/num_scored": 8.0, "reward/errors": 3.0, "reward/timeouts": 1.0, "reward/code/errors": 9.0}


def test_counts_are_of_the_whole_run_and_texts_of_its_batches():
    batches = [{"errors": [["b", 2], ["a", 1]]}, {"step": 2}, {"errors": [["b", 1]]}, {"errors": [["a", 1]]}]
    found = reward_failures([OK, BAD, {"step": 3, "reward/errors": float("nan")}], batches)
    assert found is not None
    assert (found.scored, found.failed, dict(found.kinds)) == (16, 4, {"errors": 3, "timeouts": 1})
    assert (found.most, found.last, found.share) == ("b", "a", 0.25)
    assert found.summary() == "4 of 16 failed, last: a"


def write(folder: Path, *lines: dict[str, float]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": 0.0} | line) + "\n" for line in lines))


def test_the_first_and_the_last_evaluation(tmp_path: Path):
    write(tmp_path, {"step": 0, "val/reward": 0.25}, {"step": 1}, {"step": 2, "val/reward": 0.3})
    assert summary_of(tmp_path) == {"held-out": "reward 0.250 at step 0, 0.300 at step 2"}
