"""The time in which anything was being scored: a union of spans."""

import pytest

from jaxrl.run.verdicts import BusyTime
from jaxrl.types import SampleKey


@pytest.mark.parametrize(
    ("spans", "total_s"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], 4.0),
        ([(1.0, 9.0), (2.0, 5.0)], 8.0),
        ([(4.0, 5.0), (1.0, 2.0)], 2.0),
        ([(1.0, 2.0), (2.0, 3.0)], 2.0),
    ],
)
def test_union(spans: list[tuple[float, float]], total_s: float):
    busy = BusyTime()
    for i, (since_s, _) in enumerate(spans):
        busy.begin(SampleKey(0, 0, i), since_s)
    for i, (_, end_s) in enumerate(spans):
        busy.end(SampleKey(0, 0, i), end_s)
    assert busy.take() == total_s
    assert busy.take() == 0.0


def test_what_has_no_end_or_no_beginning_counts_nothing():
    busy = BusyTime()
    busy.begin(SampleKey(0, 0, 0), 1.0)
    busy.end(SampleKey(0, 0, 1), 5.0)
    assert busy.take() == 0.0
    busy.end(SampleKey(0, 0, 0), 2.0)
    busy.end(SampleKey(0, 0, 0), 9.0)
    assert busy.take() == 1.0
