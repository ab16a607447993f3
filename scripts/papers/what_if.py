"""The same rounds without engine, batcher and lockstep, and the effect of other readings of the papers.

Purpose: evidence, not results. Speed-ups of tail batching and of APRIL from lengths and costs alone. Every dp group is
an engine of its own that drains its rows (`papers.closed_form.drain`, `papers.slime.Engine`), as in the papers'
systems, and rounds are cut where the rule cuts them. They check the simulator, and they are fast enough to show the
effect of each assumption of the calibration: a `Variant` changes one. No variant enters the calibration.

Departures: requests go to the dp group with the fewest rows; the seconds of scoring are those of the calibration's
closed form, the same in every step.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import SampleKey
from papers import slime
from papers.calibration import Calibration, Values, solve
from papers.cases import Case, models
from papers.closed_form import drained, train_s
from papers.problems import FORWARDS, PROBLEMS, mixed_reward_s


@dataclass(frozen=True, slots=True)
class Variant:
    """One assumption changed.

    Attributes:
      lengths: fields of every task's lengths; `tail_index` is a factor.
      efficiency: fields of the machine's.
      correlation, tp, reward_s: in place of the calibration's.
      spread: a prompt's responses run on any dp group, not all on one; None: as in the paper's system.
      in_turn: tasks are scored one after another.
      even_training: every step trains as long as a plain one, whatever its tokens: batches are padded to the limit.
      filtered_share: of the groups, in place of the calibration's; the constants are fitted to the baselines anew.
      dapo: groups are dropped; otherwise GRPO.
    """

    lengths: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    correlation: float | None = None
    tp: int | None = None
    reward_s: float | None = None
    spread: bool | None = None
    in_turn: bool = True
    even_training: bool = False
    filtered_share: float | None = None
    dapo: bool = False


AS_CALIBRATED = "as calibrated"

TAIL_VARIANTS = {
    AS_CALIBRATED: Variant(),
    "tasks scored beside one another: the longest stage, not the sum": Variant(in_turn=False),
    "scoring takes 100 s": Variant(reward_s=100.0),
    "no fixed cost of a rollout": Variant(efficiency={"rollout_fixed_s": 0.0}),
    "a fixed cost of 30 s": Variant(efficiency={"rollout_fixed_s": 30.0}),
    "every step trains as long as a plain one": Variant(even_training=True),
    "prompts decide 0.85 of lengths (RhymeRL's code)": Variant(correlation=0.85),
    "prompts decide 0.3": Variant(correlation=0.3),
    "lighter tails: index times 1.25": Variant(lengths={"tail_index": 1.25}),
    "heavier tails: index times 0.85": Variant(lengths={"tail_index": 0.85}),
    "a prompt's responses spread over dp groups": Variant(spread=True),
}

APRIL_VARIANTS = {
    AS_CALIBRATED: Variant(),
    "a prompt's responses on one server": Variant(spread=False),
    "the same, and servers of one device": Variant(spread=False, tp=1),
    "KV read at 0.6 of the bandwidth": Variant(efficiency={"kv": 0.6}),
    "KV read at 0.2": Variant(efficiency={"kv": 0.2}),
    "prompts decide 0.5 of lengths": Variant(correlation=0.5),
    "lengths differ less: sigma 0.6": Variant(lengths={"sigma": 0.6}),
    "DAPO drops 0.2 of the groups; fitted anew": Variant(filtered_share=0.2),
    "DAPO drops 0.5 of the groups; fitted anew": Variant(filtered_share=0.5),
    "DAPO's row of Table 1": Variant(dapo=True),
    "DAPO's row, 0.2 dropped; fitted anew": Variant(filtered_share=0.2, dapo=True),
    "DAPO's row, 0.5 dropped; fitted anew": Variant(filtered_share=0.5, dapo=True),
}

FACTORS = {
    "plain": (1.0, 1.0),
    "P and R 1.25": (1.25, 1.25),
    "P 1.25": (1.25, 1.0),
    "P 1.5": (1.5, 1.0),
    "R 1.25": (1.0, 1.25),
    "R 1.5": (1.0, 1.5),
}
"""RollPacker Fig. 12: (prompt factor, response factor); a reading's name is `PERIOD` and one of these."""

PERIOD = "rollout of a period, "
STALE = ("stale, as the authors count", "stale, of trained tokens", "stale, of trained responses")


def _varied(case: Case, calibration: Calibration, variant: Variant) -> tuple[CostModel, ModelledWorkload]:
    cost, workload = models(case, calibration)
    tasks = []
    for task in workload.tasks:
        fields: dict[str, Any] = dict(variant.lengths)
        if "tail_index" in fields:
            fields["tail_index"] *= task.response.tail_index
        correlation = task.correlation if variant.correlation is None else variant.correlation
        tasks.append(task.replace(response=task.response.replace(**fields), correlation=correlation))
    cost = replace(cost, efficiency=replace(cost.efficiency, **variant.efficiency))
    return cost, replace(workload, tasks=tuple(tasks))


# ---------------------------------------------------------------- RollPacker


def tail_speedup(case: Case, calibration: Calibration, variant: Variant) -> float:
    """Of steps of tail batching over plain ones, on the same prompts; `case` is one of tail batching."""
    cost, workload = _varied(case, calibration, variant)
    values = calibration[case.problem]
    reward_s = mixed_reward_s(values, case.of, variant.in_turn) if variant.reward_s is None else variant.reward_s
    fixed_s = cost.rollout_fixed_s() + cost.weight_sync_s(case.of.tp, case.num_devices) + reward_s
    plain = replace(case, prompt_factor=1.0, response_factor=1.0)
    plain_s, plain_train_s = _tail_steps(plain, cost, workload, bool(variant.spread))
    rollout_s, tail_train_s = _tail_steps(case, cost, workload, bool(variant.spread))
    if variant.even_training:
        tail_train_s = plain_train_s
    return (plain_s + plain_train_s + fixed_s) / (rollout_s + tail_train_s + fixed_s)


def period_s(case: Case, calibration: Calibration) -> float:
    """Mean seconds of rollouts over two periods (Fig. 12)."""
    cost, workload = models(case, calibration)
    steps = min(2 * case.period, case.steps) if case.period > 1 else min(10, case.steps)
    decoding_s, _ = _tail_steps(replace(case, steps=steps), cost, workload, spread=False)
    return decoding_s + cost.rollout_fixed_s() + cost.weight_sync_s(case.of.tp, case.num_devices)


def _tail_steps(case: Case, cost: CostModel, workload: ModelledWorkload, spread: bool) -> tuple[float, float]:
    """Mean seconds of a step's decoding and training."""
    prompts, size = case.num_prompts, case.of.group_size
    launched = math.ceil(case.prompt_factor * prompts), math.ceil(case.response_factor * size)
    fresh, decoding_s, training_s = 0, 0.0, 0.0
    queue: deque[int] = deque()
    for _ in range(case.steps):
        if len(queue) >= prompts:  # a long round
            chosen, responses, attempt = [queue.popleft() for _ in range(prompts)], size, 1
        else:
            chosen, responses, attempt = list(range(fresh, fresh + launched[0])), launched[1], 0
            fresh += launched[0]
        rows = [(p, workload.length(SampleKey(0, p, i, attempt))) for p in chosen for i in range(responses)]
        ended: dict[int, list[tuple[float, int]]] = {p: [] for p in chosen}  # ends and lengths
        for p, end_s, length in sorted(_drained_rows(cost, case, rows, spread), key=lambda row: row[1]):
            ended[p].append((end_s, length))
        order = sorted(chosen, key=lambda p: ended[p][size - 1][0])
        batch = order[:prompts]
        queue.extend(p for p in chosen if p not in set(batch))
        decoding_s += ended[batch[-1]][size - 1][0]
        lengths = [[length for _, length in ended[p][:size]] for p in batch]
        training_s += train_s(cost, case.num_devices, lengths, FORWARDS)
    return decoding_s / case.steps, training_s / case.steps


def _drained_rows(
    cost: CostModel, case: Case, rows: Sequence[tuple[int, int]], spread: bool
) -> list[tuple[int, float, int]]:
    """(prompt, seconds after which it ends, length) of (prompt, length) in the order of `rows`."""
    engines: list[list[int]] = [[] for _ in range(case.num_devices // case.of.tp)]
    groups: dict[int, list[int]] = {}
    for i, (prompt, _) in enumerate(rows):
        groups.setdefault(i if spread else prompt, []).append(i)
    for members in groups.values():
        min(engines, key=len).extend(members)
    ends = [0.0] * len(rows)
    for engine in engines:
        engine.sort(key=lambda i: rows[i][1])
        for i, end_s in zip(engine, drained(cost, case.of.tp, [rows[i][1] for i in engine]), strict=True):
            ends[i] = end_s
    return [(prompt, end_s, length) for (prompt, length), end_s in zip(rows, ends, strict=True)]


# ---------------------------------------------------------------- APRIL


@cache
def _refitted(filtered_share: float) -> Values:
    """APRIL's constants where DAPO drops that share of the groups, from the same facts about baselines."""
    problem = PROBLEMS["april"]
    return solve(replace(problem, fixed={**problem.fixed, "filtered_share": filtered_share}), {}).values


def april_rollouts(case: Case, calibration: Calibration, variant: Variant) -> list[slime.Rollout]:
    """The rollouts of a case of partial rollout, or of plain batches."""
    values = calibration["april"]
    if variant.filtered_share is not None:
        values = _refitted(variant.filtered_share)
        calibration = {**calibration, "april": values}
    cost, workload = _varied(case, calibration, variant)
    tp = variant.tp or case.of.tp
    dropped = values["filtered_share"] if variant.dapo else 0.0
    prompts = itertools.count()

    def fresh() -> slime.Group:
        prompt = next(prompts)
        lengths = [workload.length(SampleKey(0, prompt, i)) for i in range(case.of.group_size)]
        return slime.group_of(prompt, uniform(case.seed, 1, prompt) < dropped, lengths)

    partial = case.rule == "partial"
    submit = math.ceil(case.prompt_factor * case.num_prompts) if partial else case.num_prompts
    spread = variant.spread is not False
    plan = slime.Plan(cost, tp, max(case.num_devices // tp, 1), case.num_prompts, submit, partial, spread)
    return list(slime.rollouts(plan, fresh, case.steps))


def april_speedup(case: Case, calibration: Calibration, variant: Variant, skip: int) -> float:
    """Tokens per second over those of plain batches."""
    plain = replace(case, rule="plain", prompt_factor=1.0)
    before, after = (slime.throughput(april_rollouts(each, calibration, variant)[skip:]) for each in (plain, case))
    return after / before


def stale_shares(case: Case, calibration: Calibration, skip: int) -> list[float]:
    """The share of stale data in three ways: the authors' (last segments of resumed requests, over those and the
    tokens of the rollout), of trained tokens, and of trained responses."""
    found = april_rollouts(case, calibration, Variant())[skip:]
    resumed, tokens = sum(each.resumed for each in found), sum(each.tokens for each in found)
    trained, stale = sum(each.trained for each in found), sum(each.stale for each in found)
    samples, stale_samples = sum(each.samples for each in found), sum(each.stale_samples for each in found)
    return [resumed / (resumed + tokens), stale / trained, stale_samples / samples]


# ---------------------------------------------------------------- both

WARM_UP = 8  # of APRIL's steps: until the buffer is what it stays
MOST_STEPS = 20  # of a run in closed form


def readings(
    cases: Sequence[Case], calibration: Calibration, in_order: Callable[..., Iterable[float]] = map
) -> dict[str, list[list[float]]]:
    """By name, of each case of tail batching (RollPacker) or of partial rollout (APRIL): [models][seeds]. At a tiny
    size, nothing is fitted anew: that takes half a minute.

    Args:
      in_order: `map`, or the same over several processes.
    """
    columns: dict[str, list[Case]] = {}
    for case in cases:
        columns.setdefault(case.setup, []).append(replace(case, steps=min(case.steps, MOST_STEPS)))
    if cases[0].paper == "april":
        refit = cases[0].scale == 1
        names = [*(name for name, each in APRIL_VARIANTS.items() if refit or each.filtered_share is None), *STALE]
    else:
        names = [*TAIL_VARIANTS, *(PERIOD + factors for factors in FACTORS)]
    asked = [(name, case, calibration) for name in names for column in columns.values() for case in column]
    found = iter(list(in_order(reading, *zip(*asked, strict=True))))
    return {name: [[next(found) for _ in column] for column in columns.values()] for name in names}


def reading(name: str, case: Case, calibration: Calibration) -> float:
    """A variant's speed-up of a case; a share of stale data; or seconds of a rollout."""
    if case.paper == "april":
        skip = min(WARM_UP, case.steps - 1)
        if name in STALE:
            return stale_shares(case, calibration, skip)[STALE.index(name)]
        return april_speedup(case, calibration, APRIL_VARIANTS[name], skip)
    if name.startswith(PERIOD):
        prompt, response = FACTORS[name.removeprefix(PERIOD)]
        return period_s(replace(case, prompt_factor=prompt, response_factor=response), calibration)
    return tail_speedup(case, calibration, TAIL_VARIANTS[name])
