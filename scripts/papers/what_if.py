"""The same rounds without engine, batcher and lockstep, and the effect of other readings of the papers.

Purpose: evidence, not results. `tail_speedup` and `april_speedup` recompute the two experiments from lengths and costs
alone. Every dp group is an engine of its own that drains its rows (`papers.closed_form.drain`), as in the papers'
systems, and rounds are cut where the rule cuts them. They check the simulator, and they are fast enough to show the
effect of each assumption of the calibration: a `Variant` changes one. No variant enters the calibration.

Departures: requests go to the dp group with the fewest rows; scoring takes as long after every rollout; a round's
aborted rows cost nothing after its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.sim.calibration import Calibration
from jaxrl.sim.cost_model import CostModel, RooflineCost
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import SampleKey
from papers.closed_form import PROMPT_TOKENS, drain, train_s
from papers.setups import Case, models

REWARD_S = 30.0  # RollPacker: one time-out of the sandbox, as the calibration reads Table 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One assumption changed."""

    name: str
    lengths: Callable[[SimulatedLengths], SimulatedLengths] = lambda lengths: lengths
    correlation: float | None = None
    cost: Callable[[RooflineCost], RooflineCost] = lambda cost: cost
    reward_s: float = REWARD_S
    spread: bool = False  # a prompt's responses run on any dp group, not all on one


def _efficiency(**changes: float) -> Callable[[RooflineCost], RooflineCost]:
    return lambda cost: replace(cost, efficiency=replace(cost.efficiency, **changes))


TAIL_VARIANTS = (
    Variant("as calibrated"),
    Variant("prompts decide 0.85 of lengths (RhymeRL's code)", correlation=0.85),
    Variant("prompts decide 0.7", correlation=0.7),
    Variant("prompts decide 0.5", correlation=0.5),
    Variant("heavier tail: index 1.4", lengths=lambda d: replace(d, tail_index=1.4)),
    Variant("lighter tail: index 2.4", lengths=lambda d: replace(d, tail_index=2.4)),
    Variant("all responses twice as long", lengths=lambda d: replace(d, median=2 * d.median)),
    Variant("scoring takes 60 s", reward_s=60.0),
    Variant("a prompt's responses spread over dp groups", spread=True),
)

APRIL_VARIANTS = (
    Variant("as calibrated"),
    Variant("KV read at 0.3 of the bandwidth, not 0.6", cost=_efficiency(kv=0.3)),
    Variant("KV read at 0.2", cost=_efficiency(kv=0.2)),
    Variant("prompts decide 0.5 of lengths", correlation=0.5),
    Variant("lengths differ less: sigma 0.6", lengths=lambda d: replace(d, sigma=0.6)),
    Variant("a prompt's responses spread over dp groups", spread=True),
    Variant("the same, and KV read at 0.2", spread=True, cost=_efficiency(kv=0.2)),
)


def _varied(case: Case, calibration: Calibration, variant: Variant) -> tuple[RooflineCost, ModelledWorkload]:
    cost, workload = models(case, calibration)

    def varied(task: SimulatedTask) -> SimulatedTask:
        correlation = task.correlation if variant.correlation is None else variant.correlation
        return replace(task, response=variant.lengths(task.response), correlation=correlation)

    return variant.cost(cost), replace(workload, tasks=tuple(map(varied, workload.tasks)))


@dataclass(slots=True)
class Row:
    """A response: its group, tokens in all, tokens so far."""

    group: int
    length: int
    done: int = 0
    end_s: float = 0.0


def _run_rows(
    cost: CostModel, case: Case, rows: Sequence[Row], spread: bool
) -> list[tuple[list[Row], list[float], list[int]]]:
    """Sets `end_s` of every unfinished row; per dp group its rows, and (seconds, steps) at each of their ends."""
    count = case.num_devices // case.of.tp
    engines: list[list[Row]] = [[] for _ in range(count)]
    groups: dict[int, list[Row]] = {}
    for i, row in enumerate(rows):
        if row.done < row.length:
            groups.setdefault(i if spread else row.group, []).append(row)
    for members in groups.values():
        min(engines, key=len).extend(members)
    found = []
    for engine in engines:
        engine.sort(key=lambda row: row.length - row.done)
        left = [row.length - row.done for row in engine]
        ends = drain(cost, case.of.tp, [PROMPT_TOKENS + row.done for row in engine], left)
        for row, end in zip(engine, ends, strict=True):
            row.end_s = end
        found.append((engine, ends, left))
    return found


# ---------------------------------------------------------------- RollPacker


def tail_speedup(case: Case, calibration: Calibration, variant: Variant) -> float:
    """Of steps of tail batching over plain ones, on the same prompts; `case` is one of tail batching."""
    cost, workload = _varied(case, calibration, variant)
    plain = _tail_steps(replace(case, prompt_factor=1.0, response_factor=1.0), cost, workload, variant)
    return plain / _tail_steps(case, cost, workload, variant)


def _tail_steps(case: Case, cost: CostModel, workload: ModelledWorkload, variant: Variant) -> float:
    """Mean seconds of a step."""
    prompts, size = case.num_prompts, case.of.group_size
    launched = math.ceil(case.prompt_factor * prompts), math.ceil(case.response_factor * size)
    fresh, seconds = 0, 0.0
    queue: deque[int] = deque()
    for _ in range(case.steps):
        long = len(queue) >= prompts
        if long:
            chosen, responses, attempt = [queue.popleft() for _ in range(prompts)], size, 1
        else:
            chosen, responses, attempt = list(range(fresh, fresh + launched[0])), launched[1], 0
            fresh += launched[0]
        lengths = {p: [workload.length(SampleKey(0, p, i, attempt)) for i in range(responses)] for p in chosen}
        rows = [Row(p, length) for p in chosen for length in lengths[p]]
        _run_rows(cost, case, rows, variant.spread)
        ended: dict[int, list[Row]] = {p: [] for p in chosen}
        for row in sorted(rows, key=lambda row: row.end_s):
            ended[row.group].append(row)
        kept = {p: members[:size] for p, members in ended.items()}
        order = sorted(chosen, key=lambda p: kept[p][-1].end_s)
        batch = order[:prompts]
        queue.extend(p for p in chosen if p not in set(batch))
        seconds += kept[batch[-1]][-1].end_s + variant.reward_s
        setup = replace(case.of, num_devices=case.num_devices)
        seconds += train_s(cost, setup, [[row.length for row in kept[p]] for p in batch], PROMPT_TOKENS, forwards=2)
    return seconds / case.steps


# ---------------------------------------------------------------- APRIL


@dataclass(slots=True)
class _Prompt:
    rows: list[Row] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When its last row ends; 0 if it was complete before."""
        return max((row.end_s for row in self.rows if row.done < row.length), default=0.0)


def april_throughput(case: Case, calibration: Calibration, variant: Variant, skip: int) -> float:
    """Tokens per second of rollout; `case` is one of partial rollout, or of plain batches."""
    cost, workload = _varied(case, calibration, variant)
    want, fresh = math.ceil(case.prompt_factor * case.num_prompts), 0
    buffer: list[_Prompt] = []
    tokens, seconds = 0, 0.0
    for step in range(case.steps):
        while len(buffer) < want:
            lengths = [workload.length(SampleKey(0, fresh, i)) for i in range(case.of.group_size)]
            buffer.append(_Prompt([Row(fresh, length) for length in lengths]))
            fresh += 1
        engines = _run_rows(cost, case, [row for prompt in buffer for row in prompt.rows], variant.spread)
        ends = sorted((prompt.end_s, i) for i, prompt in enumerate(buffer))
        now = ends[case.num_prompts - 1][0]
        batch = {i for _, i in ends[: case.num_prompts]}
        drawn = 0
        for engine, at_s, at_steps in engines:
            steps = int(np.interp(now, [0.0, *at_s], [0, *at_steps])) if engine else 0
            for row in engine:
                more = row.length - row.done if row.end_s <= now else min(steps, row.length - row.done - 1)
                row.done += more
                drawn += more
        buffer = [prompt for i, prompt in enumerate(buffer) if i not in batch]
        if step >= skip:
            tokens, seconds = tokens + drawn, seconds + now
    return tokens / seconds


def april_speedup(case: Case, calibration: Calibration, variant: Variant, skip: int) -> float:
    """Tokens per second over those of plain batches."""
    plain = replace(case, rule="plain", prompt_factor=1.0)
    return april_throughput(case, calibration, variant, skip) / april_throughput(plain, calibration, variant, skip)


# ---------------------------------------------------------------- both


def speedups(paper: str, cases: Sequence[Case], calibration: Calibration, skip: int) -> dict[str, list[float]]:
    """By variant, the speed-up of each case; cases of tail batching (rollpacker) or partial rollout (april). None
    for another paper."""
    if not cases:
        return {}
    if paper == "april":
        return {v.name: [april_speedup(case, calibration, v, skip) for case in cases] for v in APRIL_VARIANTS}
    return {v.name: [tail_speedup(case, calibration, v) for case in cases] for v in TAIL_VARIANTS}
