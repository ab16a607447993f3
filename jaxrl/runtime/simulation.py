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
from jaxrl.rewards.tally import VerdictTally
from jaxrl.runtime.backend import RolloutBackend
from jaxrl.runtime.history import HistorySession
from jaxrl.runtime.layout_session import LayoutSessions, layout_sessions
from jaxrl.runtime.ranking import build_ranking
from jaxrl.runtime.round_end import Hosts
from jaxrl.runtime.rules import batch_rule, batcher_config, draft_config, workers_of
from jaxrl.runtime.simulated_history import PLATFORM, drafting_of, history_session, step_costs
from jaxrl.runtime.streaming import GradientStream, StreamSession
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.pace import PredictedTicks, cheaper_move
from jaxrl.scheduling.rounds.adaptive_timeout import AdaptiveTimeouts
from jaxrl.scheduling.rounds.ranking_groups import RankingGroups
from jaxrl.scheduling.rounds.scale_down import halves
from jaxrl.scheduling.tokens.draft_rule import DraftConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.paced import PacedWorkers
from jaxrl.scheduling.tokens.workers import Workers, step_ticks
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, SimulatedTogether
from jaxrl.sim.configured import (
    layout_predictor,
    layout_sizes,
    machine_sizes,
    num_devices_of,
    worker_predictor,
)
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes, SimulatedExecutor
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.stream import Logprobs, SimulatedStream
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.sim.workers import SimulatedWorkers
from jaxrl.sim.workload import Workload
from jaxrl.train import preparation
from jaxrl.types import Group, TrainBatch

STOP_TOKEN = 1  # the stop token of a response that is shorter than the limit


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, ready to go: `loop.run()`."""

    loop: Loop
    workers: Workers | PacedWorkers
    executors: SimulatedWorkers
    clock: SimulatedClock
    phases: SimulatedPhases
    layouts: LayoutSessions | None = None
    stream: StreamSession | None = None


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
) -> Simulation:
    """Puts a simulated run together.

    Args:
      cost, workload: the models.
      sizes: of a worker; by default those of the configuration, with only weights beside the KV pool.
      layouts: sizes by TP degree, if `rollout.layout` adapts; the default is made in the same way.
      timeline: where to draw; None: nowhere. layout_log: where switches are kept; None: nowhere.
      feeding: stands between the stream session and each stream, to compare other ways to feed it.
      hosts: the other processes, each with its part of the workers and a clock of its own; None: there are none.
    """
    sizes = machine_sizes(config, cost) if sizes is None else sizes
    adapts = config.rollout.layout.adapts
    layouts = (layout_sizes(config, cost) if layouts is None else layouts) if adapts else {}
    clock = SimulatedClock()
    phases = SimulatedPhases(clock, timeline)
    drafts = draft_config(config, PLATFORM, step_costs(config, cost))
    executors = _executors(config, cost, workload, clock, phases, sizes, layouts, drafts, hosts)
    engines = [Engine(each, batcher_config(config, drafts), batcher=LockstepBatcher) for each in executors.executors]
    sessions = _layouts(config, cost, tuple(layouts), engines, clock, phases, layout_log) if adapts else None
    total, pace = _num_devices(config, sizes), layout_predictor(config, cost, tuple(layouts))
    trainer, *critics = _trainers(config, cost, total - config.rollout.num_devices, clock)
    ticks = step_ticks if pace is None else PredictedTicks(pace, engines)
    workers = workers_of(config, engines, ticks, hosts.stream.process if hosts else 0)
    stream = _stream(config, cost, clock, phases, workers, executors, total, pace, feeding)
    history, timeouts = history_session(config, clock), AdaptiveTimeouts.configured(config)
    backend = RolloutBackend(
        workers,
        executors,
        _scoring(config, workload, clock, phases, timeouts, executors),
        lambda sample: f"({len(sample)} simulated tokens)",
        lambda: [each.synced() for each in (trainer, *critics)],  # no weights to give; they are told of it
        clock=lambda: clock.now_s,
        timeline=phases,
        on_progress=on_progress,
        interrupted=hooks.stop,
        layouts=sessions,
        stream=stream,
        history=history,
        timeouts=timeouts,
        tally=VerdictTally.configured(config),
        hosts=hosts,
    )
    ranking = _ranking(config, cost, history, sizes, backend, executors)
    kept = {"layouts": sessions, "stream": stream, "history": history, "ranking": ranking, "timeouts": timeouts}
    loop = _loop(config, workload, backend, (trainer, *critics), phases, hooks, total, stream, ranking, kept)
    return Simulation(loop, workers, executors, clock, phases, sessions, stream)


def _num_devices(config: Config, sizes: MachineSizes) -> int:
    """Of all workers, of `sizes` each, and of the trainer's own."""
    own = config.rollout.num_devices
    return num_devices_of(config) if own else sizes.num_devices * config.rollout.num_workers


def _trainers(config: Config, cost: CostModel, num_devices: int, clock: SimulatedClock) -> list[SimulatedTrainer]:
    """Of the policy, and of the critic where there is one."""
    return [SimulatedTrainer(cost, num_devices, clock) for _ in range(1 + config.has_critic)]


def _layouts(
    config: Config,
    cost: CostModel,
    degrees: Sequence[int],
    engines: Sequence[Engine],
    clock: SimulatedClock,
    phases: SimulatedPhases,
    log: LayoutLog | None,
) -> LayoutSessions:
    """The sessions of the workers' layouts."""
    predictors = [layout_predictor(config, cost, degrees) for _ in engines]
    kept = (lambda: clock.now_s, phases, log, None)
    return layout_sessions(config.rollout.layout, degrees, config.rollout.tp, engines, predictors, *kept)


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


def _executors(
    config: Config,
    cost: CostModel,
    workload: Workload,
    clock: SimulatedClock,
    phases: SimulatedPhases,
    sizes: MachineSizes,
    layouts: Mapping[int, MachineSizes],
    drafts: DraftConfig | None,
    hosts: Hosts | None,
) -> SimulatedWorkers:
    """One for each worker of this process; their plans are drawn in tracks of their own."""
    num_workers = config.rollout.num_workers // (1 if hosts is None else hosts.stream.num_processes)

    def draw(track: str, plan: Any, result: Any, start_ns: int, end_ns: int) -> None:
        drawn = {"rows": len(plan.decode), "steps": result.num_steps}
        phases.complete(track, "plan", start_ns / 1e9, end_ns / 1e9, **drawn)

    sync_s = cost.weight_sync_s(sizes.tp, sizes.num_devices * config.rollout.num_workers)
    wake_s, host_s = cost.rollout_fixed_s(), config.simulate.host_s
    drafting = None if drafts is None else drafting_of(config, workload, drafts)
    tracks = ["engine"] if num_workers == 1 else [f"engine {worker}" for worker in range(num_workers)]
    return SimulatedWorkers(
        [
            SimulatedExecutor(
                sizes,
                workload.length,
                cost,
                clock,
                host_s,
                on_plan=partial(draw, track),
                layouts=layouts,
                sync_s=sync_s,
                wake_s=wake_s,
                drafting=drafting,
            )
            for track in tracks
        ],
        clock,
        sync_s,
    )


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
    by = partial(cheaper_move, pace) if pace is not None and pace.profile.switches else "recompute"
    return StreamSession(options, workers, streams, release, drawing=phases, clock=lambda: clock.now_s, by=by)


def _scoring(
    config: Config,
    workload: Workload,
    clock: SimulatedClock,
    phases: SimulatedPhases,
    timeouts: AdaptiveTimeouts | None,
    executors: SimulatedWorkers,
) -> ScoringWorkers:
    """The reward workers of section `reward`, with those that tasks of section `simulate` have for themselves."""
    chosen, reward = config.simulate, config.reward
    tasks = chosen.tasks or [chosen.task]
    own = {task.name: task.scoring.workers for task in tasks if task.scoring.workers}
    order = [task.name for task in tasks] if chosen.score_in_turn else []
    limits = reward.num_workers, reward.timeout_s
    judged = {task.name: task.scoring.device_s for task in tasks if task.scoring.device_s}
    return ScoringWorkers(workload, clock, phases, *limits, own, order, timeouts, judged, executors.occupy)


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
        workload, num_prompts, data.max_prompt_length, data.seed, data.shuffle, data.source_quotas
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
