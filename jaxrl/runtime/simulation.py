"""A simulated run put together: the loop, engine, batcher and rules of a real run on modelled devices.

Purpose: `build` makes a simulated run of a configuration, a cost model and a workload. Never imports jax.

Source: docs/architecture.md. Departures from a real run: prompts have lengths but no text, and their order is not
grain's; losses and gradients do not exist; evaluation draws prompts beside the training ones, `data.val_size` of them;
weights for devices of the rollout's own are charged as if they lay there already, split. Gradients beside the rollout
need no journal, because a simulated clock decides the same again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from jaxrl.config import Config
from jaxrl.config.options import total_steps
from jaxrl.loop import Hooks, Job, Loop
from jaxrl.mechanisms.reward_timeouts.build import build as build_timeouts
from jaxrl.mechanisms.simulated_parts import SimulatedParts
from jaxrl.mechanisms.stream_trainer.session import GradientStream
from jaxrl.mechanisms.table import batch_rule, is_timeless, of_simulation
from jaxrl.record.layouts import LayoutLog
from jaxrl.rewards.reward_metrics import RewardMetrics
from jaxrl.runtime.backend import RolloutBackend, Surroundings
from jaxrl.runtime.simulated_machine import SimulatedMachine
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.configured import layout_sizes, machine_sizes, num_devices_of
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.sim.workload import Workload
from jaxrl.train.training_step import Models

M = TypeVar("M", bound=Mechanism)
STOP_TOKEN = 1  # the stop token of a response that is shorter than the limit


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, ready to go: `loop.run()`."""

    loop: Loop
    workers: LocalWorkers
    executors: SimulatedExecutorSet
    clock: SimulatedClock
    phases: SimulatedPhases
    mechanisms: Sequence[Mechanism] = ()

    def mechanism(self, kind: type[M]) -> M:
        """The mechanism of a class, which the run must have."""
        return next(each for each in self.mechanisms if isinstance(each, kind))


def build(
    config: Config,
    cost: CostModel,
    workload: Workload,
    hooks: Hooks,
    *,
    sizes: MachineSizes | None = None,
    layouts: Mapping[int, MachineSizes] | None = None,
    timeline: Path | None = None,
    layout_log: LayoutLog | None = None,
    on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None,
    feeding: Callable[[GradientStream], GradientStream] = lambda stream: stream,
) -> Simulation:
    """Puts a simulated run together.

    Args:
      cost, workload: the models.
      sizes: of a worker; by default those of the configuration, with only weights beside the KV pool.
      layouts: sizes by TP degree, if `rollout.layout` adapts; the default is made in the same way.
      timeline: where to draw; None: nowhere. layout_log: where switches are kept; None: nowhere.
      feeding: stands between the stream session and each stream, to compare other ways to feed it.
    """
    if config.algorithm.adv_estimator == "gdpo":  # a simulated reward is one number
        config = replace(config, algorithm=replace(config.algorithm, adv_estimator="grpo"))
    sizes = machine_sizes(config, cost) if sizes is None else sizes
    clock = SimulatedClock()
    phases = SimulatedPhases(clock, timeline)
    timeouts = build_timeouts(config)
    if not config.rollout.layout.adapts:
        layouts = {}
    layouts = layout_sizes(config, cost) if layouts is None else layouts
    limits = None if timeouts is None else timeouts.timeouts
    machine = SimulatedMachine(config, cost, workload, sizes, layouts, limits, clock, phases, layout_log)
    workers, executors = machine.workers, machine.executors
    total = _num_devices(config, sizes)
    trainer, *critics = _trainers(config, cost, total - config.num_own_devices, clock)
    pieces = SimulatedParts(
        config,
        cost,
        workload,
        clock,
        phases,
        workers,
        executors,
        sizes.tp,
        total,
        machine.pace,
        is_timeless(config),
        machine.sessions,
        timeouts,
        lambda: machine.scoring.next_ns,
        feeding,
    )
    mechanisms = [*of_simulation(pieces), *([] if machine.arrival is None else [machine.arrival])]
    backend = RolloutBackend(
        workers,
        executors,
        machine.scoring,
        lambda sample: f"({len(sample)} simulated tokens)",
        lambda: [each.synced() for each in (trainer, *critics)],  # no weights to give; they are told of it
        mechanisms,
        Surroundings(
            clock=lambda: clock.now_s,
            timeline=phases,
            on_progress=on_progress,
            interrupted=hooks.stop,
            tally=RewardMetrics.configured(config),
        ),
    )
    job = _job(config, workload, total)
    models = Models(trainer, critics[0] if critics else None)
    config = replace(config, rollout=replace(config.rollout, stop=[]))  # they need text, and there is none
    loop = Loop(config, job, batch_rule(config), backend, models, phases, hooks, mechanisms)
    return Simulation(loop, workers, executors, clock, phases, mechanisms)


def _num_devices(config: Config, sizes: MachineSizes) -> int:
    """Of all workers, of `sizes` each, and of the trainer's own."""
    own = config.rollout.num_devices
    return num_devices_of(config) if own else sizes.num_devices * config.num_workers


def _trainers(config: Config, cost: CostModel, num_devices: int, clock: SimulatedClock) -> list[SimulatedTrainer]:
    """Of the policy, and of the critic where there is one."""
    return [SimulatedTrainer(cost, num_devices, clock) for _ in range(1 + config.has_critic)]


def _job(config: Config, workload: Workload, num_devices: int) -> Job:
    """Prompts of `workload`, on a machine of so many devices."""
    data, trained = config.data, config.trainer
    num_prompts = config.simulate.num_prompts or data.task_size
    prompts = SimulatedPrompts(
        workload,
        num_prompts,
        data.max_prompt_length,
        data.seed,
        data.shuffle,
        data.source_quotas,
        data.reference_time_key,
    )
    held_out = prompts.held_out(data.val_size) if trained.test_freq or trained.val_before_train else ()
    return Job(prompts, held_out, total_steps(config, num_prompts), (STOP_TOKEN,), num_devices)


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
