"""The modelled machine of a simulated run: executors, engines, layouts and scoring, on one clock.

Purpose: `SimulatedMachine` makes what stands under the backend of a simulated run. Never imports jax.

Several hosts are executors with latencies: a call holds the controller up (`simulate.host_call_s`), and takes its time
to the host and back (`simulate.host_latency_s`); with `simulate.host_spread` some hosts are slower than others.
Departures: what is called once in a round (a weight sync, a switch of layouts) has no latency.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from jaxrl.config import Config
from jaxrl.mechanisms import table
from jaxrl.mechanisms.adaptive_layouts.session import LayoutSessions, layout_sessions
from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.record.layouts import LayoutLog
from jaxrl.runtime.arrival import ArrivalOrder
from jaxrl.runtime.rules import batcher_config
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.plan_cost import PlanCostModel
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers, step_ticks
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.configured import worker_predictor
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes, SimulatedExecutor
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.workload import Workload


class Drawn(Protocol):
    """Where things are drawn (`jaxrl.sim.clock.SimulatedPhases`)."""

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


class SimulatedMachine:
    """What stands under the backend.

    Args:
      sizes: of a worker. layouts: sizes by TP degree, where layouts adapt; empty: they do not.
      timeouts: as in `jaxrl.sim.scoring.ScoringWorkers`.
      log: where layout switches are kept; None: nowhere.

    Attributes:
      pace: predicts the steps of a worker whose layout switches; None: layouts stay.
      sessions: of the layouts; None: they do not adapt. arrival: the order of plans; None: it is logical.
    """

    def __init__(
        self,
        config: Config,
        cost: CostModel,
        workload: Workload,
        sizes: MachineSizes,
        layouts: Mapping[int, MachineSizes],
        timeouts: AdaptiveTimeouts | None,
        clock: SimulatedClock,
        drawn: Drawn,
        log: LayoutLog | None,
    ) -> None:
        self._config, self._cost, self._workload, self._layouts = config, cost, workload, layouts
        self._clock, self._drawn = clock, drawn
        self.pace = self._predictor()
        self.executors = self._executors(sizes)
        batching = batcher_config(config, table.simulated_verify_rule(config, cost))
        engines = [Engine(each, batching) for each in self.executors.executors]
        self.arrival = ArrivalOrder(self.executors.first_done, None) if config.rollout.order == "arrival" else None
        ticks = step_ticks if self.pace is None else PlanCostModel(self.pace, engines)
        self.workers = LocalWorkers(engines, config.rollout.deal, ticks, self.arrival)
        self.sessions = self._sessions(engines, log) if config.rollout.layout.adapts else None
        self.scoring = self._scoring(timeouts)

    def _executors(self, sizes: MachineSizes) -> SimulatedExecutorSet:
        """One for each worker; their plans are drawn in tracks of their own."""
        config, cost, drawn, chosen = self._config, self._cost, self._drawn, self._config.simulate
        num_workers, several = config.num_workers, config.hosts.num > 1

        def draw(track: str, plan: Any, result: Any, start_ns: int, end_ns: int) -> None:
            named = {"rows": plan.num_decoding, "steps": result.num_steps}
            drawn.complete(track, "plan", start_ns / 1e9, end_ns / 1e9, **named)

        sync_s = cost.weight_sync_s(sizes.tp, sizes.num_devices * num_workers)
        proposals = table.simulated_proposals(config, self._workload)
        turn_end = table.simulated_turn_end(config, self._workload)
        slowness = slownesses(config.hosts.num, chosen.host_spread, config.trainer.seed)
        executors = [
            SimulatedExecutor(
                sizes,
                self._workload.length,
                cost,
                self._clock,
                chosen.host_s,
                on_plan=partial(draw, "engine" if num_workers == 1 else f"engine {worker}"),
                layouts=self._layouts,
                sync_s=sync_s,
                wake_s=cost.rollout_fixed_s(),
                proposals=proposals,
                turn_end=turn_end,
                slowness=slowness[worker // config.workers_per_group],
                call_s=chosen.host_call_s if several else 0.0,
                latency_s=chosen.host_latency_s if several else 0.0,
            )
            for worker in range(num_workers)
        ]
        return SimulatedExecutorSet(executors, self._clock, sync_s)

    def _sessions(self, engines: list[Engine], log: LayoutLog | None) -> LayoutSessions:
        """The sessions of the workers' layouts."""
        rollout, clock = self._config.rollout, self._clock
        predictors = [self._predictor() for _ in engines]
        kept = (lambda: clock.now_s, self._drawn, log, None)
        return layout_sessions(rollout.layout, tuple(self._layouts), rollout.tp, engines, predictors, *kept)

    def _predictor(self) -> LatencyPredictor | None:
        if not self._config.rollout.layout.switch:
            return None
        return worker_predictor(self._config, self._cost, tuple(self._layouts))

    def _scoring(self, timeouts: AdaptiveTimeouts | None) -> ScoringWorkers:
        """The reward workers of section `reward`, with those that tasks of section `simulate` have for themselves."""
        chosen, reward = self._config.simulate, self._config.reward
        tasks = chosen.tasks or [chosen.task]
        own = {task.name: task.scoring.workers for task in tasks if task.scoring.workers}
        order = [task.name for task in tasks] if chosen.score_in_turn else []
        limits = reward.num_workers, reward.timeout_s
        on_devices = table.simulated_scoring(self._config, self.executors.occupy)
        return ScoringWorkers(self._workload, self._clock, self._drawn, *limits, own, order, timeouts, on_devices)


def slownesses(num_hosts: int, spread: float, seed: int) -> list[float]:
    """How many times as long a plan takes on each host as on the fastest: evenly from 1 to 1 + `spread`, in an order
    drawn with `seed`."""
    found = [1 + spread * i / max(num_hosts - 1, 1) for i in range(num_hosts)]
    random.Random(seed).shuffle(found)
    return found
