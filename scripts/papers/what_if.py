"""APRIL's rounds without engine, batcher and lockstep, and the effect of other readings of the paper.

Purpose: evidence, not results. Speed-ups from lengths and costs alone. Every dp group is an engine of its own
(`papers.slime.Engine`), as in the paper's system, and rounds are cut where the rule cuts them. They check the
simulator, and they are fast enough to show the effect of each assumption of the calibration: a `Variant` changes one.
No variant enters the calibration.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
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
from papers.problems import PROBLEMS


@dataclass(frozen=True, slots=True)
class Variant:
    """One assumption changed.

    Attributes:
      lengths: fields of every task's lengths; `tail_index` is a factor.
      efficiency: fields of the machine's.
      correlation, tp: in place of the calibration's.
      spread: a prompt's responses run on any dp group, not all on one; None: as in the paper's system.
      filtered_share: of the groups, in place of the calibration's; the constants are fitted to the baselines anew.
      dapo: groups are dropped; otherwise GRPO.
      drops: which groups: those of a draw, or the shortest, or the longest.
    """

    lengths: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    correlation: float | None = None
    tp: int | None = None
    spread: bool | None = None
    filtered_share: float | None = None
    dapo: bool = False
    drops: str = "any"


AS_CALIBRATED = "as calibrated"

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
    "DAPO's row, the shortest dropped": Variant(dapo=True, drops="shortest"),
    "DAPO's row, the longest dropped": Variant(dapo=True, drops="longest"),
    "DAPO's row, 0.2 dropped; fitted anew": Variant(filtered_share=0.2, dapo=True),
    "DAPO's row, 0.5 dropped; fitted anew": Variant(filtered_share=0.5, dapo=True),
}

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

    def drawn(prompt: int) -> list[int]:
        return [workload.length(SampleKey(0, prompt, i)) for i in range(case.of.group_size)]

    some = sorted(sum(drawn(prompt)) for prompt in range(1000)) if variant.drops != "any" else []

    def fresh() -> slime.Group:
        prompt = next(prompts)
        lengths, rank = drawn(prompt), uniform(case.seed, 1, prompt)
        if some:
            rank = bisect(some, sum(lengths)) / len(some)
        if variant.drops == "longest":
            rank = 1 - rank
        return slime.group_of(prompt, rank < dropped, lengths)

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


WARM_UP = 8  # of APRIL's steps: until the buffer is what it stays
MOST_STEPS = 20  # of a run in closed form


def readings(
    cases: Sequence[Case], calibration: Calibration, in_order: Callable[..., Iterable[float]] = map
) -> dict[str, list[list[float]]]:
    """By name, of each case of partial rollout: [models][seeds]. At a tiny size, nothing is fitted anew: that takes
    half a minute.

    Args:
      in_order: `map`, or the same over several processes.
    """
    columns: dict[str, list[Case]] = {}
    for case in cases:
        columns.setdefault(case.setup, []).append(replace(case, steps=min(case.steps, MOST_STEPS)))
    refit = cases[0].scale == 1
    names = [*(name for name, each in APRIL_VARIANTS.items() if refit or each.filtered_share is None), *STALE]
    asked = [(name, case, calibration) for name in names for column in columns.values() for case in column]
    found = iter(list(in_order(reading, *zip(*asked, strict=True))))
    return {name: [[next(found) for _ in column] for column in columns.values()] for name in names}


def reading(name: str, case: Case, calibration: Calibration) -> float:
    """A variant's speed-up of a case, or a share of stale data."""
    skip = min(WARM_UP, case.steps - 1)
    if name in STALE:
        return stale_shares(case, calibration, skip)[STALE.index(name)]
    return april_speedup(case, calibration, APRIL_VARIANTS[name], skip)
