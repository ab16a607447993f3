"""RhymeRL's pipeline from lengths and costs alone: rounds, workers, updates, without engine, batcher or blocks.

Purpose: a check of the simulator, and a quick look at other readings. Prompts, lengths, ranks, the workers of the
ranking groups and the steps that verify drafts are those of jaxrl's own pure code; what is worked out here is when a
worker may begin and when its last response ends.

Source: RhymeRL §4.2, §6.2, Fig. 10. Round r is drawn with the weights of update r - 2. Without ranking groups it begins
when round r - 1 has ended on all workers; with them a worker begins with its part when its own part of round r - 1 has
ended.

Departures: every row of a worker starts at once, so a plan is left only when its steps are over; no response moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.mechanisms.ranking_groups.rule import Ranking
from jaxrl.mechanisms.speculation.simulated import SimulatedDrafts
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.sim.cost_model import CostModel, TrainLoad, causal_pairs
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.verification import verify
from jaxrl.types import Prompt, SampleKey
from papers.calibration import Calibration
from papers.closed_form import PROMPT_TOKENS, drain
from papers.setups import EPOCH_STEPS, Case, configuration, drafting_of, models


@dataclass(frozen=True, slots=True)
class Lengths:
    """`jaxrl.mechanisms.ranking_groups.rule.PastLengths`."""

    median: float
    mean: float
    longest: int


class Past:
    """`jaxrl.mechanisms.ranking_groups.rule.LengthHistory` of the responses drawn so far."""

    def __init__(self) -> None:
        self._last: dict[int, Lengths] = {}
        self._growths: dict[int, float] = {}

    def lengths(self, index: int) -> Lengths | None:
        return self._last.get(index)

    def growths(self) -> np.ndarray:
        return np.array(list(self._growths.values()))

    def add(self, index: int, lengths: Sequence[int]) -> None:
        now, before = Lengths(float(np.median(lengths)), float(np.mean(lengths)), max(lengths)), self._last.get(index)
        if before is not None:
            self._growths[index] = now.median / before.median
        self._last[index] = now


@dataclass(slots=True)
class Pipeline:
    """When things end, in seconds: updates and rounds by step, and by worker its part of the newest round."""

    updates: list[float]
    rounds: list[float]
    parts: np.ndarray

    def begins_s(self, sync_s: float, is_ahead: bool) -> np.ndarray:
        """When each worker may begin with the next round."""
        weights_s = self.updates[-2] + sync_s if len(self.updates) > 1 else sync_s
        free_s = self.parts if is_ahead else np.full(len(self.parts), self.rounds[-1])
        return np.maximum(free_s, weights_s)


def step_ends(case: Case, calibration: Calibration) -> list[float]:
    """Seconds at which each update of a case has ended."""
    config, (cost, workload) = configuration(case, calibration), models(case, calibration)
    rollout, num_workers = config.rollout, config.rollout.num_workers
    prompts = SimulatedPrompts(workload, config.simulate.num_prompts, PROMPT_TOKENS, case.seed)
    past: Any = Past()
    step_s = _step_s(cost, case.degree)
    ranking = Ranking(rollout.ranking_groups, num_workers, past, step_s)
    drafting = drafting_of(case, workload) if rollout.speculation.enable else None
    sync_s = cost.weight_sync_s(case.degree, rollout.num_devices)
    times = Pipeline([], [0.0], np.zeros(num_workers))
    gained = 1.0
    for step in range(1, case.steps + 1):
        drawn = prompts.next(case.num_prompts)
        launches = [Launch(each, _keys(each, rollout.n)) for each in drawn]
        ranks = rollout.ranking_groups.enable
        began = ranking.begin(launches, step) if ranks else launches
        placed = [each for each in began if isinstance(each, Launch)]
        version = max(step - 1, 1)  # of the responses' first step: those of a one-step-off run
        parts = _parts(placed, num_workers)
        begins = times.begins_s(sync_s, ranks and ranking.now is not None)
        tokens_per_step = []
        for worker, keys in enumerate(parts):
            lengths = [workload.length(key, version) for key in keys]
            has_history = past.lengths(keys[0].prompt_index) is not None if keys else False
            took, rate = _part_s(cost, case.degree, keys, lengths, drafting if has_history else None)
            tokens_per_step.append(rate)
            begins[worker] += took
        gained = float(np.mean(tokens_per_step))
        times.parts = begins
        times.rounds.append(float(begins.max()))
        whole = {each.prompt.key: [workload.length(key, version) for key in each.keys] for each in launches}
        update_s = max(times.rounds[-1], times.updates[-1] if times.updates else 0.0)
        took = _train_s(cost, [n for lengths in whole.values() for n in lengths], _training_devices(case))
        times.updates.append(update_s + took)
        ranking.learned(took, gained)
        ranking.end()
        for (_, index), lengths in whole.items():
            past.add(index, lengths)
    return times.updates


def readings(cases: Sequence[Case], calibration: Calibration) -> dict[str, list[list[float]]]:
    """By row of the page and task, for each seed: the speed-up over the row before, without speculation, as calibrated
    and with no outliers among the responses."""
    values = calibration.of("rhymerl_machine")
    certain = Calibration({**calibration.values, "rhymerl_machine": {**values, "outlier_share": 0.0}})
    found: dict[str, list[list[float]]] = {}
    for name, used in (("as calibrated", calibration), ("no outliers", certain)):
        for task in dict.fromkeys(case.tasks[0] for case in cases):
            chosen = [case for case in cases if case.tasks == (task,) and not case.speculation]
            ends = {pipeline: [_mean_s(c, used) for c in chosen if c.pipeline == pipeline] for pipeline in _PIPELINES}
            pairs = [("off", "naive"), ("naive", "two_tier")]
            found[f"{name}, {task}"] = [
                [a / b for a, b in zip(ends[before], ends[after], strict=True)] for before, after in pairs
            ]
    return found


_PIPELINES = ("off", "naive", "two_tier")


def _mean_s(case: Case, calibration: Calibration) -> float:
    """Seconds of a step, from the second epoch on."""
    ends = step_ends(case, calibration)
    return (ends[-2] - ends[EPOCH_STEPS - 1]) / (len(ends) - 1 - EPOCH_STEPS)


def _training_devices(case: Case) -> int:
    """Devices that train."""
    return case.num_devices - case.rollout_devices


def _keys(prompt: Prompt, group_size: int) -> tuple[SampleKey, ...]:
    return tuple(SampleKey(prompt.epoch, prompt.index, i) for i in range(group_size))


def _parts(launches: Sequence[Launch], num_workers: int) -> list[list[SampleKey]]:
    """The responses of each worker; those that were not given one go prompt by prompt."""
    found: list[list[SampleKey]] = [[] for _ in range(num_workers)]
    for place, launch in enumerate(launches):
        for i, key in enumerate(launch.keys):
            found[launch.workers[i] if launch.workers else place % num_workers].append(key)
    return found


def _part_s(
    cost: CostModel, tp: int, keys: Sequence[SampleKey], lengths: Sequence[int], drafting: SimulatedDrafts | None
) -> tuple[float, float]:
    """Seconds in which a worker draws responses, and the tokens that a row gains in a step."""
    if not keys:
        return 0.0, 1.0
    if drafting is None:
        return drain(cost, tp, [PROMPT_TOKENS] * len(keys), lengths)[-1], 1.0
    prompt_tokens = [PROMPT_TOKENS] * len(keys)
    seconds = cost.prefill_s(tp, sum(prompt_tokens), sum(map(causal_pairs, prompt_tokens)))
    told = [drafting.acceptance(key, length) for key, length in zip(keys, lengths, strict=True)]
    left, done = np.array(lengths), np.zeros(len(keys), np.int64)
    windows, row_steps = np.full(len(keys), drafting.first_window), 0
    while (live := np.flatnonzero(left > done)).size:
        width = drafting.width(len(live))
        rest = left[live] - done[live]
        most = np.minimum(rest, 256)
        found = verify(
            [told[i] for i in live],
            done[live],
            rest,
            most,
            windows[live],
            next_window=drafting.next_window,
            width=width,
            num_steps=64,
            num_stops=1 + len(live) // 8,
        )
        batch = found.active.sum(1)
        context = ((found.before + done[live] + PROMPT_TOKENS) * found.active).sum(1)
        seconds += float(cost.verify_steps_s(tp, batch, width, context).sum())
        row_steps += int(batch.sum())
        done[live] += found.gained
        windows[live] = found.windows
    return seconds, sum(lengths) / row_steps


def _step_s(cost: CostModel, tp: int):
    return lambda rows, context: cost.decode_step_s(tp, max(round(rows), 1), context)


def _train_s(cost: CostModel, lengths: Sequence[int], num_devices: int) -> float:
    whole = [length + PROMPT_TOKENS for length in lengths]
    load = TrainLoad(sum(whole), sum(map(causal_pairs, whole)), extra_forwards=1)
    return cost.train_step_s(load, num_devices)
