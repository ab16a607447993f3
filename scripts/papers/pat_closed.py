"""PAT in closed form: one switch of a generation, made when so many rows are left, without engine, batcher and rule.

Purpose: evidence, not results. It shows what each assumption of the simulated gain is worth: when the layout switches,
to which degree, and how fast KV is read. No reading enters the calibration.

Departures: before the switch dp groups run at a pace of their own, as VeRL's engines do (`papers.closed_form`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrl.sim.cost_model import CostModel
from papers.calibration import Calibration
from papers.cases import PAT_SERIES
from papers.closed_form import PROMPT_TOKENS, drain, train_s
from papers.facts import Setup
from papers.machines import cost_of
from papers.pat import batches
from papers.setups import Case


@dataclass(frozen=True, slots=True)
class Reading:
    """A generation that starts in `tp` and goes to `new_tp` when `rows` are left.

    `kv`: share of the memory bandwidth at which KV is read, in place of the calibration's.
    """

    name: str
    tp: int = 2
    new_tp: int = 8
    rows: int = 1
    kv: float | None = None


READINGS = (
    Reading("tp 2 to 8 when one row is left"),
    Reading("tp 2 to 8 when 9 rows are left (§5.4)", rows=9),
    Reading("tp 2 to 8 when 32 rows are left", rows=32),
    Reading("tp 2 to 4 when one row is left", new_tp=4),
    Reading("tp 4 to 8 when one row is left", tp=4),
    Reading("tp 2 to 8 when one row is left, KV read at 0.9 of the bandwidth", kv=0.9),
    Reading("tp 2 to 8 when one row is left, KV read at 0.3", kv=0.3),
)


@dataclass(slots=True)
class _Row:
    length: int
    end_s: float = 0.0
    done: int = 0


def generation_s(cost: CostModel, setup: Setup, batch: Sequence[Sequence[int]], reading: Reading) -> float:
    """Seconds of a generation with that switch; none if `rows` is 0."""
    num_groups = setup.num_devices // reading.tp
    groups: list[list[_Row]] = []
    for group in range(num_groups):
        rows = sorted((_Row(n) for prompt in batch[group::num_groups] for n in prompt), key=lambda row: row.length)
        ends = drain(cost, reading.tp, [PROMPT_TOKENS] * len(rows), [row.length for row in rows])
        for row, end in zip(rows, ends, strict=True):
            row.end_s = end
        groups.append(rows)
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
    for row in rows:
        if row.end_s > now:
            span = row.end_s - before_s
            steps = before + int((row.length - before) * (now - before_s) / span)
            for later in rows:
                if later.end_s > now:
                    later.done = steps
            return
        before_s, before = row.end_s, row.length


def _drained_s(cost: CostModel, tp: int, rows: Sequence[_Row]) -> float:
    """Seconds until the last of these rows ends, without their prefill: KV has moved."""
    prompts = [PROMPT_TOKENS + row.done for row in rows]
    ends = drain(cost, tp, prompts, [row.length - row.done for row in rows])
    return ends[-1] - drain(cost, tp, prompts, [0] * len(rows))[-1]


def speedup(setup: Setup, values: Mapping[str, float], reading: Reading) -> float:
    """Of an iteration, over a generation that stays in `tp`; the mean of both over batches."""
    cost = cost_of(setup, values)
    if reading.kv is not None:
        cost = replace(cost, efficiency=replace(cost.efficiency, kv=reading.kv))
    stay, switched = [], []
    for batch in batches(setup, values):
        rest = train_s(cost, setup, batch, PROMPT_TOKENS, forwards=1)
        rest += cost.weight_sync_s(reading.tp, setup.num_devices)
        stay.append(rest + generation_s(cost, setup, batch, replace(reading, rows=0)))
        switched.append(rest + generation_s(cost, setup, batch, reading))
    return math.fsum(stay) / math.fsum(switched)


def readings(calibration: Calibration, scale: int = 1) -> dict[str, list[list[float]]]:
    """By reading, the speed-up of each series of bars at its largest length: [series][1], as of one seed.

    `scale` divides the longest response, to try the script out.
    """
    cases = [
        Case(setup, "plain", tokens=longest[-1], devices=devices) for _, setup, devices, longest in PAT_SERIES.values()
    ]
    points = [
        (calibration.of(case.problem), replace(case.of, num_devices=case.devices, max_tokens=case.tokens // scale))
        for case in cases
    ]
    return {reading.name: [[speedup(setup, values, reading)] for values, setup in points] for reading in READINGS}
