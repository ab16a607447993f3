"""PAT in closed form: one switch of a generation, made when so many rows are left, without engine, batcher and rule.

Purpose: evidence, not results. It shows what each assumption of the simulated gain is worth: when the layout switches,
to which degree, and how fast KV is read. No reading enters the calibration.

Departures: before the switch dp groups run at a pace of their own, as VeRL's engines do (`papers.closed_form`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxrl.sim.cost_model import CostModel
from papers.calibration import Calibration, Values
from papers.cases import Case
from papers.closed_form import PROMPT_TOKENS, Batch, cost_of, drain, drained, train_s
from papers.facts import Setup
from papers.problems import outlier_batches


@dataclass(frozen=True, slots=True)
class Reading:
    """A generation that starts in `tp` and goes to `new_tp` when `rows` are left.

    `kv`: share of the memory bandwidth at which KV is read, in place of the calibration's.
    """

    tp: int = 2
    new_tp: int = 8
    rows: int = 1
    kv: float | None = None


READINGS = {
    "tp 2 to 8 when one row is left": Reading(),
    "tp 2 to 8 when 9 rows are left (§5.4)": Reading(rows=9),
    "tp 2 to 8 when 32 rows are left": Reading(rows=32),
    "tp 2 to 4 when one row is left": Reading(new_tp=4),
    "tp 4 to 8 when one row is left": Reading(tp=4),
    "tp 2 to 8 when one row is left, KV read at 0.9 of the bandwidth": Reading(kv=0.9),
    "tp 2 to 8 when one row is left, KV read at 0.3": Reading(kv=0.3),
}


@dataclass(slots=True)
class _Row:
    length: int
    end_s: float
    done: int = 0


def generation_s(cost: CostModel, setup: Setup, batch: Batch, reading: Reading) -> float:
    """Seconds of a generation with that switch; none if `rows` is 0."""
    num_groups = setup.num_devices // reading.tp
    groups: list[list[_Row]] = []
    for group in range(num_groups):
        lengths = sorted(n for prompt in batch[group::num_groups] for n in prompt)
        groups.append([_Row(*each) for each in zip(lengths, drained(cost, reading.tp, lengths), strict=True)])
    everything = sorted((row for rows in groups for row in rows), key=lambda row: row.end_s)
    if not reading.rows or reading.rows >= len(everything):
        return everything[-1].end_s
    now = everything[-reading.rows - 1].end_s
    left = everything[-reading.rows :]
    for rows in groups:
        _advance(rows, now)
    switch = cost.switch_cost(reading.tp, reading.new_tp)
    fullest = max(sum(PROMPT_TOKENS + row.done for row in rows if row in left) for rows in groups)
    now += switch.weights_s + switch.fixed_s + switch.kv_s_per_token * fullest
    after = setup.num_devices // reading.new_tp
    dealt = [sorted(left, key=lambda row: -row.length)[i::after] for i in range(after)]
    return now + max(_drained_s(cost, reading.new_tp, rows) for rows in dealt if rows)


def _advance(rows: Sequence[_Row], now: float) -> None:
    """Sets how far the rows of a group are, between the ends before and after: all of a group are at the same step."""
    before_s, before = 0.0, 0
    for i, row in enumerate(rows):
        if row.end_s > now:
            steps = before + int((row.length - before) * (now - before_s) / (row.end_s - before_s))
            for later in rows[i:]:
                later.done = steps
            return
        before_s, before = row.end_s, row.length


def _drained_s(cost: CostModel, tp: int, rows: Sequence[_Row]) -> float:
    """Seconds until the last of these rows ends, without their prefill: KV has moved."""
    prompts = [PROMPT_TOKENS + row.done for row in rows]
    ends = drain(cost, tp, prompts, [row.length - row.done for row in rows])
    return ends[-1] - drain(cost, tp, prompts, [0] * len(rows))[-1]


def speedup(setup: Setup, values: Values, reading: Reading) -> float:
    """Of an iteration, over a generation that stays in `tp`; the mean of both over batches."""
    cost = cost_of(setup, values)
    if reading.kv is not None:
        cost = replace(cost, efficiency=replace(cost.efficiency, kv=reading.kv))
    stay, switched = [], []
    for batch in outlier_batches(setup, values):
        rest = train_s(cost, setup.num_devices, batch, forwards=1)
        rest += cost.weight_sync_s(reading.tp, setup.num_devices)
        stay.append(rest + generation_s(cost, setup, batch, replace(reading, rows=0)))
        switched.append(rest + generation_s(cost, setup, batch, reading))
    return math.fsum(stay) / math.fsum(switched)


def readings(cases: Iterable[Case], calibration: Calibration) -> dict[str, list[list[float]]]:
    """By reading, the speed-up of each case: [cases][1], as of one seed."""
    points = [
        (replace(case.of, num_devices=case.devices, max_tokens=case.max_tokens), calibration[case.problem])
        for case in cases
    ]
    return {name: [[speedup(*point, reading)] for point in points] for name, reading in READINGS.items()}
