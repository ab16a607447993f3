"""On which devices no gradients can be computed beside the rollout."""

from __future__ import annotations

import re

import pytest

from jaxrl.mechanisms.stream_trainer.declaration import devices_problem


@pytest.mark.parametrize(
    ("count", "processes", "sentence"),
    [
        (1, 1, r"the number of devices \(trainer\.num_devices\) must be a power of two, found 1$"),
        (6, 1, r"the number of devices \(trainer\.num_devices\) must be a power of two, found 6$"),
        (4, 2, "all devices in one process, found those of 2 processes: what goes between the halves of the devices "),
        (2, 1, None),
        (8, 1, None),
    ],
)
def test_devices_without_a_stream(count: int, processes: int, sentence: str | None):
    problem = devices_problem(count, processes)
    assert problem is None if sentence is None else re.search(sentence, problem or "")
