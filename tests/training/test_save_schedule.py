"""When a run saves."""

import numpy as np
import pytest

from jaxrl.config.options import TrainerSection
from jaxrl.training.save_schedule import SaveSchedule


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.2, 180.0), (2.0, 180.0), (40.0, 600.0), (30.0, 21600.0)])
def test_auto_is_the_interval_that_costs_least(cost_s: float, mtbf_s: float):
    """Daly's expected seconds of a run, over its seconds of work, where failures come at random."""
    clock = iter([0.0, cost_s])
    schedule = SaveSchedule(TrainerSection(save_freq="auto", mtbf_s=mtbf_s), lambda: next(clock))
    with schedule.saving():
        pass
    own, every = schedule.interval_s, np.linspace(mtbf_s / 1000, 3 * mtbf_s, 30_000)

    def seconds(interval_s: np.ndarray | float):
        return mtbf_s * np.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    assert seconds(own) < 1.01 * seconds(every).min()


@pytest.mark.parametrize(("save_freq", "saved"), [(0, []), (3, [3, 6, 9]), ("auto", [1, 4, 7, 10])])
def test_saved_boundaries(save_freq: int, saved: list[int]):
    """Steps of 10 s and saves of 2 s, with a failure every 150 s: 22.5 s of work between two saves."""
    now_s, found = 0.0, list[int]()
    schedule = SaveSchedule(TrainerSection(save_freq=save_freq, mtbf_s=150.0), lambda: now_s)
    for step in range(12):
        if schedule.is_due(step):
            with schedule.saving():
                now_s += 2.0
            found.append(step)
        now_s += 10.0
    assert found == saved
