"""The log of layouts, and the picture that a run's page draws of it."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl.mechanisms import page_parts
from jaxrl.mechanisms.adaptive_layouts.report import COLUMNS, layouts_section
from jaxrl.record.layouts import FILE_NAME, LayoutLog, read_layouts
from jaxrl.report.page import write_report

SWITCH = {
    "dispatch": 5,
    "from_tp": 1,
    "to_tp": 4,
    "how": "migrate",
    "num_live": 3,
    "num_tokens": 90,
    "num_moved": 1280,
    "failed": False,
    "predicted_cost_s": 0.021,
    "cost_s": 0.034,
    "predicted_step_s": 0.004,
    "step_s": 0.0051,
    "step_before_s": 0.009,
    "predicted_gain_s": 0.4,
}
POINTS = [[0.0, 16, 1], [0.5, 9, 1], [1.0, 3, 4], [2.5, 1, 4]]


def write(folder: Path, last_step: int = -1, steps: tuple[int, ...] = (1, 2, 3), source: str = "measured") -> None:
    log = LayoutLog(folder / FILE_NAME, last_step)
    for step in steps:
        picture: dict[str, Any] = {"points": POINTS, "switches": [SWITCH] * (step % 3 > 0)}
        log.write(step, 0, "all", source, picture)
    log.close()


def test_the_picture_has_the_rows_and_the_degrees(tmp_path: Path):
    write(tmp_path, steps=(1, 2, 3, 4, 5))
    page = layouts_section(read_layouts(tmp_path))
    lines = [points.split() for points in re.findall("<polyline class='.*?' points='(.*?)'", page)]
    assert len(lines) == 6, "the first, the middle and the last round that switched, two lines each"
    live, tp = ([tuple(map(float, point.split(","))) for point in line] for line in lines[:2])
    assert len(live) == len(POINTS)
    assert live[0][1] < live[-1][1], "it drains: down is up in the picture's coordinates"
    assert [x for x, _ in live] == sorted(x for x, _ in live)
    assert len({y for _, y in tp}) == 2
    assert tp[0][1] > tp[-1][1]
    assert min(y for _, y in tp) > max(y for _, y in live), "under the rows"
    text = re.sub("<[^>]*>", "|", page)
    expected = ("4 switches in 4 of 5 rounds.", "tp 1", "tp 4", "16", "1 to 4", "migrated", "1,280", "21 ms", "34 ms")
    assert [words for words in (*expected, *COLUMNS) if words not in text] == []
    assert "synthetic" not in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 1}', "KeyError: 'kind'"),
        ('{"step": 1, "kind": "a", "source": "x", "points": [[1]], "switches": []}', "a point must be three numbers"),
        ('{"step": 1, "kind": "a", "source": "x", "points": [], "switches": [{}]}', "KeyError: 'from_tp'"),
        ("[", "JSONDecodeError"),
    ],
)
def test_the_page_is_made_without_a_damaged_record(tmp_path: Path, line: str, words: str):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / FILE_NAME).write_text(line + "\n")
    text = write_report(tmp_path, parts=page_parts()).read_text()
    assert "layouts.jsonl, line 1: damaged" in text
    assert words in html.unescape(text)
