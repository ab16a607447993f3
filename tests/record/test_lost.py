"""Lines of metrics that are gone are told when a run goes on."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from jaxrl.record.lost import missing_metrics
from jaxrl.record.run_dir import RunDir


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([1, 2, 3], None),
        ([0, 1, 2, 3, 4], None),
        ([1, 2], "3"),
        ([2], "1, 3"),
        ([], "1, 2, 3"),
    ],
)
def test_which_lines_are_gone(tmp_path: Path, steps: list[int], told: str | None):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    with closing(RunDir(tmp_path)) as run_dir:
        expected = None if told is None else f"{file} has no line of step {told}: what was measured there is lost"
        assert missing_metrics(run_dir, 3) == expected


def test_a_file_that_is_gone_has_no_line(tmp_path: Path):
    with closing(RunDir(tmp_path)) as run_dir:
        assert missing_metrics(run_dir, 0) is None
        assert "no line of step 1, 2, 3, 4, 5 and 2 more" in (missing_metrics(run_dir, 7) or "")
