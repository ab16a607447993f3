"""The histogram of lengths and the heat map of rewards: the numbers behind what is drawn."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxrl.report.drawings import heat_card, histogram_card, rows_card


def batch(step: int, groups: list[float], lengths: dict[int, int], limit: int = 320) -> dict[str, Any]:
    counts = [0] * 32
    for bin_, count in lengths.items():
        counts[bin_] = count
    return {"step": step, "groups": groups, "limit": limit, "lengths": counts}


def test_the_histogram_compares_the_last_steps_with_the_first():
    batches = [batch(step, [0.0], {0: 4} if step <= 10 else {31: 3, 10: 1}) for step in range(1, 21)]
    text = histogram_card(batches)
    assert re.findall(r"<title>(.*?)</title>", text) == [
        "last steps, 100 to 110 tokens: 25.0%",
        "last steps, 310 to 320 tokens: 75.0%",
    ]
    (line,) = re.findall(r"<polyline class='c2 line' points='(.*?)'", text)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == 1 + 2 * 32
    assert points[1][1] < points[3][1] == points[-1][1], "all of the first steps' are in the first bin"
    assert re.findall(r"<li class='(\w+)'>([\w ]+)", text) == [("c1", "last steps"), ("c2", "first steps")]


def test_one_step_has_one_histogram():
    assert "first steps" not in histogram_card([batch(1, [0.0], {3: 1})])
    assert histogram_card([]) == histogram_card([batch(1, [0.0], {})]) == ""


def test_steps_with_another_limit_are_not_mixed():
    text = histogram_card([batch(1, [0.0], {0: 9}, limit=64), batch(2, [0.0], {5: 1}, limit=320)])
    assert "50 to 60 tokens: 100.0%" in text


def cells(text: str) -> list[tuple[int, float, float]]:
    """(level, x, y) of each cell of a heat map."""
    found = []
    for level, path in re.findall(r"<path class='c3 heat(\d)' d='(.*?)'", text):
        found += [(int(level), float(x), float(y)) for x, y in re.findall(r"M(\S+) (\S+?)h", path)]
    return found


def test_groups_are_sorted_and_the_best_are_darkest():
    found = cells(heat_card([batch(1, [1.0, 0.0, 0.5], {}), batch(2, [0.0, 0.0, 0.0], {})]))
    columns = sorted({x for _, x, _ in found})
    assert len(columns) == 2
    first = sorted((y, level) for level, x, y in found if x == columns[0])
    assert [level for _, level in first] == [7, 4, 0], "from above"
    assert {level for level, x, _ in found if x == columns[1]} == {0}


@pytest.mark.parametrize("steps", [1, 2, 89, 90, 91, 1000])
def test_long_runs_have_as_many_columns_as_a_reader_can_see(steps: int):
    found = cells(heat_card([batch(step, [0.0, 1.0], {}) for step in range(1, steps + 1)]))
    assert len({x for _, x, _ in found}) == min(steps, 90)


def test_nothing_is_drawn_where_all_rewards_are_equal():
    assert heat_card([batch(1, [1.0, 1.0], {}), batch(2, [1.0], {})]) == heat_card([]) == ""


def test_responses_that_were_cut_have_a_colour_that_warns():
    stays = [
        {"name": "0.1.0", "ts": 7e6, "dur": 1e6, "args": {"row": "0.0", "end": "stop", "tokens": 3}},
        {"name": "0.1.1", "ts": 8e6, "dur": 3e6, "args": {"row": "0.0", "end": "length", "tokens": 8}},
    ]
    text = rows_card(3, stays)
    assert re.findall(r"<li class='(\w+)'>([\w ]+)", text) == [("c1", "ended"), ("c2", "cut at the limit")]
    assert re.findall(r"<rect class=(\w+) x=(\S+)%", text) == [("c1", "0.00"), ("c2", "25.00")]
