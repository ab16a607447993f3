"""The calibration's problems: what each paper's baseline says about the simulator's constants.

Purpose: each `Problem` names the free constants, the published facts that they must explain, and the assumptions where
a paper is silent. It computes the facts from the constants; `papers.solver` finds the constants from the facts.

Source: the set-ups of `papers.facts.SETUPS`, in closed form (`papers.closed_form`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from jaxrl.config import SimulatedLengths
from jaxrl.models.shapes import named_shape
from jaxrl.sim.calibration import efficiency_of
from jaxrl.sim.cost_model import Efficiency, RooflineCost
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import exact_length, normal
from papers.closed_form import PROMPT_TOKENS, rollout_ends, train_s
from papers.facts import SETUPS, Setup
from papers.lengths import SEED, batches_of, lengths_of, quantile, spreads, survival
from papers.solver import Constant, Problem, Values

_NORMAL = NormalDist()


def cost_of(setup: Setup, values: Values) -> RooflineCost:
    """The cost model of a published set-up."""
    return RooflineCost(named_shape(setup.model), HARDWARE[setup.hardware], efficiency_of(values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- PAT


def _pat_a40(values: Values) -> dict[str, float]:
    setup = SETUPS["pat.a40.8b"]
    cost = cost_of(setup, values)
    facts = {}
    for tp in (2, 8):
        for batch in (1, 128):
            rows = max(batch * tp // setup.num_devices, 1)
            facts[f"pat.a40.tp{tp}_batch{batch}"] = cost.decode_step_s(tp, rows, rows * values["context"])
    return facts


def _pat_a40_checks(values: Values) -> dict[str, float]:
    setup = SETUPS["pat.a40.8b"]
    cost = cost_of(setup, values)
    generation, single, rest = [], [], []
    for batch in _pat_batches(setup, values):
        ends = rollout_ends(cost, setup, batch, PROMPT_TOKENS)
        generation.append(ends[-1])
        single.append((ends[-1] - ends[-2]) / ends[-1])
        rest.append(train_s(cost, setup, batch, PROMPT_TOKENS, forwards=1))
    return {
        "pat.a40.single_row_share": _mean(single),
        "pat.a40.generation_share": _mean(generation) / (_mean(generation) + _mean(rest)),
    }


def _pat_batches(setup: Setup, values: Values) -> list[list[list[int]]]:
    """Batches in which a response reaches the cap, as in every step that PAT reports (§5.1)."""
    batches = batches_of(setup, lengths_of(values), 0.0, 5)
    for batch in batches:
        longest = max(range(len(batch)), key=lambda i: batch[i][0])
        batch[longest][0] = setup.max_tokens
    return batches


def _pat_lengths(values: Values) -> dict[str, float]:
    lengths = lengths_of(values)
    return {"pat.share_over_8k": survival(lengths, 8192), "pat.share_over_16k": survival(lengths, 16384)}


def _pat_h100(values: Values) -> dict[str, float]:
    facts = {}
    for size in ("8b", "14b"):
        setup = SETUPS[f"pat.h100.{size}"]
        cost = cost_of(setup, values)
        batches = _pat_batches(setup, values)
        generation = _mean([rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1] for batch in batches])
        facts[f"pat.h100.{size}_generation"] = generation
        if size == "8b":
            rest = _mean([train_s(cost, setup, batch, PROMPT_TOKENS, forwards=1) for batch in batches])
            facts["pat.h100.8b_step"] = generation + rest
    return facts


def _pat_h100_checks(values: Values) -> dict[str, float]:
    return {"pat.h100.8b_mean_length": float(np.mean(_pat_batches(SETUPS["pat.h100.8b"], values)))}


# ---------------------------------------------------------------- APRIL


def _april(values: Values) -> dict[str, float]:
    setup = SETUPS["april.4b"]
    batches = batches_of(setup, lengths_of(values), values["correlation"], 6)
    batch_std, instance_std = spreads(batches)
    facts = {"april.batch_std": batch_std, "april.instance_std": instance_std}
    for size in ("4b", "8b"):
        setup = SETUPS[f"april.{size}"]
        cost = cost_of(setup, values)
        seconds = [rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1] for batch in batches]
        facts[f"april.{size}.throughput"] = float(np.sum(batches)) / math.fsum(seconds)
    return facts


# ---------------------------------------------------------------- RhymeRL


@lru_cache(maxsize=1)
def _rank_scores() -> tuple[np.ndarray, np.ndarray]:
    """Of 4,096 prompts: their part of the score, and the median of 16 responses' own parts; [P] each."""
    prompts = range(4096)
    own = np.array([[normal(SEED, 1, p, i) for i in range(16)] for p in prompts])
    return np.array([normal(SEED, 0, p) for p in prompts]), np.median(own, axis=1)


def rank_up_share(correlation: float, num_groups: int = 8) -> float:
    """RhymeRL Fig. 9: the share of responses in a higher ranking group than their prompt's median an epoch before.

    Groups are bounded by quantiles: those of a normal distribution for responses, and for medians one of their
    variance, which is close. So the share is smooth in the correlation; 0 and 1 are taken as just inside.
    """
    prompt, median = _rank_scores()
    c = min(max(correlation, 1e-9), 1 - 1e-9)
    common, own = math.sqrt(c), math.sqrt(1 - c)
    bounds = np.array([_NORMAL.inv_cdf(i / num_groups) for i in range(1, num_groups)])
    spread = math.sqrt(c + (1 - c) * float(median.var()))
    above = np.append(bounds, np.inf)[np.searchsorted(bounds * spread, common * prompt + own * median)]
    share = [math.erfc((bound - common * a) / own / math.sqrt(2)) / 2 for bound, a in zip(above, prompt, strict=True)]
    return _mean(share)


def _rhymerl(values: Values) -> dict[str, float]:
    return {
        "rhymerl.math.rank_up_share": rank_up_share(values["math.correlation"]),
        "rhymerl.code.rank_up_share": rank_up_share(values["code.correlation"]),
        "rhymerl.growth_320_steps": (1 + values["lengths.growth"]) ** 320,
    }


# ---------------------------------------------------------------- RollPacker


def reward_stage_s(values: Values, task: str, num_samples: int) -> float:
    """Seconds of scoring after the rollout: what its workers need for all, or one time-out if some response hangs."""
    hangs, timeout = values[f"reward.{task}.hang_share"], values[f"reward.{task}.timeout_s"]
    each = (1 - hangs) * values[f"reward.{task}.median_s"] + hangs * timeout
    return max(num_samples * each / values[f"reward.{task}.workers"], timeout * (hangs * num_samples >= 1))


@lru_cache(maxsize=32)
def _rollouts_s(name: str, eff: Efficiency, lengths: SimulatedLengths, correlation: float, num: int) -> list[float]:
    """Seconds of the rollouts of `num` batches of a set-up: most of a fit's time, and asked again for the same."""
    setup = SETUPS[name]
    cost = RooflineCost(named_shape(setup.model), HARDWARE[setup.hardware], eff)
    return [
        rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1] for batch in batches_of(setup, lengths, correlation, num)
    ]


def _rollpacker(values: Values) -> dict[str, float]:
    setup = SETUPS["rollpacker.table1"]
    cost, lengths = cost_of(setup, values), lengths_of(values)
    batches = batches_of(setup, lengths, values["math.correlation"], 6)
    inference = replace(cost.efficiency, mfu=1.0, train_fixed_s=0.0)  # the rest does not touch a rollout
    rollout = _mean(_rollouts_s("rollpacker.table1", inference, lengths, values["math.correlation"], len(batches)))
    train = _mean([train_s(cost, setup, batch, PROMPT_TOKENS, forwards=2) for batch in batches])
    num_samples = setup.num_prompts * setup.group_size
    uncapped = batches_of(setup, lengths, values["math.correlation"], 16, longest=1 << 30)
    longest = math.exp(_mean([math.log(max(max(prompt) for prompt in batch)) for batch in uncapped]))
    facts = {
        "rollpacker.p75": exact_length(lengths, _NORMAL.inv_cdf(0.75)),
        "rollpacker.max_over_median": min(longest, setup.max_tokens) / lengths.median,
        "rollpacker.longest": longest,
    }
    for task in ("math", "code", "judge"):
        reward = reward_stage_s(values, task, num_samples)
        for stage, seconds in (("rollout", rollout), ("reward", reward), ("train", train)):
            facts[f"rollpacker.{task}.{stage}_share"] = seconds / (rollout + reward + train)
    return facts


def _rollpacker_checks(values: Values) -> dict[str, float]:
    """Time per token over the batch (§4.1), and Table 3's step: the fifth of the prompts with the longest responses,
    and scoring at no cost, because it runs while other responses decode."""
    profiled = SETUPS["rollpacker.table1"]
    cost, context = cost_of(profiled, values), float(quantile(lengths_of(values), profiled.max_tokens, 0.75))
    tpot = [cost.decode_step_s(profiled.tp, rows, rows * context) for rows in (32, 64)]
    setup = SETUPS["rollpacker.7b"]
    cost = cost_of(setup, values)
    drawn = batches_of(setup, lengths_of(values), values["math.correlation"], 5)
    prompts = sorted((prompt for batch in drawn for prompt in batch), key=max)[-setup.num_prompts :]
    rollout = rollout_ends(cost, setup, prompts, PROMPT_TOKENS)[-1]
    step = rollout + train_s(cost, setup, prompts, PROMPT_TOKENS, forwards=2)
    return {"rollpacker.tpot_64_over_32": tpot[1] / tpot[0], "rollpacker.7b_long_round_step": step}


# ---------------------------------------------------------------- all of them


def _inference(*names: str) -> tuple[Constant, ...]:
    """Constants of decoding, with priors that all machines share."""
    known = {
        "memory": Constant("efficiency.memory", "share", 0.8, 0.15, 0.3, 1.0),
        "launch_s": Constant("efficiency.launch_s", "s per layer", 50e-6, 0.8, 2e-6, 1e-3),
        "collective_s": Constant("efficiency.collective_s", "s", 10e-6, 0.8, 1e-6, 3e-4),
        "link": Constant("efficiency.link", "share", 0.5, 0.5, 0.05, 1.0),
        "mfu": Constant("efficiency.mfu", "share", 0.3, 0.5, 0.02, 0.7),
        "train_fixed_s": Constant("efficiency.train_fixed_s", "s", 10.0, 0.7, 0.1, 200.0),
    }
    return tuple(known[name] for name in names)


_ROLLPACKER_FACTS = (
    *(f"rollpacker.{t}.{s}_share" for t in ("math", "code", "judge") for s in ("rollout", "reward", "train")),
    *(f"rollpacker.{n}" for n in ("max_over_median", "p75", "longest", "tpot_64_over_32", "7b_long_round_step")),
)

PROBLEMS: tuple[Problem, ...] = (
    Problem(
        name="pat_lengths",
        constants=(
            Constant("lengths.median", "tokens", 2000.0, 1.0, 100.0, 20000.0),
            Constant("lengths.sigma", "log", 0.8, 0.5, 0.1, 2.5),
        ),
        facts=("pat.share_over_8k", "pat.share_over_16k"),
        predict=_pat_lengths,
        assumptions=("lognormal without a tail of its own",),
    ),
    Problem(
        name="pat_h100",
        constants=_inference("memory", "launch_s", "mfu", "train_fixed_s"),
        facts=("pat.h100.8b_generation", "pat.h100.14b_generation", "pat.h100.8b_step", "pat.h100.8b_mean_length"),
        predict=_pat_h100,
        predict_checks=_pat_h100_checks,
        given={"lengths.median": "pat_lengths", "lengths.sigma": "pat_lengths"},
        assumptions=(
            "static TP 2 (tuned, not said)",
            "Qwen3-14B's responses as long as LLaMA3.1-8B's",
            "preparation is one forward pass, one update per step",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    Problem(
        name="pat_a40",
        constants=_inference("memory", "launch_s", "collective_s", "link"),
        facts=(
            *(f"pat.a40.tp{tp}_batch{batch}" for tp in (2, 8) for batch in (1, 128)),
            "pat.a40.generation_share",
            "pat.a40.single_row_share",
        ),
        predict=_pat_a40,
        predict_checks=_pat_a40_checks,
        fixed={"context": 1024.0},
        given={
            "lengths.median": "pat_lengths",
            "lengths.sigma": "pat_lengths",
            "efficiency.mfu": "pat_h100",
            "efficiency.train_fixed_s": "pat_h100",
        },
        assumptions=("Fig. 4's contexts are not said: 1,024 tokens a row", "training as efficient as on the H100"),
    ),
    Problem(
        name="april",
        constants=(
            Constant("lengths.median", "tokens", 4000.0, 0.7, 300.0, 16000.0),
            Constant("lengths.sigma", "log", 0.8, 0.4, 0.1, 2.5),
            Constant("correlation", "share", 0.8, 0.3, 0.02, 0.995),
            *_inference("memory", "launch_s"),
        ),
        facts=("april.4b.throughput", "april.8b.throughput", "april.batch_std", "april.instance_std"),
        predict=_april,
        assumptions=(
            "TP 1 (not said)",
            "both models' responses equally long on all three data sets; lognormal without a tail of its own",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    Problem(
        name="rhymerl",
        constants=(
            Constant("math.correlation", "share", 0.7, 0.5, 0.02, 0.999),
            Constant("code.correlation", "share", 0.5, 0.5, 0.02, 0.999),
            Constant("lengths.growth", "share per step", 0.005, 1.0, 1e-5, 0.1),
        ),
        facts=("rhymerl.math.rank_up_share", "rhymerl.code.rank_up_share", "rhymerl.growth_320_steps"),
        predict=_rhymerl,
        assumptions=("groups of 16; ranks depend on scores only, so the length distribution does not matter",),
    ),
    Problem(
        name="rollpacker",
        constants=(
            Constant("lengths.median", "tokens", 600.0, 0.7, 50.0, 8000.0),
            Constant("lengths.sigma", "log", 0.8, 0.5, 0.1, 2.5),
            Constant("lengths.tail_index", "exponent", 1.8, 0.5, 0.5, 10.0),
            *_inference("launch_s", "mfu", "train_fixed_s"),
            Constant("reward.math.median_s", "s", 0.02, 1.0, 1e-4, 2.0),
            Constant("reward.code.median_s", "s", 1.0, 1.0, 1e-2, 30.0),
            Constant("reward.judge.median_s", "s", 1.0, 1.0, 1e-2, 60.0),
        ),
        facts=_ROLLPACKER_FACTS,
        predict=_rollpacker,
        predict_checks=_rollpacker_checks,
        fixed={
            "lengths.tail_from": 0.9,
            "reward.math.workers": 1.0,
            "reward.math.hang_share": 0.0,
            "reward.code.workers": 64.0,
            "reward.judge.workers": 32.0,
            "reward.judge.hang_share": 0.0,
            "reward.judge.timeout_s": 60.0,
        },
        cited={
            "reward.math.timeout_s": "rollpacker.math.timeout",
            "reward.code.timeout_s": "rollpacker.code.timeout",
            "reward.code.hang_share": "rollpacker.sandbox_timeout_share",
        },
        given={
            "efficiency.memory": "pat_h100",
            "math.correlation": "rhymerl",
            "code.correlation": "rhymerl",
        },
        assumptions=(
            "all three tasks share one length distribution: the text gives ranges over them; its tail starts at P90",
            "memory efficiency as of PAT's baseline on the H100; ranks as stable as in RhymeRL's math tasks",
            "the code task's reward stage takes one 30 s time-out at least, which sets the scale of all times",
            "Table 1's training holds two forward passes (old log-probabilities, reference) and one update",
            "rewards are scored after the rollout, by 1 (math), 64 (code) and 32 (judge) workers",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
)
