"""Runs of `setups.Case` and their measurements.

Purpose: `run` simulates a case with jaxrl's own loop, engine, batcher, block manager and rules
(`jaxrl.runtime.simulation.build`) and keeps a few numbers of each step. Pure but for the wall clock it took.

A stream trainer changes no group, and does nothing in short rounds. So `run_together` runs a case without it once, and
of the same with it all other rounds, each from the state that the first had left; what the rule has learned of lengths
goes on from one to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from jaxrl.config import Config
from jaxrl.mechanisms.stream_trainer import GradientStream, StreamTrainer
from jaxrl.record.state import dump_state, load_state
from jaxrl.runtime.simulation import Simulation, build
from jaxrl.types import Group
from papers.calibration import Calibration
from papers.fetch import SingleFetch
from papers.setups import Case, configuration, models


@dataclass(slots=True)
class Steps:
    """What was measured, one value per step.

    `start_s` is the time of weights and of waking before a rollout; `train_s` is what is left of a step. Of the batch,
    `stale_share` counts tokens from earlier rollouts, `stale_samples` the responses that have some. `streamed` is the
    share of its prompts whose gradients were computed beside the rollout, `freed_at` the share of samples that were
    done when devices were freed (0: none were). With ranking groups, `moved` is the share of the responses that went to
    another worker, `idle` that of the workers' time in which they had nothing to do; with speculation, `accepted` is of
    the drafted tokens, `drafted` of all tokens, and `per_step` what a row gains in a step. `cut_off` counts test cases
    that their time limit ended, `scoring_s` adds up the seconds of all scoring.
    """

    case: Case
    step_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    gen_s: list[float] = field(default_factory=list)
    reward_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    long: list[bool] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    mean_tokens: list[float] = field(default_factory=list)
    drawn_tokens: list[int] = field(default_factory=list)  # by the engine, whatever becomes of them
    trained_tokens: list[int] = field(default_factory=list)
    stale_share: list[float] = field(default_factory=list)
    stale_samples: list[float] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)  # of the layout
    degrees: list[float] = field(default_factory=list)  # that rounds ended in
    streamed: list[float] = field(default_factory=list)
    freed_at: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    per_step: list[float] = field(default_factory=list)
    cut_off: list[float] = field(default_factory=list)
    scoring_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    preemptions: int = 0

    def mean(self, name: str, where: Callable[[int], bool] = lambda _: True, skip: int = 0) -> float:
        """The mean over steps from `skip` on for which `where(index)` holds."""
        values = [value for i, value in enumerate(getattr(self, name)) if i >= skip and where(i)]
        return float(np.mean(values)) if values else float("nan")

    def take(self, other: Steps, index: int) -> None:
        """One more step, as it was in `other`."""
        for each in fields(self):
            if isinstance(getattr(self, each.name), list):
                getattr(self, each.name).append(getattr(other, each.name)[index])

    def add(self, measured: Mapping[str, float], groups: Sequence[Group], drawn_tokens: int) -> None:
        """One more step, from its metrics, its groups, and the tokens that were drawn in it."""
        gen = measured.get("timing_s/gen", 0.0)
        reward = measured.get("timing_s/reward", 0.0)
        start = measured.get("timing_s/sync", 0.0)
        self.step_s.append(measured["timing_s/step"])
        self.start_s.append(start)
        self.gen_s.append(gen)
        self.reward_s.append(reward)
        self.train_s.append(measured["timing_s/step"] - gen - reward - start)
        self.long.append(bool(measured.get("rollout/long_round", 0.0)))
        self.longest.append(measured["response_length/max"])
        self.mean_tokens.append(measured["response_length/mean"])
        samples = [sample for group in groups for sample in group.samples]
        newest = max(int(sample.versions[-1]) for sample in samples)
        self.trained_tokens.append(sum(map(len, samples)))
        self.stale_share.append(measured["training/off_policy/share"])
        self.stale_samples.append(sum(int(sample.versions[0]) < newest for sample in samples) / len(samples))
        self.drawn_tokens.append(drawn_tokens)
        self.switches.append(int(measured.get("rollout/layout/switches", 0.0)))
        self.degrees.append(measured.get("rollout/layout/final_tp", float(self.case.degree)))
        self.streamed.append(measured.get("actor/streamed_share", 0.0))
        self.freed_at.append(measured.get("rollout/scale_down/done_share", 0.0))
        self.moved.append(measured.get("rollout/ranking/moved_share", 0.0))
        self.idle.append(measured.get("rollout/ranking/idle_share", 0.0))
        self.accepted.append(measured.get("rollout/spec/accept_rate", 0.0))
        self.drafted.append(measured.get("rollout/spec/drafted_share", 0.0))
        self.per_step.append(measured.get("rollout/spec/tokens_per_step", 1.0))
        self.cut_off.append(measured.get("reward/code/cut_off", 0.0))
        self.scoring_s.append(measured.get("reward/seconds", 0.0))
        self.preemptions += int(measured.get("rollout/preemptions", 0.0))


def run(case: Case, calibration: Calibration, on_boundary: Callable[[int, str], None] | None = None) -> Steps:
    """Simulates a case; `on_boundary` gets the state after each step."""
    found, config = Steps(case), configuration(case, calibration)

    def save(step: int, state: dict[str, Any]) -> None:
        if on_boundary is not None:
            on_boundary(step, dump_state(state))

    if on_boundary is not None:
        config = config.replace(trainer=config.trainer.replace(save_freq=1))
    began = time.perf_counter()
    simulation = _built(config, calibration, found, save)
    simulation.loop.run()
    found.wall_s = time.perf_counter() - began
    return found


def run_together(cases: Sequence[Case], calibration: Calibration) -> list[Steps]:
    """Simulates cases that differ in their stream trainer alone, the first without any."""
    first, *others = cases
    if not others:
        return [run(first, calibration)]
    states: dict[int, str] = {}
    base = run(first, calibration, states.__setitem__)
    return [base, *(_with_stream(case, base, states, calibration) for case in others)]


def _with_stream(case: Case, base: Steps, states: Mapping[int, str], calibration: Calibration) -> Steps:
    """The steps of `base`, all but its short rounds run again with a stream trainer. `states`: after each step."""
    found, learned, began = Steps(case), dict[str, Any](), time.perf_counter()
    config = configuration(case, calibration)
    for index, is_long in enumerate(base.long):
        if case.rule == "tail" and not is_long:
            found.take(base, index)
            continue
        only = config.replace(trainer=config.trainer.replace(total_training_steps=index + 1))
        simulation = _built(only, calibration, found)
        if index:
            simulation.loop.load_host_state(load_state(states[index], "what this run has left") | learned)
        simulation.loop.run()
        learned = {"stream": simulation.run.mechanism(StreamTrainer).state_dict()}
        assert found.trained_tokens[index] == base.trained_tokens[index], "a stream trainer changes no group"
    found.wall_s = time.perf_counter() - began
    return found


def _built(
    config: Config,
    calibration: Calibration,
    found: Steps,
    save: Callable[[int, dict[str, Any]], None] = lambda *_: None,
) -> Simulation:
    """A simulation whose steps go to `found`."""
    case, drawn = found.case, 0

    def on_step(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        nonlocal drawn
        executors: Any = simulation.run.executors
        found.add(measured, groups, executors.num_tokens - drawn)
        drawn = executors.num_tokens

    feeding = partial(_feeding, case)
    simulation = build(config, *models(case, calibration), feeding=feeding, on_step=on_step, save=save)
    return simulation


def _feeding(case: Case, stream: GradientStream) -> GradientStream:
    """What stands for a stream trainer in this case."""
    most = max(round(case.fetch * case.num_prompts), 1)
    return SingleFetch(stream, most) if case.fetch else stream
