"""What a simulated run has when its mechanisms are built. Never imports jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl.config import Config
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.workload import Workload


@dataclass(slots=True)
class SimulatedParts:
    """The parts of a simulated run that mechanisms are built from.

    Attributes:
      cost, workload: the models. clock, phases: of the run.
      workers, executors: of its rollout. tp: of a worker.
      num_devices: of rollout and training together.
      pace: predicts the steps of a worker whose layout switches; None: layouts stay.
      is_timeless: whether a round brings the same batch whichever of its responses end first.
      layouts, timeouts: mechanisms that the modelled machine has been built with; None: it has none.
      next_verdict_ns: when the next verdict comes, by the clock; None: none will.
      feeding: stands between a round and each stream of gradients beside it.
      history: what earlier responses are kept for, once a mechanism keeps them.
    """

    config: Config
    cost: CostModel
    workload: Workload
    clock: SimulatedClock
    phases: SimulatedPhases
    workers: LocalWorkers
    executors: SimulatedExecutorSet
    tp: int
    num_devices: int
    pace: LatencyPredictor | None
    is_timeless: bool
    layouts: Mechanism | None
    timeouts: Mechanism | None
    next_verdict_ns: Callable[[], int | None]
    feeding: Callable[[Any], Any]
    history: HistoryStore | None = None
