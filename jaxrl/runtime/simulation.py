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
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config.options import total_steps
from jaxrl.loop import Hooks, Kept, Loop
from jaxrl.record.layouts import LayoutLog
from jaxrl.rewards.reward_metrics import RewardMetrics as VerdictTally
from jaxrl.runtime.backend import RolloutBackend
from jaxrl.runtime.history import HistorySession
from jaxrl.runtime.layout_session import LayoutSessions
from jaxrl.runtime.ranking import build_ranking
from jaxrl.runtime.round_end import Hosts
from jaxrl.runtime.rules import batch_rule
from jaxrl.runtime.simulated_history import PLATFORM, history_session
from jaxrl.runtime.simulated_hosts import LeadingBackend, SimulatedHosts
from jaxrl.runtime.simulated_machine import MachineParts
from jaxrl.runtime.streaming import GradientStream, StreamSession
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.pace import cheaper_move
from jaxrl.scheduling.rounds.adaptive_timeout import AdaptiveTimeouts
from jaxrl.scheduling.rounds.ranking_groups import RankingGroups
from jaxrl.scheduling.rounds.scale_down import halves
from jaxrl.scheduling.rounds.stream_pace import pace_of
from jaxrl.scheduling.tokens.paced import PacedWorkers
from jaxrl.scheduling.tokens.workers import Workers
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, SimulatedTogether
from jaxrl.sim.configured import layout_sizes, machine_sizes, num_devices_of, worker_predictor
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.stream import Logprobs, SimulatedStream
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.sim.workers import SimulatedWorkers
from jaxrl.sim.workload import Workload
from jaxrl.train import preparation
from jaxrl.types import Group, TrainBatch

STOP_TOKEN = 1  # the stop token of a response that is shorter than the limit


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, ready to go: `loop.run()`. `workers`, `executors`, `clock` and `layouts` are those of process 0;
    `hosts`: the others of several simulated hosts."""

    loop: Loop
    workers: Workers | PacedWorkers
    executors: SimulatedWorkers
    clock: SimulatedClock
    phases: SimulatedPhases
    layouts: LayoutSessions | None = None
    stream: StreamSession | None = None
    hosts: SimulatedHosts | None = None


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
    hosts: Hosts | None = None,
    clock: SimulatedClock | None = None,
) -> Simulation:
    """Puts a simulated run together.

    Args:
      cost, workload: the models.
      sizes: of a worker; by default those of the configuration, with only weights beside the KV pool.
      layouts: sizes by TP degree, if `rollout.layout` adapts; the default is made in the same way.
      timeline: where to draw; None: nowhere. layout_log: where switches are kept; None: nowhere.
      feeding: stands between the stream session and each stream, to compare other ways to feed it.
      hosts: the other processes, each with its part of the workers and a clock of its own; None: those of
        `config.hosts.num` but one are simulated here.
      clock: of this process; None: a new one.
    """
    sizes = machine_sizes(config, cost) if sizes is None else sizes
    clock = SimulatedClock() if clock is None else clock
    phases = SimulatedPhases(clock, timeline)
    timeouts = AdaptiveTimeouts.configured(config)
    if not config.rollout.layout.adapts:
        layouts = {}
    layouts = layout_sizes(config, cost) if layouts is None else layouts
    process = 0 if hosts is None else hosts.stream.process
    num_processes = config.hosts.num if hosts is None else hosts.stream.num_processes
    parts = MachineParts(config, cost, workload, sizes, layouts, timeouts, num_processes)
    own = parts.host(process, clock, phases, layout_log)
    others = parts.others(clock, phases) if hosts is None and num_processes > 1 else None
    workers = own.workers() if num_processes == 1 else own.timed_workers(others)
    total = _num_devices(config, sizes)
    trainer, *critics = _trainers(config, cost, total - config.rollout.num_devices, clock)
    stream = _stream(config, cost, clock, phases, workers, own.executors, total, parts.pace, feeding)
    history = history_session(config, clock)
    kept: dict[str, Any] = {"layouts": own.sessions, "stream": stream, "history": history, "timeouts": timeouts}
    backend = (RolloutBackend if others is None else partial(LeadingBackend, others))(
        workers,
        own.executors,
        own.scoring,
        lambda sample: f"({len(sample)} simulated tokens)",
        lambda: [each.synced() for each in (trainer, *critics)],  # no weights to give; they are told of it
        on_progress=on_progress,
        interrupted=hooks.stop,
        **_around(config, clock, phases, hosts),
        **kept,
    )
    ranking = _ranking(config, cost, history, sizes, backend, own.executors)
    kept |= {"layouts": _of_all_hosts(own.sessions, others), "ranking": ranking}
    loop = _loop(config, workload, backend, (trainer, *critics), phases, hooks, total, stream, ranking, kept)
    return Simulation(loop, workers, own.executors, clock, phases, own.sessions, stream, others)


def _around(config: Config, clock: SimulatedClock, phases: SimulatedPhases, hosts: Hosts | None) -> dict[str, Any]:
    """What a backend has around it; what simulates the other hosts brings `hosts` itself."""
    found = {"clock": lambda: clock.now_s, "timeline": phases, "tally": VerdictTally.configured(config)}
    return found if hosts is None else found | {"hosts": hosts}


def _of_all_hosts(own: LayoutSessions | None, others: SimulatedHosts | None) -> LayoutSessions | None:
    """The layouts of process 0 with those of the others, as they are kept: each goes on as it was."""
    if own is None or others is None:
        return own
    sessions = [session for host in others.others if host.layouts for session in host.layouts.sessions]
    return LayoutSessions([*own.sessions, *sessions])


def _num_devices(config: Config, sizes: MachineSizes) -> int:
    """Of all workers, of `sizes` each, and of the trainer's own."""
    own = config.rollout.num_devices
    return num_devices_of(config) if own else sizes.num_devices * config.num_workers


def _trainers(config: Config, cost: CostModel, num_devices: int, clock: SimulatedClock) -> list[SimulatedTrainer]:
    """Of the policy, and of the critic where there is one."""
    return [SimulatedTrainer(cost, num_devices, clock) for _ in range(1 + config.has_critic)]


def _ranking(
    config: Config,
    cost: CostModel,
    history: HistorySession | None,
    sizes: MachineSizes,
    backend: RolloutBackend,
    executors: SimulatedWorkers,
) -> RankingGroups | None:
    """What ranks the rounds of `backend`, whose workers have `sizes` each; None: nothing does."""
    if not config.rollout.ranking_groups.enable:
        return None
    assert history is not None, "ranks by lengths that nothing keeps"
    predictor = worker_predictor(config, cost, [sizes.tp])
    ranking, by = build_ranking(config, history.store, backend.direct, predictor)
    backend.rank(ranking, executors, by)
    return ranking


def _stream(
    config: Config,
    cost: CostModel,
    clock: SimulatedClock,
    phases: SimulatedPhases,
    workers: Workers | PacedWorkers,
    executors: SimulatedWorkers,
    num_devices: int,
    pace: LatencyPredictor | None,
    feeding: Callable[[GradientStream], GradientStream],
) -> StreamSession | None:
    """The stream trainer on either half of so many devices; None: there is none."""
    if not config.trainer.stream.enable:
        return None
    assert isinstance(workers, Workers)

    def prepare(groups: Sequence[Group], step: int, logprobs: Logprobs) -> TrainBatch:
        return preparation.prepared(config, groups, step, logprobs)

    def one() -> GradientStream:
        return feeding(SimulatedStream(cost, clock, num_devices, num_devices // 2, prepare))

    streams = {freed: one() for freed in halves(len(workers.engines))}
    options, release = config.trainer.stream, executors.release_some
    rate = pace_of(options.pace, PLATFORM)
    by = partial(cheaper_move, pace) if pace is not None and pace.profile.switches else "recompute"
    return StreamSession(options, workers, streams, release, rate, drawing=phases, clock=lambda: clock.now_s, by=by)


def _loop(
    config: Config,
    workload: Workload,
    backend: RolloutBackend,
    trainers: Sequence[SimulatedTrainer],
    phases: SimulatedPhases,
    hooks: Hooks,
    num_devices: int,
    stream: StreamSession | None,
    ranking: RankingGroups | None,
    kept: Mapping[str, Kept | None],
) -> Loop:
    """The loop over prompts of `workload`, on a machine of so many devices."""
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
    return Loop(
        # stop strings need text, and there is none
        replace(config, rollout=replace(config.rollout, stop=[])),
        prompts,
        prompts.held_out(data.val_size) if trained.test_freq or trained.val_before_train else (),
        backend,
        trainers[0],
        phases,
        hooks,
        rule=batch_rule(config),
        stop_token_ids=(STOP_TOKEN,),
        total_steps=total_steps(config, num_prompts),
        num_devices=num_devices,
        together=SimulatedTogether(phases.clock) if config.rollout.num_devices else None,
        stream=stream,
        critic=trainers[1] if len(trainers) > 1 else None,
        ranking=ranking,
        kept={name: each for name, each in kept.items() if each is not None},
    )


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
