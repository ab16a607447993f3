"""RhymeRL's pipeline from lengths and costs alone: rounds, workers, updates, without engine, batcher or blocks.

Purpose: a check of the simulator, and a quick look at other readings. Prompts, lengths, ranks and the workers of the
ranking groups are those of jaxrl's own pure code; what is worked out here is when a worker may begin and when its last
response ends.

Source: RhymeRL §4.2, §6.2, Fig. 10. Round r is drawn with the weights of update r - 2. Without ranking groups it begins
when round r - 1 has ended on all workers; with them a worker begins with its part when its own part of round r - 1 has
ended.

Departures: every row of a worker starts at once, so a plan is left only when its steps are over; no response moves, and
none is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jaxrl.mechanisms.ranking_groups.rule import Ranking
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.rounds.history import PastLengths
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.types import SampleKey
from papers.calibration import Calibration
from papers.cases import EPOCH_STEPS, Case, configuration, models
from papers.closed_form import PROMPT_TOKENS, drained, train_s


class Past(dict[int, PastLengths]):
    """`jaxrl.mechanisms.ranking_groups.rule.LengthHistory` of the responses drawn so far."""

    lengths = dict.get

    def growths(self) -> np.ndarray:
        return np.array([each.growth for each in self.values() if each.before])

    def take(self, index: int, lengths: Sequence[int]) -> None:
        before = self[index].median if index in self else 0.0
        self[index] = PastLengths(0, float(np.median(lengths)), float(np.mean(lengths)), max(lengths), before)


def step_ends(case: Case, calibration: Calibration) -> list[float]:
    """Seconds at which each update of a case has ended."""
    config, (cost, workload) = configuration(case, calibration), models(case, calibration)
    rollout, num_workers = config.rollout, config.rollout.num_workers
    prompts = SimulatedPrompts(workload, config.simulate.num_prompts, PROMPT_TOKENS, case.seed)
    past: Any = Past()
    ranking = Ranking(
        rollout.ranking_groups,
        num_workers,
        past,
        lambda rows, context: cost.decode_step_s(case.degree, max(round(rows), 1), context),
    )
    ranks, sync_s = rollout.ranking_groups.enable, cost.weight_sync_s(case.degree, rollout.num_devices)
    updates: list[float] = []
    round_s, parts_s = 0.0, np.zeros(num_workers)  # when the newest round ended, and each worker's part of it
    for step in range(1, case.steps + 1):
        launches = [
            Launch(each, tuple(SampleKey(each.epoch, each.index, i) for i in range(rollout.n)))
            for each in prompts.next(case.num_prompts)
        ]
        began = ranking.begin(launches, step) if ranks else launches
        version = max(step - 1, 1)  # of the responses' first step: those of a one-step-off run
        free_s = parts_s if ranks and ranking.now is not None else np.full(num_workers, round_s)
        parts_s = np.maximum(free_s, sync_s + (updates[-2] if len(updates) > 1 else 0.0))
        for worker, keys in enumerate(_parts([each for each in began if isinstance(each, Launch)], num_workers)):
            if keys:
                parts_s[worker] += drained(cost, case.degree, [workload.length(key, version) for key in keys])[-1]
        round_s = float(parts_s.max())
        whole = {each.prompt.index: [workload.length(key, version) for key in each.keys] for each in launches}
        took = train_s(cost, case.num_devices - case.rollout_devices, list(whole.values()), forwards=1)
        updates.append(max(round_s, updates[-1] if updates else 0.0) + took)
        ranking.learned(took, 1.0)
        ranking.end()
        for index, lengths in whole.items():
            past.take(index, lengths)
    return updates


_PIPELINES = ("off", "naive", "two_tier")


def readings(cases: Sequence[Case], calibration: Calibration) -> dict[str, list[list[float]]]:
    """By row of the page and task, for each seed: the speed-up over the row before, without speculation, as calibrated
    and with no outliers among the responses."""
    values = calibration["rhymerl_machine"]
    certain = {**calibration, "rhymerl_machine": {**values, "outlier_share": 0.0}}
    found: dict[str, list[list[float]]] = {}
    for name, used in (("as calibrated", calibration), ("no outliers", certain)):
        for task in dict.fromkeys(case.tasks[0] for case in cases):
            chosen = [case for case in cases if case.tasks == (task,) and not case.speculation]
            seconds = [[mean_step_s(c, used) for c in chosen if c.pipeline == pipeline] for pipeline in _PIPELINES]
            found[f"{name}, {task}"] = [[a / b for a, b in zip(*pair, strict=True)] for pair in pairwise(seconds)]
    return found


def mean_step_s(case: Case, calibration: Calibration) -> float:
    """Seconds of a step, from the second epoch on."""
    ends = step_ends(case, calibration)
    return (ends[-2] - ends[EPOCH_STEPS - 1]) / (len(ends) - 1 - EPOCH_STEPS)


def _parts(launches: Sequence[Launch], num_workers: int) -> list[list[SampleKey]]:
    """The responses of each worker; those that were not given one go prompt by prompt."""
    found: list[list[SampleKey]] = [[] for _ in range(num_workers)]
    for place, launch in enumerate(launches):
        for i, key in enumerate(launch.keys):
            found[launch.workers[i] if launch.workers else place % num_workers].append(key)
    return found
