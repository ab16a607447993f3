"""What the calibration's problems (problems.yaml) compute: each paper's published facts from the simulator's constants.

Source: the set-ups of facts.yaml, in closed form (`papers.closed_form`). RollPacker's rewards of a mixed batch are in
turn, task by task, as in the authors' code (Farrrrland/RollPacker, roll/pipeline/rlvr/rlvr_pipeline_batched_reward.py);
RhymeRL's drafts go by the rules of `jaxrl.sim.drafts`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import yaml

from jaxrl.config import SimulatedHistory, SimulatedLengths, SimulatedTask
from jaxrl.mechanisms.speculation.rule import DraftWindow
from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel, Efficiency
from jaxrl.sim.drafts import draft_acceptance, verify
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import ModelledWorkload, exact_length, length_of_score, normal, uniform, word
from jaxrl.types import SampleKey
from papers import slime
from papers.calibration import Constant, Predict, Problem, Values
from papers.closed_form import (
    NORMAL,
    SEED,
    batches_of,
    cost_of,
    lengths_of,
    mean,
    mixed_batches,
    responses_of,
    rollout_ends,
    rollout_s,
    spreads,
    survival,
    train_s,
)
from papers.facts import HERE, SETUPS, Setup

# ---------------------------------------------------------------- PAT

GROUP = 8  # responses to a prompt where PAT does not say (verl's example); lengths are independent either way
_PAT_FORWARDS = 1
_LIMITS = {"6k": 6144, "16k": 16384}  # that Fig. 3a's ranges are taken to be of


def outlier_batches(setup: Setup, values: Values, num_batches: int = 8) -> list[list[list[int]]]:
    """Batches in which one response reaches the limit."""
    drawn = batches_of(setup, lengths_of(values), 0.0, num_batches)
    return [[[setup.max_tokens], *batch[1:]] for batch in drawn]


def _a40(values: Values) -> dict[str, float]:
    """Fig. 4's seconds per token, and Fig. 3a's shares of time."""
    setup, facts = SETUPS["pat.a40.8b"], {}
    cost = cost_of(setup, values)
    for tp, batch in itertools.product((2, 8), (1, 128)):
        rows = max(batch * tp // setup.num_devices, 1)
        facts[f"pat.a40.tp{tp}_batch{batch}"] = cost.decode_step_s(tp, rows, rows * values["context"])
    for name, tokens in _LIMITS.items():
        drawn = outlier_batches(replace(setup, max_tokens=tokens), values)
        ends = [sorted(end for group in rollout_ends(cost, setup, batch) for end in group) for batch in drawn]
        generation = mean([each[-1] for each in ends])
        rest = mean([train_s(cost, setup.num_devices, batch, _PAT_FORWARDS) for batch in drawn])
        facts[f"pat.a40.single_row_share_{name}"] = mean([(each[-1] - each[-2]) / each[-1] for each in ends])
        facts[f"pat.a40.generation_share_{name}"] = generation / (generation + rest)
    return facts


def _a40_checks(values: Values) -> dict[str, float]:
    outlier = 1 / SETUPS["pat.a40.8b"].num_prompts
    limits = {"8k": 8192, "16k": 16384}.items()
    return {f"pat.share_over_{k}": (1 - outlier) * survival(lengths_of(values), n) + outlier for k, n in limits}


def _h100(values: Values) -> dict[str, float]:
    facts = {}
    for size in ("8b", "14b"):
        setup = SETUPS[f"pat.h100.{size}"]
        cost, drawn = cost_of(setup, values), outlier_batches(setup, values)
        facts[f"pat.h100.{size}_generation"] = mean([rollout_s(cost, setup, batch) for batch in drawn])
        if size == "8b":
            rest = mean([train_s(cost, setup.num_devices, batch, _PAT_FORWARDS) for batch in drawn])
            facts["pat.h100.8b_step"] = facts["pat.h100.8b_generation"] + rest
    return facts


def _h100_checks(values: Values) -> dict[str, float]:
    return {"pat.h100.8b_mean_length": float(np.mean(outlier_batches(SETUPS["pat.h100.8b"], values)))}


# ---------------------------------------------------------------- APRIL


def _april(values: Values) -> dict[str, float]:
    batches = batches_of(SETUPS["april.4b"], lengths_of(values), values["correlation"], 6)
    batch_std, instance_std = spreads(batches)
    facts = {"april.batch_std": batch_std, "april.instance_std": instance_std}
    for size in ("4b", "8b"):
        facts[f"april.{size}.throughput"] = april_throughput(size, values, 0.0)
        facts[f"april.{size}.dapo_throughput"] = april_throughput(size, values, values["filtered_share"])
    return facts


def april_throughput(size: str, values: Values, filtered_share: float, num_rollouts: int = 8) -> float:
    """Tokens per second of baseline rollouts in which that share of the groups is dropped (0: GRPO)."""
    setup, lengths, prompts = SETUPS[f"april.{size}"], lengths_of(values), itertools.count()
    servers = setup.num_devices // setup.tp
    plan = slime.Plan(cost_of(setup, values), setup.tp, servers, setup.num_prompts, setup.num_prompts)

    def fresh() -> slime.Group:
        prompt = next(prompts)
        drawn = responses_of(setup, lengths, values["correlation"], prompt)
        return slime.group_of(prompt, uniform(SEED, 1, prompt) < filtered_share, drawn)

    return slime.throughput(list(slime.rollouts(plan, fresh, num_rollouts)))


# ---------------------------------------------------------------- RhymeRL

AT_STEP = 50  # of 20 to 80: the middle of the runs that Fig. 14's averages are over
_RHYMERL_BATCHES, _RHYMERL_FORWARDS = 5, 1  # the reference's


@lru_cache(maxsize=1)
def _draws() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of 4,096 prompts: their part of the score, [P]; of 16 responses of each their own part, and a number that says
    whether it is an outlier, [P, 16]."""
    prompts = range(4096)
    own = np.array([[normal(SEED, 1, p, i) for i in range(16)] for p in prompts])
    chance = np.array([[uniform(SEED, 3, p, i) for i in range(16)] for p in prompts])
    return np.array([normal(SEED, 0, p) for p in prompts]), own, chance


def rank_up_share(correlation: float, outlier_share: float = 0.0, num_groups: int = 8) -> float:
    """RhymeRL Fig. 9: the share of responses in a higher ranking group than their prompt's median an epoch before.

    Groups are bounded by quantiles: those of a normal distribution for responses, those found for medians.
    """
    prompt, own, chance = _draws()
    c = min(max(correlation, 1e-9), 1 - 1e-9)
    common, rest = math.sqrt(c), math.sqrt(1 - c)
    scores = np.where(chance < outlier_share, own, common * prompt[:, None] + rest * own)
    median = np.median(scores, axis=1)
    bounds = np.array([NORMAL.inv_cdf(i / num_groups) for i in range(1, num_groups)])
    group = np.searchsorted(np.quantile(median, np.arange(1, num_groups) / num_groups), median)
    above = np.append(bounds, np.inf)[group]
    up = [math.erfc((bound - common * a) / rest / math.sqrt(2)) / 2 for bound, a in zip(above, prompt, strict=True)]
    drawn_anew = [math.erfc(bound / math.sqrt(2)) / 2 for bound in above]
    return (1 - outlier_share) * mean(up) + outlier_share * mean(drawn_anew)


def _ranks(values: Values) -> dict[str, float]:
    outliers = values["outlier_share"]
    of_8 = rank_up_share(values["math.correlation"], outliers)
    return {
        "rhymerl.math.rank_up_share": of_8,
        "rhymerl.math.rank_up_16_over_8": rank_up_share(values["math.correlation"], outliers, 16) / of_8,
        "rhymerl.code.rank_up_share": rank_up_share(values["code.correlation"], outliers),
        "rhymerl.growth_320_steps": (1 + values["lengths.growth"]) ** 320,
    }


def lengths_at(values: Values, task: str) -> SimulatedLengths:
    """A task's lengths at step `AT_STEP`, as they are while nothing grows."""
    grown = (1 + values["lengths.growth"]) ** AT_STEP
    return SimulatedLengths(median=values["lengths.median"] * grown, sigma=values[f"{task}.lengths.sigma"])


@lru_cache(maxsize=4)
def _rhymerl_scores(correlation: float, outlier_share: float) -> list[list[list[float]]]:
    """Of the baseline's responses, [batches][prompts][group]."""
    setup = SETUPS["rhymerl.32b"]
    task = SimulatedTask(correlation=correlation, outlier_share=outlier_share)
    workload = ModelledWorkload(SEED, (task,), setup.max_tokens)
    return [
        [[workload.score(SampleKey(0, p, i)) for i in range(setup.group_size)] for p in range(first, first + size)]
        for size in (setup.num_prompts,)
        for first in range(0, _RHYMERL_BATCHES * size, size)
    ]


def _rhymerl_machine(values: Values) -> dict[str, float]:
    setup = SETUPS["rhymerl.32b"]
    cost = cost_of(setup, values)
    facts = {"rhymerl.mean_tokens": values["lengths.median"] * math.exp(values["math.lengths.sigma"] ** 2 / 2)}
    for task in ("math", "code"):
        lengths, shares, idle = lengths_at(values, task), [], []
        for scores in _rhymerl_scores(values[f"{task}.correlation"], values["outlier_share"]):
            batch = [[length_of_score(lengths, setup.max_tokens, z) for z in prompt] for prompt in scores]
            ends = [group[-1] for group in rollout_ends(cost, setup, batch)]
            rollout = max(ends) + cost.weight_sync_s(setup.tp, setup.num_devices)
            shares.append(rollout / (rollout + train_s(cost, setup.num_devices, batch, _RHYMERL_FORWARDS)))
            idle.append(1 - min(ends) / max(ends))
        facts[f"rhymerl.{task}.rollout_share"] = mean(shares)
        if task == "math":
            facts["rhymerl.first_device_idle"] = mean(idle)
    return facts


def history_of(values: Values, task: str) -> SimulatedHistory:
    """How much of a task's responses drafts have right."""
    median = values[f"{task}.stretch_median"]
    sigma, gap = values["stretch_sigma"], values["gap_mean"]
    return SimulatedHistory(stretch_median=median, stretch_sigma=sigma, gap_mean=gap)


def _drafts(values: Values, num_responses: int = 40, num_tokens: int = 1500) -> dict[str, float]:
    """The share of tokens that drafts have right, and of drafted tokens the share that is accepted."""
    facts, window, left = {}, DraftWindow(), np.full(num_responses, num_tokens)
    for task in ("math", "code"):
        history = history_of(values, task)
        drafted_right = [draft_acceptance(history, word(SEED, 2, i), 1, num_tokens) for i in range(num_responses)]
        found = verify(
            drafted_right,
            np.zeros_like(left),
            left,
            left,
            np.full_like(left, window.least),
            next_window=window.after,
            width=window.most,
            num_steps=num_tokens,
            num_stops=num_responses,
        )
        _, drafted, accepted, _, _ = found.counts.sum(1).tolist()
        facts[f"rhymerl.{task}.similarity"] = mean([float((each.right > 0).mean()) for each in drafted_right])
        facts[f"rhymerl.{task}.accept_rate"] = accepted / drafted
    return facts


# ---------------------------------------------------------------- RollPacker

TASKS = ("math", "code", "judge")
FORWARDS = 2  # passes beside the update: old log-probabilities and the reference model
_OWN_FORWARDS = 1  # the same in RollPacker's trainer, which skips the old log-probabilities
_FACTOR = 1.25  # of prompts and of responses, that a short round begins
_NUM_BATCHES = 5
_QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95}


def task_lengths(values: Values, task: str) -> SimulatedLengths:
    """A task's lengths; `tail_factor`, where there is one, is of a model with a tail of its own."""
    own = {name.removeprefix(f"{task}."): value for name, value in values.items() if name.startswith(f"{task}.lengths")}
    own["lengths.tail_index"] *= values.get("tail_factor", 1.0)
    return lengths_of(own)


def _lengths(values: Values) -> dict[str, float]:
    facts = {}
    for task in TASKS:
        lengths = task_lengths(values, task)
        for name, share in _QUANTILES.items():
            facts[f"rollpacker.{task}.{name}"] = exact_length(lengths, NORMAL.inv_cdf(share))
        facts[f"rollpacker.{task}.at_limit"] = survival(lengths, SETUPS["rollpacker.table1"].max_tokens)
    return facts


def capped_share(setup: Setup, values: Values) -> float:
    """The share of mixed batches with a response that reaches the limit."""
    common, own = math.sqrt(values["correlation"]), math.sqrt(1 - values["correlation"])
    prompt = np.linspace(-8, 8, 801)  # a prompt's part of the score, integrated over
    weight = np.exp(-(prompt**2) / 2)
    none = 0.0
    for task in TASKS:
        limit = -NORMAL.inv_cdf(survival(task_lengths(values, task), setup.max_tokens))
        below = np.array([1 - math.erfc((limit - common * a) / own / math.sqrt(2)) / 2 for a in prompt])
        none += setup.num_prompts / len(TASKS) * math.log((weight * below**setup.group_size).sum() / weight.sum())
    return 1 - math.exp(none)


def deferred_median(values: Values, factor: float = 1.25, num_rounds: int = 40) -> float:
    """Median length of deferred prompts of code, drawn anew, over that of all: short rounds of the 14B set-up end with
    the first prompts of which enough responses have, shorter ones first."""
    setup, common = SETUPS["rollpacker.14b"], math.sqrt(values["correlation"])
    own, size = math.sqrt(1 - values["correlation"]), setup.group_size
    prompt, first, again = _short_rounds(num_rounds, int(factor * setup.num_prompts), int(factor * size))
    ended = np.sort(common * prompt[..., None] + own * first, -1)[..., size - 1]
    late = np.argsort(ended, -1)[:, setup.num_prompts :]
    drawn = common * np.take_along_axis(prompt, late, -1)[..., None]
    drawn = drawn + own * np.take_along_axis(again, late[..., None], 1)[..., :size]
    lengths = task_lengths(values, "code")
    return exact_length(lengths, float(np.median(drawn))) / exact_length(lengths, 0.0)


@lru_cache(maxsize=1)
def _short_rounds(num_rounds: int, prompts: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard normal scores of rounds: of prompts, and twice of their responses."""
    rng = np.random.default_rng(SEED)
    shape = num_rounds, prompts
    return rng.normal(size=shape), rng.normal(size=(*shape, size)), rng.normal(size=(*shape, size))


def reward_stage_s(values: Values, task: str, num_samples: int) -> float:
    """Seconds of scoring after the rollout: each worker takes the next response when it is free, and responses that
    hang until the time-out come at even distances."""
    seconds, hangs, timeout = (values[f"reward.{task}.{name}"] for name in ("median_s", "hang_share", "timeout_s"))
    free = [0.0] * int(values[f"reward.{task}.workers"])
    for i in range(num_samples):
        hung = math.floor((i + 1) * hangs) > math.floor(i * hangs)
        heapq.heappush(free, heapq.heappop(free) + (timeout if hung else seconds))
    return max(free)


def mixed_reward_s(values: Values, setup: Setup) -> float:
    """Seconds of scoring a mixed batch, its tasks in turn."""
    num_samples = setup.num_prompts * setup.group_size // len(TASKS)
    return math.fsum(reward_stage_s(values, task, num_samples) for task in TASKS)


@lru_cache(maxsize=64)
def _decoding_s(
    setup: Setup, eff: Efficiency, lengths: tuple[SimulatedLengths, ...], correlation: float
) -> tuple[float, ...]:
    """Seconds of decoding each batch of a set-up: most of a fit's time, and asked again for the same."""
    cost = CostModel(named_shape(setup.model), HARDWARE[setup.hardware], eff)
    return tuple(rollout_s(cost, setup, batch) for batch in mixed_batches(setup, lengths, correlation, _NUM_BATCHES))


def _rollouts_s(setup: Setup, values: Values, tasks: Sequence[str]) -> list[float]:
    """Seconds of rollouts of batches of these tasks, with weights and waking."""
    cost, lengths = cost_of(setup, values), tuple(task_lengths(values, task) for task in tasks)
    decoding = replace(cost.efficiency, mfu=1.0, train_fixed_s=0.0, rollout_fixed_s=0.0)  # the rest does not touch it
    start = cost.weight_sync_s(setup.tp, setup.num_devices) + cost.efficiency.rollout_fixed_s
    return [start + seconds for seconds in _decoding_s(setup, decoding, lengths, values["correlation"])]


def _stages_s(name: str, values: Values, tasks: Sequence[str], forwards: int = FORWARDS) -> tuple[float, float]:
    """Mean seconds of rollout and training of batches of these tasks."""
    setup, cost = SETUPS[name], cost_of(SETUPS[name], values)
    lengths = tuple(task_lengths(values, task) for task in tasks)
    batches = mixed_batches(setup, lengths, values["correlation"], _NUM_BATCHES)
    train = mean([train_s(cost, setup.num_devices, batch, forwards) for batch in batches])
    return mean(_rollouts_s(setup, values, tasks)), train


def _table1(values: Values) -> dict[str, float]:
    setup, facts = SETUPS["rollpacker.table1"], {}
    for task in TASKS:
        rollout, train = _stages_s("rollpacker.table1", values, (task,))
        reward = reward_stage_s(values, task, setup.num_prompts * setup.group_size)
        if task == "code":
            facts["rollpacker.14b.code_step_s"] = rollout + reward + train
        for stage, seconds in (("rollout", rollout), ("reward", reward), ("train", train)):
            facts[f"rollpacker.{task}.{stage}_share"] = seconds / (rollout + reward + train)
    facts["rollpacker.artifact_fixed_s"] = values["efficiency.rollout_fixed_s"]
    facts["rollpacker.code.deferred_median"] = deferred_median(values)
    return facts | _mixed("14b", values) | _at_degrees(values, ((1, 8), (1, 14), (2, 14), (2, 20)))


def _at_degrees(values: Values, points: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Fig. 13a: a rollout of math by degree and longest response."""
    of_16 = replace(SETUPS["rollpacker.14b"], num_devices=16)
    return {
        f"rollpacker.14b.tp{tp}_{k}k_s": mean(
            _rollouts_s(replace(of_16, tp=tp, max_tokens=1024 * k), values, ("math",))
        )
        for tp, k in points
    }


def _table1_checks(values: Values) -> dict[str, float]:
    """Time per token over the batch (§4.1), and Fig. 13a's highest degree."""
    setup = SETUPS["rollpacker.table1"]
    cost = cost_of(setup, values)
    context = float(length_of_score(task_lengths(values, "math"), setup.max_tokens, NORMAL.inv_cdf(0.75)))
    tpot = [cost.decode_step_s(setup.tp, rows, rows * context) for rows in (32, 64)]
    return {"rollpacker.tpot_64_over_32": tpot[1] / tpot[0]} | _at_degrees(values, ((4, 24), (4, 32)))


def _mixed(size: str, values: Values) -> dict[str, float]:
    """A model's step on the uniform mix of tasks (§6)."""
    name = f"rollpacker.{size}"
    rollout, train = _stages_s(name, values, TASKS)
    step = rollout + train + mixed_reward_s(values, SETUPS[name])
    facts = {f"{name}.rollout_s": rollout, f"{name}.step_s": step}
    facts[f"{name}.math_rollout_s"] = max(_rollouts_s(SETUPS[name], values, ("math",)))
    return facts | {f"{name}.capped_steps": capped_share(SETUPS[name], values)}


def _long_round_7b(values: Values) -> dict[str, float]:
    """Table 3's step without GPU scaling: a long round of math prompts, scored while other responses decode.

    Its prompts are the fifth that had the longest responses; what they answer in the long round is drawn anew.
    """
    setup, lengths = SETUPS["rollpacker.7b"], task_lengths(values, "math")
    correlation, cost = values["correlation"], cost_of(setup, values)
    first = {p: max(responses_of(setup, lengths, correlation, p)) for p in range(5 * setup.num_prompts)}
    chosen = sorted(first, key=first.__getitem__)[-setup.num_prompts :]
    batch = [responses_of(setup, lengths, correlation, p, attempt=1) for p in chosen]
    step = rollout_s(cost, setup, batch) + train_s(cost, setup.num_devices, batch, FORWARDS)
    step += cost.weight_sync_s(setup.tp, setup.num_devices) + cost.efficiency.rollout_fixed_s
    return {"rollpacker.7b_long_round_step": step}


def _own_trainer(values: Values) -> dict[str, float]:
    """Table 3's step without GPU scaling, in the authors' own set-up for that table."""
    return {"rollpacker.7b_own_trainer_step": sum(_stages_s("rollpacker.7b", values, ("math",), _OWN_FORWARDS))}


def _system(size: str, values: Values) -> dict[str, float]:
    """Fig. 11c's seconds of a short round, in which the first prompts of which enough responses have ended make the
    batch: of its start and training, and of its rollout, for which each response that is aborted stops the engines."""
    name = f"rollpacker.{size}"
    setup, cost = SETUPS[name], cost_of(SETUPS[name], values)
    begun = replace(setup, num_prompts=int(_FACTOR * setup.num_prompts), group_size=int(_FACTOR * setup.group_size))
    lengths = [task_lengths(values, task) for task in TASKS]
    last, rollout, train = setup.group_size - 1, [], []
    for batch in mixed_batches(begun, lengths, values["correlation"], _NUM_BATCHES):
        ended = sorted(map(sorted, batch), key=lambda group: group[last])
        ends = [group[last] for group in ended[: setup.num_prompts]]
        ends += ends[-1:] * (len(ended) - len(ends))  # the deferred, with the last that is kept
        drawn = [[min(n, end) for n in group] for group, end in zip(ended, ends, strict=True)]
        aborted = sum(n > end for group, end in zip(ended, ends, strict=True) for n in group)
        rollout.append(rollout_s(cost, begun, drawn) + aborted * values["abort_s"])
        kept = [group[: setup.group_size] for group in ended[: setup.num_prompts]]
        train.append(train_s(cost, setup.num_devices, kept, _OWN_FORWARDS))
    start = cost.weight_sync_s(setup.tp, setup.num_devices) + cost.efficiency.rollout_fixed_s
    seconds = {"start": start, "train": mean(train), "gen": mean(rollout)}
    return {f"{name}.short_{part}_s": value for part, value in seconds.items()}


# ---------------------------------------------------------------- all of them

_PREDICTIONS: dict[str, tuple[Predict, ...]] = {
    "pat_a40": (_a40, _a40_checks),
    "pat_h100": (_h100, _h100_checks),
    "april": (_april,),
    "rhymerl": (_ranks,),
    "rhymerl_machine": (_rhymerl_machine,),
    "rhymerl_drafts": (_drafts,),
    "rollpacker_lengths": (_lengths,),
    "rollpacker": (_table1, _table1_checks),
    "rollpacker_7b": (partial(_mixed, "7b"), _long_round_7b),
    "rollpacker_7b_trainer": (_own_trainer,),
    "rollpacker_32b": (partial(_mixed, "32b"),),
    "rollpacker_7b_system": (partial(_system, "7b"),),
    "rollpacker_system": (partial(_system, "14b"),),
    "rollpacker_32b_system": (partial(_system, "32b"),),
}


def _problem(name: str, entry: dict) -> Problem:
    free = tuple(Constant(*each) for each in entry.pop("constants"))
    predict, *checks = _PREDICTIONS[name]
    return Problem(name, free, predict=predict, checks=checks[0] if checks else lambda _: {}, **entry)


PROBLEMS = {
    name: _problem(name, entry)
    for name, entry in yaml.safe_load((HERE / "problems.yaml").read_text(encoding="utf-8"))["problems"].items()
}
