"""Runs of `setups.Case` and their measurements.

Purpose: `run` simulates a case with jaxrl's own loop, engine, batcher, block manager and rules
(`jaxrl.commands.simulate.build`) and keeps a few numbers of each step. Pure but for the wall clock it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.loop import Hooks
from jaxrl.runtime.simulation import build
from jaxrl.sim.calibration import Calibration
from jaxrl.types import Group
from papers.setups import Case, configuration, models


@dataclass(slots=True)
class Steps:
    """What was measured, one value per step.

    `start_s` is the time of weights and of waking before a rollout; `train_s` is what is left of a step. Of the batch,
    `stale_share` counts tokens from earlier rollouts, `stale_samples` the responses that have some.
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
    wall_s: float = 0.0
    preemptions: int = 0

    def mean(self, name: str, where: Callable[[int], bool] = lambda _: True, skip: int = 0) -> float:
        """The mean over steps from `skip` on for which `where(index)` holds."""
        values = [value for i, value in enumerate(getattr(self, name)) if i >= skip and where(i)]
        return float(np.mean(values)) if values else float("nan")


def run(case: Case, calibration: Calibration) -> Steps:
    """Simulates a case."""
    cost, workload = models(case, calibration)
    found = Steps(case)
    drawn = 0

    def on_step(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        nonlocal drawn
        gen = measured.get("timing_s/gen", 0.0)
        reward = measured.get("timing_s/reward", 0.0)
        start = measured.get("timing_s/sync", 0.0)
        found.step_s.append(measured["timing_s/step"])
        found.start_s.append(start)
        found.gen_s.append(gen)
        found.reward_s.append(reward)
        found.train_s.append(measured["timing_s/step"] - gen - reward - start)
        found.long.append(bool(measured.get("rollout/long_round", 0.0)))
        found.longest.append(measured["response_length/max"])
        found.mean_tokens.append(measured["response_length/mean"])
        found.trained_tokens.append(sum(len(sample) for group in groups for sample in group.samples))
        found.stale_share.append(measured["training/off_policy/share"])
        samples = [sample for group in groups for sample in group.samples]
        newest = max(int(sample.versions[-1]) for sample in samples)
        found.stale_samples.append(sum(int(sample.versions[0]) < newest for sample in samples) / len(samples))
        found.drawn_tokens.append(simulation.executors.num_tokens - drawn)
        found.switches.append(int(measured.get("rollout/layout/switches", 0.0)))
        found.preemptions += int(measured.get("rollout/preemptions", 0.0))
        drawn = simulation.executors.num_tokens

    def ignored(*_: Any) -> None:
        return None

    hooks = Hooks(on_phase=ignored, on_step=on_step, on_eval=ignored, save=ignored, stop=lambda: False)
    simulation = build(configuration(case, calibration), cost, workload, hooks)
    began = time.perf_counter()
    simulation.loop.run()
    found.wall_s = time.perf_counter() - began
    return found
