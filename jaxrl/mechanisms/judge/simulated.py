"""A judge on the devices of a simulated rollout.

Departure: it has no rule for when it runs, and no GPU shares itself out.
"""

from collections.abc import Callable

from jaxrl.config import Config
from jaxrl.sim.scoring import DeviceScoring


def scoring(config: Config, occupy: Callable[[int, int], int]) -> DeviceScoring:
    """Of the tasks with `simulate.task.scoring.device_s`. `occupy`: as in `DeviceScoring`."""
    tasks = config.simulate.tasks or [config.simulate.task]
    seconds = {task.name: task.scoring.device_s for task in tasks if task.scoring.device_s}
    return DeviceScoring("judge", seconds, occupy)
