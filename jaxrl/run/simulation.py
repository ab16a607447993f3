"""A simulated run put together: the loop, engine, batcher and rules of a real run on modelled devices.

Departures from a real run: prompts have lengths but no text, and their order is not grain's; losses and gradients do
not exist; evaluation draws prompts beside the training ones, `data.val_size` of them; weights for devices of the
rollout's own are charged as if they lay there already, split. Nothing is journalled, because a simulated clock decides
the same again. Never imports jax.

Several hosts are executors with latencies: a call holds the controller up, and takes its time to the host and back;
with `simulate.host_spread` some hosts are slower than others. What is called once in a round (a weight sync, a switch
of layouts) has no latency.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config.options import total_steps
from jaxrl.loop import Loop
from jaxrl.mechanisms import batch_rule
from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts
from jaxrl.mechanisms.turns.rule import Conversation
from jaxrl.record.layouts import LayoutLog
from jaxrl.run.arrival import ArrivalOrder
from jaxrl.run.run import Run
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.plan_cost import plan_ticks
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers, step_ticks
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.sim.clock import SimulatedClock, SimulatedConcurrently, SimulatedPhases
from jaxrl.sim.configured import layout_sizes, num_devices_of, rollout_devices_of, tasks_of, worker_predictor
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.drafts import BlankIndexes, SimulatedDrafts, verify_rule
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.hardware import PLATFORM
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.scoring import DeviceScoring, ScoringWorkers
from jaxrl.sim.trainer import SimulatedStream, SimulatedTrainer
from jaxrl.sim.turns import conversation, turn_model
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.training import batch_preparation
from jaxrl.training.training_step import Models

HOST_CALL_S, HOST_LATENCY_S = 0.00015, 0.0005  # of a call to another host, for the controller, and one way
STOP_TOKEN = 1  # the stop token of a response that is shorter than the limit


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, ready to go: `loop.run()`."""

    loop: Loop
    run: Run
    clock: SimulatedClock
    phases: SimulatedPhases


class SimulatedMachine:
    """Modelled devices (`jaxrl.run.run.Run.machine`).

    Args:
      layouts: sizes of a worker by TP degree, of which it begins with the configured one.
      feeding: wraps each stream of the stream trainer, to compare other ways to feed it.
    """

    mesh = None
    platform = PLATFORM

    def __init__(
        self,
        config: Config,
        cost: CostModel,
        workload: ModelledWorkload,
        layouts: Mapping[int, Capacity],
        clock: SimulatedClock,
        phases: SimulatedPhases,
        feeding: Callable[[SimulatedStream], Any],
    ) -> None:
        self._config, self._cost, self._workload = config, cost, workload
        self._layouts, self._clock, self._phases, self._feeding = layouts, clock, phases, feeding
        self.degrees: Sequence[int] = tuple(layouts)
        self.num_devices = num_devices_of(config)
        self._turns = turn_model(config, workload) if config.environment.is_on else None
        self.executors = self._build_executors()
        batching = BatcherConfig(**config.batching, verify_rule=verify_rule(config, cost))
        engines = [Engine(each, batching) for each in self.executors.executors]
        self.arrival = ArrivalOrder(self.executors.first_done, None) if config.rollout.order == "arrival" else None
        pace = self.predictor() if config.rollout.layout.switch else None
        ticks = step_ticks if pace is None else plan_ticks(pace, engines)
        self.workers = LocalWorkers(engines, config.rollout.deal, ticks, self.arrival)
        self.scoring = self._build_scoring()

    def _build_executors(self) -> SimulatedExecutorSet:
        """One for each worker; their plans are drawn in tracks of their own."""
        config, cost, phases = self._config, self._cost, self._phases
        num_workers, several, tp = config.num_workers, config.hosts.num > 1, config.rollout.tp

        def draw(track: str, plan: Any, result: Any, start_ns: int, end_ns: int) -> None:
            named = {"rows": plan.num_decoding, "steps": result.num_steps}
            phases.complete(track, "plan", start_ns / 1e9, end_ns / 1e9, **named)

        sync_s = cost.weight_sync_s(tp, rollout_devices_of(config))
        slowness = slownesses(config.hosts.num, config.simulate.host_spread, config.trainer.seed)
        executors = [
            SimulatedExecutor(
                self._layouts[tp],
                tp,
                self._workload.length,
                cost,
                self._clock,
                on_plan=partial(draw, "engine" if num_workers == 1 else f"engine {worker}"),
                layouts=self._layouts,
                sync_s=sync_s,
                wake_s=cost.efficiency.rollout_fixed_s,
                drafts=SimulatedDrafts.configured(config, self._workload),
                turn_end=None if self._turns is None else self._turns.end,
                slowness=slowness[worker // config.workers_per_group],
                call_s=HOST_CALL_S if several else 0.0,
                latency_s=HOST_LATENCY_S if several else 0.0,
            )
            for worker in range(num_workers)
        ]
        return SimulatedExecutorSet(executors, self._clock, sync_s)

    def _build_scoring(self) -> ScoringWorkers:
        """The reward workers of section `reward`, with those that tasks of section `simulate` have for themselves."""
        chosen, reward = self._config.simulate, self._config.reward
        tasks = tasks_of(self._config)
        own = {task.name: task.scoring.workers for task in tasks if task.scoring.workers}
        order = [task.name for task in tasks] if chosen.score_in_turn else []
        # a judge on the devices has no rule for when it runs, and no GPU shares itself out
        judged = {task.name: task.scoring.device_s for task in tasks if task.scoring.device_s}
        on_devices = DeviceScoring("judge", judged, self.executors.occupy)
        limits, timeouts = (reward.num_workers, reward.timeout_s), AdaptiveTimeouts.configured(self._config)
        return ScoringWorkers(self._workload, self._clock, self._phases, *limits, own, order, timeouts, on_devices)

    def conversation(self) -> Conversation | None:
        if self._turns is None:
            return None
        given = self._turns, self._config.environment.num_workers, self._clock, self._phases
        return conversation(*given, lambda: self.scoring.next_ns)

    def predictor(self) -> LatencyPredictor:
        return worker_predictor(self._config, self._cost, self.degrees)

    def concurrently(self) -> SimulatedConcurrently:
        return SimulatedConcurrently(self._clock)

    def gradient_streams(self, freed: Sequence[tuple[int, ...]]) -> Mapping[tuple[int, ...], SimulatedStream]:
        count, prepare = self.num_devices, partial(batch_preparation.prepared, self._config)
        streams: dict[tuple[int, ...], SimulatedStream] = {}
        for workers in freed:
            before = partial(self.executors.free_ns, workers)
            stream = SimulatedStream(self._cost, self._clock, count, count // 2, prepare, before)
            self.executors.beside.append(stream.occupy)
            streams[workers] = self._feeding(stream)
        return streams

    def index_builder(self) -> BlankIndexes:
        return BlankIndexes(clock=lambda: self._clock.now_s)

    def release_workers(self, workers: Sequence[int]) -> None:
        self.executors.release_some(workers)

    def wait_quiet(self) -> None:
        """Nothing: what runs on the devices takes them in simulated time."""

    def on_wait_quiet(self, wait: Callable[[], None]) -> None: ...

    def add_programs(self, programs: Sequence[Any], *, of_update: bool) -> None: ...

    def on_close(self, close: Callable[[], None]) -> None: ...


def build(
    config: Config,
    cost: CostModel,
    workload: ModelledWorkload,
    *,
    layouts: Mapping[int, Capacity] | None = None,
    timeline: Path | None = None,
    layout_log: LayoutLog | None = None,
    feeding: Callable[[SimulatedStream], Any] = lambda stream: stream,
    **callbacks: Any,
) -> Simulation:
    """Puts a simulated run together.

    Args:
      layouts: sizes of a worker by TP degree; by default from the configuration, with only weights beside the KV pool.
      timeline: the file to draw in. feeding: as in `SimulatedMachine`.
      callbacks: of `jaxrl.run.run.Run`: `on_step`, `save`, `stop` and the like.
    """
    if config.algorithm.adv_estimator == "gdpo":  # a simulated reward is one number
        config = config.replace(algorithm=config.algorithm.replace(adv_estimator="grpo"))
    layouts = layout_sizes(config, cost) if layouts is None else layouts
    clock = SimulatedClock()
    phases = SimulatedPhases(clock, timeline)
    machine = SimulatedMachine(config, cost, workload, layouts, clock, phases, feeding)
    trained = machine.num_devices - config.num_own_devices
    trainer, *critics = (SimulatedTrainer(cost, trained, clock) for _ in range(1 + config.has_critic))
    data, num_prompts = config.data, config.simulate.num_prompts or config.data.task_size
    given = num_prompts, data.max_prompt_length, data.seed, data.shuffle, data.source_quotas, data.reference_time_key
    prompts = SimulatedPrompts(workload, *given)
    evaluates = config.trainer.test_freq or config.trainer.val_before_train
    run = Run(
        config=config.replace(rollout=config.rollout.replace(stop=[])),  # stop strings need text, and there is none
        workers=machine.workers,
        executors=machine.executors,
        machine=machine,
        weights=lambda: [each.synced() for each in (trainer, *critics)],  # no weights, but their versions
        scoring=machine.scoring,
        text_of=lambda sample: f"({len(sample)} simulated tokens)",
        timeline=phases,
        rule=batch_rule(config),
        models=Models(trainer, critics[0] if critics else None),
        prompts=prompts,
        validation=prompts.held_out(config.data.val_size) if evaluates else (),
        total_steps=total_steps(config, num_prompts),
        stop_token_ids=(STOP_TOKEN,),
        num_devices=machine.num_devices,
        conversation=machine.conversation(),
        clock=lambda: clock.now_s,
        layout_log=layout_log,
        mechanisms=() if machine.arrival is None else (machine.arrival,),
        **callbacks,
    )
    return Simulation(run.loop(), run, clock, phases)


def slownesses(num_hosts: int, spread: float, seed: int) -> list[float]:
    """How many times as long a plan takes on each host as on the fastest: evenly from 1 to 1 + `spread`, in an order
    drawn with `seed`."""
    found = [1 + spread * i / max(num_hosts - 1, 1) for i in range(num_hosts)]
    random.Random(seed).shuffle(found)
    return found


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes Python collect cyclic garbage less often: a simulation holds many small objects for long, and each
    collection looks through them, which takes a tenth of its time (2026-11-22, 128 devices, 1,600 requests a step)."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
