"""The same rounds without engine, batcher and lockstep, and the effect of other readings of the papers.

Purpose: evidence, not results. `tail_speedup` and `april_speedup` recompute the two experiments from lengths and costs
alone. Every dp group is an engine of its own that drains its rows (`papers.closed_form.drain`, `papers.slime.Engine`),
as in the papers' systems, and rounds are cut where the rule cuts them. They check the simulator, and they are fast
enough to show the effect of each assumption of the calibration: a `Variant` changes one. No variant enters the
calibration.

Departures: requests go to the dp group with the fewest rows; the seconds of scoring are those of the calibration's
closed form, the same in every step.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import SampleKey
from papers import slime
from papers.calibration import Calibration
from papers.cases import APRIL_WARM_UP, FACTORS
from papers.closed_form import PROMPT_TOKENS, drain, train_s
from papers.problems import PROBLEMS
from papers.rollpacker import FORWARDS, mixed_reward_s
from papers.setups import Case, models
from papers.solver import solve


@dataclass(frozen=True, slots=True)
class Variant:
    """One assumption changed.

    Attributes:
      lengths, cost: what becomes of each task's lengths, and of the machine.
      correlation, tp, reward_s: in place of the calibration's.
      spread: a prompt's responses run on any dp group, not all on one; None: as in the paper's system.
      in_turn: tasks are scored one after another.
      even_training: every step trains as long as a plain one, whatever its tokens: batches are padded to the limit.
      filtered_share: of the groups, in place of the calibration's; the constants are fitted to the baselines anew.
      dapo: groups are dropped; otherwise GRPO.
    """

    name: str
    lengths: Callable[[SimulatedLengths], SimulatedLengths] = lambda lengths: lengths
    correlation: float | None = None
    cost: Callable[[CostModel], CostModel] = lambda cost: cost
    tp: int | None = None
    reward_s: float | None = None
    spread: bool | None = None
    in_turn: bool = True
    even_training: bool = False
    filtered_share: float | None = None
    dapo: bool = False


def _efficiency(**changes: float) -> Callable[[CostModel], CostModel]:
    return lambda cost: replace(cost, efficiency=replace(cost.efficiency, **changes))


def _tail(factor: float) -> Callable[[SimulatedLengths], SimulatedLengths]:
    return lambda lengths: lengths.replace(tail_index=factor * lengths.tail_index)


AS_CALIBRATED = Variant("as calibrated")

TAIL_VARIANTS = (
    AS_CALIBRATED,
    Variant("tasks scored beside one another: the longest stage, not the sum", in_turn=False),
    Variant("scoring takes 100 s", reward_s=100.0),
    Variant("no fixed cost of a rollout", cost=_efficiency(rollout_fixed_s=0.0)),
    Variant("a fixed cost of 30 s", cost=_efficiency(rollout_fixed_s=30.0)),
    Variant("every step trains as long as a plain one", even_training=True),
    Variant("prompts decide 0.85 of lengths (RhymeRL's code)", correlation=0.85),
    Variant("prompts decide 0.3", correlation=0.3),
    Variant("lighter tails: index times 1.25", lengths=_tail(1.25)),
    Variant("heavier tails: index times 0.85", lengths=_tail(0.85)),
    Variant("a prompt's responses spread over dp groups", spread=True),
)

APRIL_VARIANTS = (
    AS_CALIBRATED,
    Variant("a prompt's responses on one server", spread=False),
    Variant("the same, and servers of one device", spread=False, tp=1),
    Variant("KV read at 0.6 of the bandwidth", cost=_efficiency(kv=0.6)),
    Variant("KV read at 0.2", cost=_efficiency(kv=0.2)),
    Variant("prompts decide 0.5 of lengths", correlation=0.5),
    Variant("lengths differ less: sigma 0.6", lengths=lambda d: d.replace(sigma=0.6)),
    Variant("DAPO drops 0.2 of the groups; fitted anew", filtered_share=0.2),
    Variant("DAPO drops 0.5 of the groups; fitted anew", filtered_share=0.5),
    Variant("DAPO's row of Table 1", dapo=True),
    Variant("DAPO's row, 0.2 dropped; fitted anew", filtered_share=0.2, dapo=True),
    Variant("DAPO's row, 0.5 dropped; fitted anew", filtered_share=0.5, dapo=True),
)


DAPO = {
    "0.2": "DAPO's row, 0.2 dropped; fitted anew",
    "0.35 (the calibration)": "DAPO's row of Table 1",
    "0.5": "DAPO's row, 0.5 dropped; fitted anew",
}
"""By share of dropped groups: names in `APRIL_VARIANTS`."""

PERIODS = {factors: f"rollout of a period, {factors}" for factors in ("plain", *FACTORS)}
"""By name of factors (RollPacker Fig. 12): names of seconds among the readings."""


def _varied(case: Case, calibration: Calibration, variant: Variant) -> tuple[CostModel, ModelledWorkload]:
    cost, workload = models(case, calibration)

    def varied(task: SimulatedTask) -> SimulatedTask:
        correlation = task.correlation if variant.correlation is None else variant.correlation
        return task.replace(response=variant.lengths(task.response), correlation=correlation)

    return variant.cost(cost), replace(workload, tasks=tuple(map(varied, workload.tasks)))


# ---------------------------------------------------------------- RollPacker


@dataclass(slots=True)
class Row:
    """A response: its group, its tokens, and when it ends."""

    group: int
    length: int
    end_s: float = 0.0


def _run_rows(cost: CostModel, case: Case, rows: Sequence[Row], spread: bool) -> None:
    """Sets `end_s` of every row."""
    engines: list[list[Row]] = [[] for _ in range(case.num_devices // case.of.tp)]
    groups: dict[int, list[Row]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if spread else row.group, []).append(row)
    for members in groups.values():
        min(engines, key=len).extend(members)
    for engine in engines:
        engine.sort(key=lambda row: row.length)
        ends = drain(cost, case.of.tp, [PROMPT_TOKENS] * len(engine), [row.length for row in engine])
        for row, end in zip(engine, ends, strict=True):
            row.end_s = end


def tail_speedup(case: Case, calibration: Calibration, variant: Variant) -> float:
    """Of steps of tail batching over plain ones, on the same prompts; `case` is one of tail batching."""
    cost, workload = _varied(case, calibration, variant)
    values = calibration.of(case.problem)
    fixed_s = cost.rollout_fixed_s() + cost.weight_sync_s(case.of.tp, case.num_devices)
    reward_s = mixed_reward_s(values, case.of, variant.in_turn) if variant.reward_s is None else variant.reward_s
    fixed_s += reward_s
    plain = replace(case, prompt_factor=1.0, response_factor=1.0)
    plain_s, plain_train_s = _tail_steps(plain, cost, workload, variant)
    rollout_s, tail_train_s = _tail_steps(case, cost, workload, variant)
    if variant.even_training:
        tail_train_s = plain_train_s
    return (plain_s + plain_train_s + fixed_s) / (rollout_s + tail_train_s + fixed_s)


def _tail_steps(case: Case, cost: CostModel, workload: ModelledWorkload, variant: Variant) -> tuple[float, float]:
    """Mean seconds of a step's decoding and training."""
    prompts, size = case.num_prompts, case.of.group_size
    launched = math.ceil(case.prompt_factor * prompts), math.ceil(case.response_factor * size)
    fresh, decoding_s, training_s = 0, 0.0, 0.0
    queue: deque[int] = deque()
    setup = replace(case.of, num_devices=case.num_devices)
    for _ in range(case.steps):
        long = len(queue) >= prompts
        if long:
            chosen, responses, attempt = [queue.popleft() for _ in range(prompts)], size, 1
        else:
            chosen, responses, attempt = list(range(fresh, fresh + launched[0])), launched[1], 0
            fresh += launched[0]
        lengths = {p: [workload.length(SampleKey(0, p, i, attempt)) for i in range(responses)] for p in chosen}
        rows = [Row(p, length) for p in chosen for length in lengths[p]]
        _run_rows(cost, case, rows, bool(variant.spread))
        ended: dict[int, list[Row]] = {p: [] for p in chosen}
        for row in sorted(rows, key=lambda row: row.end_s):
            ended[row.group].append(row)
        kept = {p: members[:size] for p, members in ended.items()}
        order = sorted(chosen, key=lambda p: kept[p][-1].end_s)
        batch = order[:prompts]
        queue.extend(p for p in chosen if p not in set(batch))
        decoding_s += kept[batch[-1]][-1].end_s
        training_s += train_s(cost, setup, [[row.length for row in kept[p]] for p in batch], PROMPT_TOKENS, FORWARDS)
    return decoding_s / case.steps, training_s / case.steps


def period_s(case: Case, calibration: Calibration) -> float:
    """Mean seconds of rollouts over two periods (Fig. 12)."""
    cost, workload = _varied(case, calibration, AS_CALIBRATED)
    steps = min(2 * case.period, case.steps) if case.period > 1 else min(10, case.steps)
    decoding_s, _ = _tail_steps(replace(case, steps=steps), cost, workload, AS_CALIBRATED)
    return decoding_s + cost.rollout_fixed_s() + cost.weight_sync_s(case.of.tp, case.num_devices)


# ---------------------------------------------------------------- APRIL


@lru_cache(maxsize=8)
def _refitted(filtered_share: float, given: tuple[tuple[str, float], ...]) -> Mapping[str, float]:
    """APRIL's constants where DAPO drops that share of the groups, from the same facts about baselines."""
    problem = next(each for each in PROBLEMS if each.name == "april")
    return solve(replace(problem, fixed={**problem.fixed, "filtered_share": filtered_share}), dict(given)).values


def april_rollouts(case: Case, calibration: Calibration, variant: Variant) -> list[slime.Rollout]:
    """The rollouts of a case of partial rollout, or of plain batches."""
    values = dict(calibration.of("april"))
    if variant.filtered_share is not None:
        values = dict(_refitted(variant.filtered_share, ()))
        calibration = Calibration({**calibration.values, "april": values})
    cost, workload = _varied(case, calibration, variant)
    tp = variant.tp or case.of.tp
    dropped = values["filtered_share"] if variant.dapo else 0.0
    prompts = itertools.count()

    def fresh() -> slime.Group:
        prompt = next(prompts)
        group = slime.Group(prompt, uniform(case.seed, 1, prompt) < dropped)
        lengths = [workload.length(SampleKey(0, prompt, i)) for i in range(case.of.group_size)]
        group.rows = [slime.Row(group, length) for length in lengths]
        return group

    partial = case.rule == "partial"
    submit = math.ceil(case.prompt_factor * case.num_prompts) if partial else case.num_prompts
    spread = variant.spread is not False
    plan = slime.Plan(cost, tp, max(case.num_devices // tp, 1), case.num_prompts, submit, partial, spread)
    return list(slime.rollouts(plan, fresh, case.steps))


def throughput(found: Sequence[slime.Rollout]) -> float:
    """Tokens per second of rollout."""
    return sum(each.tokens for each in found) / math.fsum(each.seconds for each in found)


def april_speedup(case: Case, calibration: Calibration, variant: Variant, skip: int) -> float:
    """Tokens per second over those of plain batches."""
    plain = replace(case, rule="plain", prompt_factor=1.0)
    before, after = (throughput(april_rollouts(each, calibration, variant)[skip:]) for each in (plain, case))
    return after / before


def stale_shares(case: Case, calibration: Calibration, skip: int) -> list[float]:
    """The share of stale data in three ways: the authors' (last segments of resumed requests, over those and the
    tokens of the rollout), of trained tokens, and of trained responses."""
    found = april_rollouts(case, calibration, AS_CALIBRATED)[skip:]
    resumed, tokens = sum(each.resumed for each in found), sum(each.tokens for each in found)
    trained, stale = sum(each.trained for each in found), sum(each.stale for each in found)
    samples, stale_samples = sum(each.samples for each in found), sum(each.stale_samples for each in found)
    return [resumed / (resumed + tokens), stale / trained, stale_samples / samples]


# ---------------------------------------------------------------- both

Readings = dict[str, list[list[float]]]
"""By name, a value of each case, [models][seeds]."""

STALE = ("stale, as the authors count", "stale, of trained tokens", "stale, of trained responses")


def columns_of(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that differ in the seed alone, together."""
    columns: dict[Case, list[Case]] = {}
    for case in cases:
        columns.setdefault(replace(case, seed=0), []).append(case)
    return list(columns.values())


def names_of(cases: Sequence[Case]) -> list[str]:
    """What is asked about cases of a paper: of tail batching (RollPacker), or of partial rollout (APRIL). At a tiny
    size, nothing is fitted anew: that takes half a minute."""
    if not cases:
        return []
    if cases[0].paper == "april":
        chosen = [variant for variant in APRIL_VARIANTS if variant.filtered_share is None or cases[0].scale == 1]
        return [*(variant.name for variant in chosen), *STALE]
    return [*(variant.name for variant in TAIL_VARIANTS), *PERIODS.values()]


def reading(name: str, case: Case, calibration: Calibration) -> float:
    """A variant's speed-up of a case; a share of stale data; or seconds of a rollout."""
    if case.paper == "april":
        skip = min(APRIL_WARM_UP, case.steps - 1)
        if name in STALE:
            return stale_shares(case, calibration, skip)[STALE.index(name)]
        return april_speedup(case, calibration, _named(APRIL_VARIANTS, name), skip)
    for factors, period in PERIODS.items():
        if name == period:
            prompt, response = FACTORS.get(factors, (1.0, 1.0))
            return period_s(replace(case, prompt_factor=prompt, response_factor=response), calibration)
    return tail_speedup(case, calibration, _named(TAIL_VARIANTS, name))


def _named(variants: Sequence[Variant], name: str) -> Variant:
    return next(variant for variant in variants if variant.name == name)
