"""The papers' baselines as functions of a few constants: what `jaxrl.sim.calibrate` turns round.

Purpose: each `Problem` says which constants are free, which published facts they must explain, what is assumed where
a paper is silent, and computes the facts from the constants.

Source: the set-ups of `jaxrl.sim.published.SETUPS`. A synchronous rollout is drained without a queue: every row starts
at once, and a dp group decodes on with the rows that are left (RollPacker §2.2, PAT §2.3).

Departures: no queue, since all rows of all set-ups fit the devices' KV pools; dp groups do not wait for one another
within a rollout (the baselines run one engine per group); drawn lengths come from a few batches of a fixed seed, so a
predicted value carries their sampling noise (a few per cent), the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel, Efficiency, RooflineCost, TrainLoad, causal_pairs
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.published import SETUPS, Setup
from jaxrl.sim.workload import LengthDistribution, batch_statistics, normal

Values = Mapping[str, float]
_SEED = 20260504
_NORMAL = NormalDist()
_PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Constant:
    """A free constant: its prior and how far from it a fit may go.

    `spread` is the prior's standard deviation of the logarithm; the constant stays within [low, high].
    """

    name: str
    unit: str
    prior: float
    spread: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Constants to find from facts.

    Attributes:
      name: unique.
      constants: free ones.
      facts: names in `published.FACTS` that `predict` computes, of the roles fit and check.
      predict: constants by name (free, fixed, cited and given ones) -> facts of role fit by name.
      predict_checks: the same for facts of role check, asked once at the solution.
      fixed: constants that no fact determines, with the value assumed for them.
      cited: constants that a paper states: name -> a fact of role input.
      given: constants taken over from an earlier problem: name -> that problem's name (same name there).
      assumptions: what was read into a paper's silence.
    """

    name: str
    constants: tuple[Constant, ...]
    facts: tuple[str, ...]
    predict: Callable[[Values], Mapping[str, float]]
    predict_checks: Callable[[Values], Mapping[str, float]] | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)
    cited: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()


# ---------------------------------------------------------------- constants -> objects


def efficiency_of(values: Values) -> Efficiency:
    """`Efficiency` from the constants named `efficiency.*`; the others keep their defaults."""
    return Efficiency(**{f.name: values[key] for f in fields(Efficiency) if (key := f"efficiency.{f.name}") in values})


def lengths_of(values: Values, cap: int) -> LengthDistribution:
    """`LengthDistribution` from the constants named `lengths.*`."""
    return LengthDistribution(
        median=values["lengths.median"],
        sigma=values["lengths.sigma"],
        cap=cap,
        tail_from=values.get("lengths.tail_from", 1.0),
        tail_index=values.get("lengths.tail_index", 2.0),
        growth=values.get("lengths.growth", 0.0),
    )


def cost_of(setup: Setup, values: Values) -> RooflineCost:
    """The cost model of a published set-up."""
    return RooflineCost(named_shape(setup.model), HARDWARE[setup.hardware], efficiency_of(values))


# ---------------------------------------------------------------- a synchronous step in closed form


def drain(cost: CostModel, tp: int, prompts: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """Seconds after which each response of one dp group ends, all started at once; ascending.

    Args:
      prompts: tokens of each response's prompt; they are prefilled one after another, each once per response.
      lengths: tokens of each response.

    Between two ends the context grows linearly: the step's mean of the first and last step is exact wherever the cost
    is linear in the context.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    now = cost.prefill_s(tp, sum(prompts), sum(causal_pairs(tokens) for tokens in prompts))
    context = float(sum(prompts))
    done, ends = 0, []
    for position, i in enumerate(order):
        batch, steps = len(order) - position, lengths[i] - done
        if steps:
            first = cost.decode_step_s(tp, batch, context)
            last = cost.decode_step_s(tp, batch, context + batch * (steps - 1))
            now += steps * (first + last) / 2
        done = lengths[i]
        context += batch * steps - (prompts[i] + done)
        ends.append(now)
    return ends


def rollout_ends(cost: CostModel, setup: Setup, batch: Sequence[Sequence[int]], prompt_tokens: int) -> list[float]:
    """Seconds after which each response of a synchronous rollout ends, ascending; [prompts][group] lengths."""
    groups = setup.num_devices // setup.tp
    ends: list[float] = []
    for group in range(groups):
        lengths = [length for prompt in batch[group::groups] for length in prompt]
        ends.extend(drain(cost, setup.tp, [prompt_tokens] * len(lengths), lengths))
    return sorted(ends)


def train_s(cost: CostModel, setup: Setup, batch: Sequence[Sequence[int]], prompt_tokens: int, forwards: int) -> float:
    """Seconds of training on a batch: one update, and so many forward passes besides."""
    whole = [length + prompt_tokens for prompt in batch for length in prompt]
    load = TrainLoad(sum(whole), sum(causal_pairs(tokens) for tokens in whole), extra_forwards=forwards)
    return cost.train_step_s(load, setup.num_devices)


def batches_of(
    setup: Setup, lengths: LengthDistribution, correlation: float, num_batches: int
) -> list[list[list[int]]]:
    """Response lengths of a set-up's batches, [batches][prompts][group], as `ModelledWorkload` models them."""
    common, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    return [
        [[lengths.length_of_score(common * prompt + own * z) for z in responses] for prompt, responses in batch]
        for batch in _scores(setup.num_prompts, setup.group_size, num_batches)
    ]


@lru_cache(maxsize=16)
def _scores(num_prompts: int, group_size: int, num_batches: int) -> list[list[tuple[float, list[float]]]]:
    """Standard normal parts of scores: a prompt's, and its responses'. Drawn once: a fit asks for them many times."""
    return [
        [
            (normal(_SEED, batch, prompt), [normal(_SEED, batch, prompt, i) for i in range(group_size)])
            for prompt in range(num_prompts)
        ]
        for batch in range(num_batches)
    ]


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
        ends = rollout_ends(cost, setup, batch, _PROMPT_TOKENS)
        generation.append(ends[-1])
        single.append((ends[-1] - ends[-2]) / ends[-1])
        rest.append(train_s(cost, setup, batch, _PROMPT_TOKENS, forwards=1))
    return {
        "pat.a40.single_row_share": _mean(single),
        "pat.a40.generation_share": _mean(generation) / (_mean(generation) + _mean(rest)),
    }


def _pat_batches(setup: Setup, values: Values) -> list[list[list[int]]]:
    """Batches whose longest response reaches the cap, as in every step that PAT reports (§5.1)."""
    batches = batches_of(setup, lengths_of(values, setup.max_tokens), 0.0, 5)
    for batch in batches:
        longest = max(range(len(batch)), key=lambda i: batch[i][0])
        batch[longest][0] = setup.max_tokens
    return batches


def _pat_lengths(values: Values) -> dict[str, float]:
    lengths = lengths_of(values, 1 << 20)
    return {"pat.share_over_8k": lengths.survival(8192), "pat.share_over_16k": lengths.survival(16384)}


def _pat_h100(values: Values) -> dict[str, float]:
    facts = {}
    for size in ("8b", "14b"):
        setup = SETUPS[f"pat.h100.{size}"]
        cost = cost_of(setup, values)
        batches = _pat_batches(setup, values)
        generation = _mean([rollout_ends(cost, setup, batch, _PROMPT_TOKENS)[-1] for batch in batches])
        facts[f"pat.h100.{size}_generation"] = generation
        if size == "8b":
            rest = _mean([train_s(cost, setup, batch, _PROMPT_TOKENS, forwards=1) for batch in batches])
            facts["pat.h100.8b_step"] = generation + rest
    return facts


def _pat_h100_checks(values: Values) -> dict[str, float]:
    return {"pat.h100.8b_mean_length": float(np.mean(_pat_batches(SETUPS["pat.h100.8b"], values)))}


# ---------------------------------------------------------------- APRIL


def _april(values: Values) -> dict[str, float]:
    setup = SETUPS["april.4b"]
    batches = batches_of(setup, lengths_of(values, setup.max_tokens), values["correlation"], 6)
    drawn = batch_statistics(batches, setup.max_tokens)
    facts = {"april.batch_std": drawn.batch_std, "april.instance_std": drawn.instance_std}
    for size in ("4b", "8b"):
        setup = SETUPS[f"april.{size}"]
        cost = cost_of(setup, values)
        seconds = [rollout_ends(cost, setup, batch, _PROMPT_TOKENS)[-1] for batch in batches]
        facts[f"april.{size}.throughput"] = float(np.sum(batches)) / math.fsum(seconds)
    return facts


# ---------------------------------------------------------------- RhymeRL


@lru_cache(maxsize=1)
def _rank_scores() -> tuple[np.ndarray, np.ndarray]:
    """Of 4,096 prompts: their part of the score, and the median of 16 responses' own parts; [P] each."""
    prompts = range(4096)
    own = np.array([[normal(_SEED, 1, p, i) for i in range(16)] for p in prompts])
    return np.array([normal(_SEED, 0, p) for p in prompts]), np.median(own, axis=1)


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
def _rollouts_s(name: str, eff: Efficiency, lengths: LengthDistribution, correlation: float, num: int) -> list[float]:
    """Seconds of the rollouts of `num` batches of a set-up: most of a fit's time, and asked again for the same."""
    setup = SETUPS[name]
    cost = RooflineCost(named_shape(setup.model), HARDWARE[setup.hardware], eff)
    return [
        rollout_ends(cost, setup, batch, _PROMPT_TOKENS)[-1] for batch in batches_of(setup, lengths, correlation, num)
    ]


def _rollpacker(values: Values) -> dict[str, float]:
    setup = SETUPS["rollpacker.table1"]
    cost, lengths = cost_of(setup, values), lengths_of(values, setup.max_tokens)
    batches = batches_of(setup, lengths, values["math.correlation"], 6)
    inference = replace(cost.efficiency, mfu=1.0, train_fixed_s=0.0)  # the rest does not touch a rollout
    rollout = _mean(_rollouts_s("rollpacker.table1", inference, lengths, values["math.correlation"], len(batches)))
    train = _mean([train_s(cost, setup, batch, _PROMPT_TOKENS, forwards=2) for batch in batches])
    num_samples = setup.num_prompts * setup.group_size
    uncapped = batches_of(setup, lengths_of(values, 1 << 30), values["math.correlation"], 16)
    longest = math.exp(_mean([math.log(max(max(prompt) for prompt in batch)) for batch in uncapped]))
    facts = {
        "rollpacker.p75": lengths.exact_length(_NORMAL.inv_cdf(0.75)),
        "rollpacker.max_over_median": min(longest, setup.max_tokens) / lengths.median,
        "rollpacker.longest": longest,
    }
    for task in ("math", "code", "judge"):
        reward = reward_stage_s(values, task, num_samples)
        for stage, seconds in (("rollout", rollout), ("reward", reward), ("train", train)):
            facts[f"rollpacker.{task}.{stage}_share"] = seconds / (rollout + reward + train)
    return facts


def _rollpacker_checks(values: Values) -> dict[str, float]:
    """Time per token over the batch (§4.1), and Table 3's step: the fifth of the prompts whose responses are longest,
    with scoring that costs nothing, since it runs while others decode."""
    profiled = SETUPS["rollpacker.table1"]
    cost, context = cost_of(profiled, values), float(lengths_of(values, profiled.max_tokens).quantile(0.75))
    tpot = [cost.decode_step_s(profiled.tp, rows, rows * context) for rows in (32, 64)]
    setup = SETUPS["rollpacker.7b"]
    cost = cost_of(setup, values)
    drawn = batches_of(setup, lengths_of(values, setup.max_tokens), values["math.correlation"], 5)
    prompts = sorted((prompt for batch in drawn for prompt in batch), key=max)[-setup.num_prompts :]
    rollout = rollout_ends(cost, setup, prompts, _PROMPT_TOKENS)[-1]
    step = rollout + train_s(cost, setup, prompts, _PROMPT_TOKENS, forwards=2)
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
            f"prompts of {_PROMPT_TOKENS} tokens",
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
            f"prompts of {_PROMPT_TOKENS} tokens",
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
            f"prompts of {_PROMPT_TOKENS} tokens",
        ),
    ),
)
