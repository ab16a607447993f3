"""The degree that a run starts with, by a table whose step times can be added up by hand."""

from __future__ import annotations

import pytest

from jaxrl.scheduling.layouts.batch_state import GroupCapacity, fastest_degree
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity

AMPLE = {tp: GroupCapacity(100_000, 100) for tp in (1, 2, 4)}


@pytest.fixture
def model() -> LatencyPredictor:
    """Four devices. One row takes 10, 8, 4 ms at tp 1, 2, 4, whatever its context; each row more in a dp group costs
    4 ms x tp."""
    points = [
        Measurement(tp, rows, context, base + 0.004 * tp * (rows - 1))
        for tp, base in ((1, 0.010), (2, 0.008), (4, 0.004))
        for rows in (1, 33)
        for context in (1, 1 << 20)
    ]
    return LatencyPredictor(Profile(ProfileIdentity("m", "", "", 4, "", ""), tuple(points)))


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, 4),  # 10, 8, 4 ms
        (2, 2),  # 10; 8; 4 + 16 = 20
        (4, 1),  # 10; 8 + 8 = 16; 4 + 48
        (5, 1),  # two rows somewhere: 14; three: 24
    ],
)
def test_the_degree_to_begin_with(model: LatencyPredictor, num_rows: int, expected: int):
    assert fastest_degree(model, AMPLE, num_rows, 10, 100).degree == expected
    assert fastest_degree(model, {2: AMPLE[2]}, num_rows, 10, 100).degree == 2


def test_seconds_are_those_of_all_steps(model: LatencyPredictor):
    choice = fastest_degree(model, AMPLE, 2, 10, 100)
    assert choice.predicted_s == pytest.approx({1: 1.0, 2: 0.8, 4: 2.0})
    assert str(choice) == "1 s at tp 1, 0.8 s at tp 2, 2 s at tp 4"


def test_rows_that_have_no_room_come_in_waves(model: LatencyPredictor):
    """Four rows at tp 1 are one in each group. At tp 4 one group has room for one row, or for three: 4 waves of 4 ms
    steps, or one of 4 + 32 ms and one of 4."""
    one, three = GroupCapacity(100_000, 1), GroupCapacity(3 * 110 + 109, 100)
    for room, expected in ((one, 1.6), (three, 3.6 + 0.4)):
        assert fastest_degree(model, {4: room}, 4, 10, 100).predicted_s == pytest.approx({4: expected})
