"""RhymeRL's baselines and its history as calibration problems.

Purpose: how long responses are and how well the epoch before tells their ranks (Fig. 3, Fig. 9), how fast the machine
decodes and trains (Fig. 2, Fig. 3c), and how much of a response the epoch before foretells (Fig. 6a, and the acceptance
rate of Fig. 17 as an input).

Source: RhymeRL §3.1, §5.1, §6.1, §7; rollout and training in closed form (`papers.closed_form`), drafts by the rules of
`jaxrl.sim.verification`.

Departures: figures 2 and 3 are of a 32B model, at a step that is not named; the constants are taken over for the 14B
models of Fig. 14. Lengths are those of step `AT_STEP`, in the middle of the runs that Fig. 14's averages are over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from jaxrl.config import SimulatedHistory, SimulatedLengths, SimulatedTask
from jaxrl.mechanisms.speculation.rule import DraftWindow
from jaxrl.mechanisms.speculation.simulated import draft_acceptance
from jaxrl.sim.verification import verify
from jaxrl.sim.workload import ModelledWorkload, length_of_score, normal, uniform, word
from jaxrl.types import SampleKey
from papers.closed_form import PROMPT_TOKENS, drain, train_s
from papers.facts import SETUPS
from papers.lengths import SEED
from papers.machines import cost_of, inference
from papers.solver import Constant, Problem, Values

AT_STEP = 50  # of 20 to 80
FORWARDS = 1  # of the reference
TASKS = ("math", "code")

_NORMAL = NormalDist()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- ranks


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
    bounds = np.array([_NORMAL.inv_cdf(i / num_groups) for i in range(1, num_groups)])
    group = np.searchsorted(np.quantile(median, np.arange(1, num_groups) / num_groups), median)
    above = np.append(bounds, np.inf)[group]
    up = [math.erfc((bound - common * a) / rest / math.sqrt(2)) / 2 for bound, a in zip(above, prompt, strict=True)]
    drawn_anew = [math.erfc(bound / math.sqrt(2)) / 2 for bound in above]
    return (1 - outlier_share) * _mean(up) + outlier_share * _mean(drawn_anew)


def _ranks(values: Values) -> dict[str, float]:
    math_c, code_c, outliers = values["math.correlation"], values["code.correlation"], values["outlier_share"]
    of_8 = rank_up_share(math_c, outliers)
    return {
        "rhymerl.math.rank_up_share": of_8,
        "rhymerl.math.rank_up_16_over_8": rank_up_share(math_c, outliers, 16) / of_8,
        "rhymerl.code.rank_up_share": rank_up_share(code_c, outliers),
        "rhymerl.growth_320_steps": (1 + values["lengths.growth"]) ** 320,
    }


# ---------------------------------------------------------------- lengths and the machine


def lengths_at(values: Values, task: str, step: float = AT_STEP) -> SimulatedLengths:
    """A task's lengths in the middle of a run, as they are while nothing grows."""
    grown = (1 + values["lengths.growth"]) ** step
    return SimulatedLengths(median=values["lengths.median"] * grown, sigma=values[f"{task}.lengths.sigma"])


def _lengths(values: Values, task: str) -> list[list[list[int]]]:
    """Batches of the baseline's set-up, [batches][prompts][group]."""
    lengths, longest = lengths_at(values, task), SETUPS["rhymerl.32b"].max_tokens
    scores = _scores(values[f"{task}.correlation"], values["outlier_share"])
    return [[[length_of_score(lengths, longest, z) for z in prompt] for prompt in batch] for batch in scores]


@lru_cache(maxsize=4)
def _scores(correlation: float, outlier_share: float) -> list[list[list[float]]]:
    setup = SETUPS["rhymerl.32b"]
    task = SimulatedTask(correlation=correlation, outlier_share=outlier_share)
    workload = ModelledWorkload(SEED, (task,), setup.max_tokens)
    return [
        [
            [workload.score(SampleKey(0, batch * setup.num_prompts + p, i)) for i in range(setup.group_size)]
            for p in range(setup.num_prompts)
        ]
        for batch in range(_NUM_BATCHES)
    ]


def _machine(values: Values) -> dict[str, float]:
    setup = SETUPS["rhymerl.32b"]
    cost = cost_of(setup, values)
    groups = setup.num_devices // setup.tp
    sigma = values["math.lengths.sigma"]
    facts = {"rhymerl.mean_tokens": values["lengths.median"] * math.exp(sigma**2 / 2)}
    for task in TASKS:
        shares, idle = [], []
        for batch in _lengths(values, task):
            ends = []
            for group in range(groups):
                lengths = [length for prompt in batch[group::groups] for length in prompt]
                ends.append(drain(cost, setup.tp, [PROMPT_TOKENS] * len(lengths), lengths)[-1])
            rollout = max(ends) + cost.weight_sync_s(setup.tp, setup.num_devices)
            shares.append(rollout / (rollout + train_s(cost, setup, batch, PROMPT_TOKENS, FORWARDS)))
            idle.append(1 - min(ends) / max(ends))
        facts[f"rhymerl.{task}.rollout_share"] = _mean(shares)
        if task == "math":
            facts["rhymerl.first_device_idle"] = _mean(idle)
    return facts


_NUM_BATCHES = 5


# ---------------------------------------------------------------- drafts


def history_of(values: Values, task: str) -> SimulatedHistory:
    """How much of a task's responses drafts have right."""
    return SimulatedHistory(
        stretch_median=values[f"{task}.stretch_median"],
        stretch_sigma=values["stretch_sigma"],
        gap_mean=values["gap_mean"],
    )


def draft_rates(history: SimulatedHistory, num_responses: int = 40, num_tokens: int = 1500) -> tuple[float, float]:
    """The share of tokens that drafts have right, and of drafted tokens the share that is accepted."""
    told = [draft_acceptance(history, word(SEED, 2, i), 1, num_tokens) for i in range(num_responses)]
    left = np.full(num_responses, num_tokens)
    found = verify(
        told,
        np.zeros_like(left),
        left,
        left,
        np.full_like(left, DraftWindow().least),
        next_window=DraftWindow().after,
        width=DraftWindow().most,
        num_steps=num_tokens,
        num_stops=num_responses,
    )
    _, drafted, accepted, _, _ = found.counts.sum(1).tolist()
    return _mean([float((each.right > 0).mean()) for each in told]), accepted / drafted


def _drafts(values: Values) -> dict[str, float]:
    facts = {}
    for task in TASKS:
        similarity, accepted = draft_rates(history_of(values, task))
        facts |= {f"rhymerl.{task}.similarity": similarity, f"rhymerl.{task}.accept_rate": accepted}
    return facts


# ---------------------------------------------------------------- the problems

RHYMERL: tuple[Problem, ...] = (
    Problem(
        name="rhymerl",
        constants=(
            Constant("math.correlation", "share", 0.7, 0.5, 0.02, 0.999),
            Constant("code.correlation", "share", 0.5, 0.5, 0.02, 0.999),
            Constant("outlier_share", "share", 0.1, 0.7, 0.001, 0.5),
            Constant("lengths.growth", "share per step", 0.005, 1.0, 1e-5, 0.1),
        ),
        facts=(
            "rhymerl.math.rank_up_share",
            "rhymerl.code.rank_up_share",
            "rhymerl.growth_320_steps",
            "rhymerl.math.rank_up_16_over_8",
        ),
        predict=_ranks,
        assumptions=(
            "groups of 16; ranks depend on scores only, so the length distribution does not matter",
            "of some responses, as many for both tasks, the prompt decides nothing: without them, 16 groups would have "
            "1.67 times as many responses that go up as 8",
        ),
    ),
    Problem(
        name="rhymerl_machine",
        constants=(
            Constant("lengths.median", "tokens", 700.0, 0.7, 50.0, 8000.0),
            Constant("math.lengths.sigma", "log", 0.8, 0.4, 0.1, 2.5),
            Constant("code.lengths.sigma", "log", 0.8, 0.4, 0.1, 2.5),
            *inference("launch_s", "mfu"),
        ),
        facts=(
            "rhymerl.mean_tokens",
            "rhymerl.first_device_idle",
            "rhymerl.math.rollout_share",
            "rhymerl.code.rollout_share",
        ),
        predict=_machine,
        fixed={"efficiency.train_fixed_s": 0.0},
        given={
            "efficiency.memory": "pat_h100",
            "math.correlation": "rhymerl",
            "code.correlation": "rhymerl",
            "outlier_share": "rhymerl",
            "lengths.growth": "rhymerl",
        },
        assumptions=(
            "H800, 512 prompts of 16 responses in a step; both tasks' lengths have one median, and differ in their "
            "spread",
            f"figures 2 and 3c are of lengths as of step {AT_STEP}; lognormal without a tail of its own",
            "memory read as efficiently as by PAT's baseline on the H100; training has one forward pass besides, of "
            "the reference, and no fixed cost of its own",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    Problem(
        name="rhymerl_drafts",
        constants=(
            Constant("math.stretch_median", "tokens", 4.0, 0.7, 0.1, 100.0),
            Constant("code.stretch_median", "tokens", 4.0, 0.7, 0.1, 100.0),
            Constant("stretch_sigma", "log", 1.5, 0.4, 0.1, 4.0),
            Constant("gap_mean", "tokens", 0.5, 0.7, 0.01, 10.0),
        ),
        facts=tuple(f"rhymerl.{task}.{name}" for task in TASKS for name in ("similarity", "accept_rate")),
        predict=_drafts,
        assumptions=(
            "stretches are lognormal, as wide for both tasks, and no epoch's are longer than another's",
            "the acceptance rate of either task lies in the range that is published for both",
        ),
    ),
)
