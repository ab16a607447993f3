"""The modelled machine of a simulated run, host by host: executors, engines, layouts and scoring of each.

Purpose: `MachineParts` makes what stands on one host, on the clock of its process; `MachineParts.others` makes the
hosts beside that of process 0 (`jaxrl.runtime.simulated_hosts`). Never imports jax.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxrl.config import Config
from jaxrl.mechanisms import table
from jaxrl.mechanisms.adaptive_layouts.session import LayoutSessions, layout_sessions
from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.record.layouts import LayoutLog
from jaxrl.runtime.other_host import HostTimes, OtherHost
from jaxrl.runtime.rules import batcher_config, lookahead, workers_of
from jaxrl.runtime.simulated_hosts import SimulatedHosts
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.plan_cost import PlanCostModel
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers, Ticks, step_ticks
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.configured import worker_predictor
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes, SimulatedExecutor
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.hardware import hardware
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.timed_workers import Listener, TimedWorkers, UnsynchronizedWorkers
from jaxrl.sim.workload import Workload


class Drawn(Protocol):
    """Where things are drawn (`jaxrl.sim.clock.SimulatedPhases`)."""

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


class TracksOfHost:
    """Tracks of a host's own in the timeline of all. `host`: its number."""

    def __init__(self, drawn: Drawn, host: int) -> None:
        self._drawn, self._host = drawn, f"host {host} "

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None:
        self._drawn.complete(self._host + track, name, start_s, end_s, **args)

    def counter(self, track: str, /, **values: float) -> None:
        """Nothing: a host's counters would be drawn at the time of process 0."""


@dataclass(frozen=True, slots=True)
class HostMachine:
    """What stands on one host."""

    config: Config
    clock: SimulatedClock
    executors: SimulatedExecutorSet
    engines: list[Engine]
    sessions: LayoutSessions | None
    scoring: ScoringWorkers
    ticks: Ticks
    process: int

    def workers(self) -> LocalWorkers | SynchronizedWorkers:
        """Its workers, as those of a process that is alone, or has real ones beside it."""
        return workers_of(self.config, self.engines, self.ticks, self.process)

    def timed_workers(self, listener: Listener | None = None) -> TimedWorkers:
        """Its workers, as those of one of several simulated hosts."""
        config, first = self.config, self.process * len(self.engines)
        ahead = lookahead(config, self.ticks)
        assert ahead is not None, "what is commanded takes effect at once on several hosts"
        engines = dict(enumerate(self.engines, first))
        made = TimedWorkers if config.simulate.host_order == "logical" else UnsynchronizedWorkers
        return made(engines, ahead, config.num_workers, config.rollout.deal, self.ticks, self.clock, listener)


class MachineParts:
    """Makes the hosts of a simulated machine.

    Args:
      sizes: of a worker. layouts: sizes by TP degree, where layouts adapt; empty: they do not.
      timeouts: as in `jaxrl.sim.scoring.ScoringWorkers`.
      num_processes: that have the workers between them.

    Attributes:
      pace: predicts the steps of a worker whose layout switches; None: layouts stay.
    """

    def __init__(
        self,
        config: Config,
        cost: CostModel,
        workload: Workload,
        sizes: MachineSizes,
        layouts: Mapping[int, MachineSizes],
        timeouts: AdaptiveTimeouts | None,
        num_processes: int,
    ) -> None:
        self._config, self._cost, self._workload, self._sizes = config, cost, workload, sizes
        self._layouts, self._timeouts, self._num_processes = layouts, timeouts, num_processes
        self._batching = batcher_config(config, table.simulated_verify_rule(config, cost))
        self.pace = self._predictor()
        self._slowness = slownesses(config.hosts.num, config.simulate.host_spread, config.trainer.seed)

    def host(self, process: int, clock: SimulatedClock, drawn: Drawn, log: LayoutLog | None = None) -> HostMachine:
        """A host on the clock of its process. `log`: where layout switches are kept; None: nowhere."""
        config = self._config
        executors = self._executors(process, clock, drawn)
        engines = [Engine(each, self._batching, batcher=LockstepBatcher) for each in executors.executors]
        ticks = step_ticks if self.pace is None else PlanCostModel(self.pace, engines)
        sessions = self._sessions(process, engines, clock, drawn, log) if config.rollout.layout.adapts else None
        scoring = self._scoring(clock, drawn, executors)
        return HostMachine(config, clock, executors, engines, sessions, scoring, ticks, process)

    def others(self, clock: SimulatedClock, drawn: Drawn) -> SimulatedHosts:
        """The hosts beside that of process 0, whose clock this is."""
        config, times = self._config, HostTimes.configured(self._config.simulate)
        found: list[OtherHost] = []
        for process in range(1, self._num_processes):
            own = SimulatedClock()
            host = self.host(process, own, TracksOfHost(drawn, process))
            of_host = own, host.timed_workers(), host.executors.executors, host.scoring
            found.append(OtherHost(process, *of_host, times, () if host.sessions is None else (host.sessions,)))
        bytes_per_s = hardware(config.simulate.hardware).inter_node_bytes_per_s
        in_order = config.simulate.host_order == "logical"
        return SimulatedHosts(found, clock, times, bytes_per_s, in_order, self._timeouts)

    def _executors(self, process: int, clock: SimulatedClock, drawn: Drawn) -> SimulatedExecutorSet:
        """One for each worker of the host; their plans are drawn in tracks of their own."""
        config, cost, sizes = self._config, self._cost, self._sizes
        num_workers = config.workers_per_group

        def draw(track: str, plan: Any, result: Any, start_ns: int, end_ns: int) -> None:
            named = {"rows": len(plan.decode), "steps": result.num_steps}
            drawn.complete(track, "plan", start_ns / 1e9, end_ns / 1e9, **named)

        sync_s = cost.weight_sync_s(sizes.tp, sizes.num_devices * config.num_workers)
        proposals = table.simulated_proposals(config, self._workload)
        turn_end = table.simulated_turn_end(config, self._workload)
        tracks = ["engine"] if num_workers == 1 else [f"engine {worker}" for worker in range(num_workers)]
        return SimulatedExecutorSet(
            [
                SimulatedExecutor(
                    sizes,
                    self._workload.length,
                    cost,
                    clock,
                    config.simulate.host_s,
                    on_plan=partial(draw, track),
                    layouts=self._layouts,
                    sync_s=sync_s,
                    wake_s=cost.rollout_fixed_s(),
                    proposals=proposals,
                    turn_end=turn_end,
                    slowness=self._slowness[process],
                )
                for track in tracks
            ],
            clock,
            sync_s,
        )

    def _sessions(
        self, process: int, engines: Sequence[Engine], clock: SimulatedClock, drawn: Drawn, log: LayoutLog | None
    ) -> LayoutSessions:
        """The sessions of the layouts of a host's workers."""
        config, degrees = self._config, tuple(self._layouts)
        predictors = [self._predictor() for _ in engines]
        kept = (lambda: clock.now_s, drawn, log, None)
        first, count = process * len(engines), config.num_workers
        options, initial = config.rollout.layout, config.rollout.tp
        return layout_sessions(options, degrees, initial, engines, predictors, *kept, first=first, count=count)

    def _predictor(self) -> LatencyPredictor | None:
        if not self._config.rollout.layout.switch:
            return None
        return worker_predictor(self._config, self._cost, tuple(self._layouts))

    def _scoring(self, clock: SimulatedClock, drawn: Drawn, executors: SimulatedExecutorSet) -> ScoringWorkers:
        """The reward workers of section `reward`, with those that tasks of section `simulate` have for themselves."""
        chosen, reward = self._config.simulate, self._config.reward
        tasks = chosen.tasks or [chosen.task]
        own = {task.name: task.scoring.workers for task in tasks if task.scoring.workers}
        order = [task.name for task in tasks] if chosen.score_in_turn else []
        limits = reward.num_workers, reward.timeout_s
        on_devices = table.simulated_scoring(self._config, executors.occupy)
        return ScoringWorkers(self._workload, clock, drawn, *limits, own, order, self._timeouts, on_devices)


def slownesses(num_hosts: int, spread: float, seed: int) -> list[float]:
    """How many times as long a plan takes on each host as on the fastest: evenly from 1 to 1 + `spread`, in an order
    drawn with `seed`."""
    found = [1 + spread * i / max(num_hosts - 1, 1) for i in range(num_hosts)]
    random.Random(seed).shuffle(found)
    return found
