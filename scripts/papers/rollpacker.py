"""The calibration's problems of RollPacker: lengths by task, and the machine of each model.

Purpose: as `papers.problems`, which lists them. Lengths come from Fig. 2a's curves; the 14B model's machine and the
seconds of scoring from Table 1 and the baseline's step; the 7B and 32B models' from their baselines' rollouts and
steps; RollPacker's own training of the 7B model from a step without its stream trainer.

Source: RollPacker (Gao et al., NSDI 2026) §2.2, §4.3, §5, §6; rewards of a mixed batch in turn, task by task, as in the
authors' code (Farrrrland/RollPacker, roll/pipeline/rlvr/rlvr_pipeline_batched_reward.py).

Departures: dp groups run at a pace of their own (vLLM's engines), where jaxrl's groups go in lockstep.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from jaxrl.config import SimulatedLengths
from jaxrl.models.shapes import named_shape
from jaxrl.sim.cost_model import CostModel, Efficiency
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import exact_length
from papers.closed_form import PROMPT_TOKENS, rollout_ends, train_s
from papers.facts import SETUPS, Setup
from papers.lengths import lengths_of, mixed_batches, quantile, responses_of, survival
from papers.machines import cost_of, inference
from papers.solver import Constant, Problem, Values

TASKS = ("math", "code", "judge")
OWN_TRAINER = "rollpacker_7b_trainer"  # the problem of RollPacker's training, where its baseline is its own
OWN_FORWARDS = 1  # the same in RollPacker's trainer, which skips the old log-probabilities
FORWARDS = 2  # passes beside the update: old log-probabilities and the reference model

_NORMAL = NormalDist()
_QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95}


def task_lengths(values: Values, task: str) -> SimulatedLengths:
    """A task's lengths; `tail_factor`, where there is one, is of a model with a tail of its own."""
    own = {name.removeprefix(f"{task}."): value for name, value in values.items() if name.startswith(f"{task}.lengths")}
    own["lengths.tail_index"] *= values.get("tail_factor", 1.0)
    return lengths_of(own)


# ---------------------------------------------------------------- lengths


def _lengths(values: Values) -> dict[str, float]:
    facts = {}
    for task in TASKS:
        lengths = task_lengths(values, task)
        for name, share in _QUANTILES.items():
            facts[f"rollpacker.{task}.{name}"] = exact_length(lengths, _NORMAL.inv_cdf(share))
        facts[f"rollpacker.{task}.at_limit"] = survival(lengths, SETUPS["rollpacker.table1"].max_tokens)
    return facts


def capped_share(setup: Setup, values: Values) -> float:
    """The share of mixed batches with a response that reaches the limit."""
    common, own = math.sqrt(values["correlation"]), math.sqrt(1 - values["correlation"])
    prompt = np.linspace(-8, 8, 801)  # a prompt's part of the score, integrated over
    weight = np.exp(-(prompt**2) / 2)
    none = 0.0
    for task in TASKS:
        limit = -_NORMAL.inv_cdf(survival(task_lengths(values, task), setup.max_tokens))
        below = np.array([1 - math.erfc((limit - common * a) / own / math.sqrt(2)) / 2 for a in prompt])
        none += setup.num_prompts / len(TASKS) * math.log((weight * below**setup.group_size).sum() / weight.sum())
    return 1 - math.exp(none)


# ---------------------------------------------------------------- stages of a step


def reward_stage_s(values: Values, task: str, num_samples: int) -> float:
    """Seconds of scoring after the rollout: each worker takes the next response when it is free, and responses that
    hang until the time-out come at even distances."""
    hangs, timeout = values[f"reward.{task}.hang_share"], values[f"reward.{task}.timeout_s"]
    seconds = values[f"reward.{task}.median_s"]
    free = [0.0] * int(values[f"reward.{task}.workers"])
    for i in range(num_samples):
        hung = math.floor((i + 1) * hangs) > math.floor(i * hangs)
        heapq.heappush(free, heapq.heappop(free) + (timeout if hung else seconds))
    return max(free)


def mixed_reward_s(values: Values, setup: Setup, in_turn: bool = True) -> float:
    """Seconds of scoring a mixed batch, its tasks in turn or beside one another."""
    num_samples = setup.num_prompts * setup.group_size // len(TASKS)
    stages = [reward_stage_s(values, task, num_samples) for task in TASKS]
    return math.fsum(stages) if in_turn else max(stages)


@lru_cache(maxsize=64)
def _decoding_s(
    name: str, eff: Efficiency, lengths: tuple[SimulatedLengths, ...], correlation: float, num: int
) -> float:
    """Mean seconds of decoding batches of a set-up: most of a fit's time, and asked again for the same."""
    setup = SETUPS[name]
    cost = CostModel(named_shape(setup.model), HARDWARE[setup.hardware], eff)
    ends = [
        rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1] for batch in mixed_batches(setup, lengths, correlation, num)
    ]
    return math.fsum(ends) / len(ends)


def _stages_s(name: str, values: Values, tasks: Sequence[str], forwards: int = FORWARDS) -> tuple[float, float]:
    """Mean seconds of rollout and training of batches of these tasks."""
    setup, cost = SETUPS[name], cost_of(SETUPS[name], values)
    lengths = tuple(task_lengths(values, task) for task in tasks)
    decoding = replace(cost.efficiency, mfu=1.0, train_fixed_s=0.0, rollout_fixed_s=0.0)  # the rest does not touch it
    rollout = _decoding_s(name, decoding, lengths, values["correlation"], _NUM_BATCHES)
    rollout += cost.weight_sync_s(setup.tp, setup.num_devices) + cost.rollout_fixed_s()
    batches = mixed_batches(setup, lengths, values["correlation"], _NUM_BATCHES)
    train = [train_s(cost, setup, batch, PROMPT_TOKENS, forwards) for batch in batches]
    return rollout, math.fsum(train) / len(train)


_NUM_BATCHES = 5


def _table1(values: Values) -> dict[str, float]:
    setup, facts = SETUPS["rollpacker.table1"], {}
    for task in TASKS:
        rollout, train = _stages_s("rollpacker.table1", values, (task,))
        reward = reward_stage_s(values, task, setup.num_prompts * setup.group_size)
        for stage, seconds in (("rollout", rollout), ("reward", reward), ("train", train)):
            facts[f"rollpacker.{task}.{stage}_share"] = seconds / (rollout + reward + train)
    facts["rollpacker.artifact_fixed_s"] = values["efficiency.rollout_fixed_s"]
    facts["rollpacker.14b.capped_steps"] = capped_share(SETUPS["rollpacker.14b"], values)
    return facts | _mixed("14b", values)


def _mixed(size: str, values: Values) -> dict[str, float]:
    """A model's step on the uniform mix of tasks (§6)."""
    rollout, train = _stages_s(f"rollpacker.{size}", values, TASKS)
    step = rollout + train + mixed_reward_s(values, SETUPS[f"rollpacker.{size}"])
    return {f"rollpacker.{size}.rollout_s": rollout, f"rollpacker.{size}.step_s": step}


def _model_7b(values: Values) -> dict[str, float]:
    return _mixed("7b", values)


def _long_round_7b(values: Values) -> dict[str, float]:
    return {"rollpacker.7b_long_round_step": _long_round_s("7b", values)}


def _long_round_s(size: str, values: Values) -> float:
    """Table 3's step without GPU scaling: a long round of math prompts, scored while other responses decode.

    Its prompts are the fifth that had the longest responses; what they answer in the long round is drawn anew.
    """
    setup, lengths = SETUPS[f"rollpacker.{size}"], task_lengths(values, "math")
    correlation, cost = values["correlation"], cost_of(setup, values)
    first = {p: max(responses_of(setup, lengths, correlation, p)) for p in range(5 * setup.num_prompts)}
    chosen = sorted(first, key=first.__getitem__)[-setup.num_prompts :]
    batch = [responses_of(setup, lengths, correlation, p, attempt=1) for p in chosen]
    rollout = rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1]
    rollout += cost.weight_sync_s(setup.tp, setup.num_devices) + cost.rollout_fixed_s()
    return rollout + train_s(cost, setup, batch, PROMPT_TOKENS, FORWARDS)


def _own_trainer(values: Values) -> dict[str, float]:
    """Table 3's step without GPU scaling, in the authors' own set-up for that table."""
    return {"rollpacker.7b_own_trainer_step": sum(_stages_s("rollpacker.7b", values, ("math",), OWN_FORWARDS))}


def _model_32b(values: Values) -> dict[str, float]:
    capped = capped_share(SETUPS["rollpacker.32b"], values)
    return _mixed("32b", values) | {"rollpacker.32b.capped_steps": capped}


def _checks(values: Values) -> dict[str, float]:
    """Time per token over the batch (§4.1)."""
    profiled = SETUPS["rollpacker.table1"]
    lengths = task_lengths(values, "math")
    cost, context = cost_of(profiled, values), float(quantile(lengths, profiled.max_tokens, 0.75))
    tpot = [cost.decode_step_s(profiled.tp, rows, rows * context) for rows in (32, 64)]
    return {"rollpacker.tpot_64_over_32": tpot[1] / tpot[0]}


# ---------------------------------------------------------------- the problems

_SHARED = ("efficiency.memory", "efficiency.train_fixed_s", "efficiency.rollout_fixed_s", "correlation")
_SCORING = tuple(f"reward.{task}.{name}" for task in TASKS for name in ("median_s", "hang_share", "timeout_s"))
_TAILS = tuple(f"{task}.lengths.{name}" for task in TASKS for name in ("median", "sigma", "tail_from", "tail_index"))
_LENGTHS = dict.fromkeys(_TAILS, "rollpacker_lengths")
_FROM_14B = dict.fromkeys((*_SHARED, *_SCORING), "rollpacker")

_SAME = "scoring (workers in proportion to nodes), fixed costs and lengths (but for the limit) as of the 14B model"


def _workers(num_devices: int) -> dict[str, float]:
    """Reward workers by task: of the nodes' processors, so in proportion to the nodes; 1 for math on two nodes."""
    return {f"reward.{task}.workers": count * num_devices / 16 for task, count in _WORKERS.items()}


_WORKERS = {"math": 1.0, "code": 32.0, "judge": 16.0}

ROLLPACKER: tuple[Problem, ...] = (
    Problem(
        name="rollpacker_lengths",
        constants=tuple(
            constant
            for task in TASKS
            for constant in (
                Constant(f"{task}.lengths.median", "tokens", 600.0, 0.7, 50.0, 8000.0),
                Constant(f"{task}.lengths.sigma", "log", 0.8, 0.5, 0.1, 2.5),
                Constant(f"{task}.lengths.tail_index", "exponent", 1.5, 0.5, 0.5, 10.0),
            )
        ),
        facts=tuple(f"rollpacker.{task}.{name}" for task in TASKS for name in (*_QUANTILES, "at_limit")),
        predict=_lengths,
        fixed={"math.lengths.tail_from": 0.75, "code.lengths.tail_from": 0.9, "judge.lengths.tail_from": 0.9},
        assumptions=("tails start at P75 (math) and P90 (code, judge), where the curves leave a lognormal",),
    ),
    Problem(
        name="rollpacker",
        constants=(
            *inference("launch_s", "mfu", "train_fixed_s", "rollout_fixed_s"),
            Constant("correlation", "share", 0.85, 0.3, 0.02, 0.995),
            Constant("reward.math.median_s", "s", 0.02, 1.0, 1e-4, 2.0),
            Constant("reward.code.median_s", "s", 1.0, 1.0, 1e-2, 30.0),
            Constant("reward.judge.median_s", "s", 1.0, 1.0, 1e-2, 60.0),
        ),
        facts=(
            *(f"rollpacker.{t}.{s}_share" for t in TASKS for s in ("rollout", "reward", "train")),
            *(f"rollpacker.14b.{n}" for n in ("rollout_s", "step_s", "capped_steps")),
            "rollpacker.artifact_fixed_s",
            "rollpacker.tpot_64_over_32",
        ),
        predict=_table1,
        predict_checks=_checks,
        fixed={
            "efficiency.memory": 0.9,
            **_workers(32),
            "reward.math.hang_share": 0.0,
            "reward.judge.hang_share": 0.0,
            "reward.judge.timeout_s": 60.0,
        },
        cited={
            "reward.math.timeout_s": "rollpacker.math.timeout",
            "reward.code.timeout_s": "rollpacker.code.timeout",
            "reward.code.hang_share": "rollpacker.sandbox_timeout_share",
        },
        given=_LENGTHS,
        assumptions=(
            "memory efficiency about that of PAT's baseline on the H100 (0.9)",
            "how much of a length its prompt decides is the same for all tasks; prior 0.85, RhymeRL's code",
            "Table 1's training holds two forward passes (old log-probabilities, reference) and one update",
            "rewards are scored after the rollout, by 2 (math), 64 (code) and 32 (judge) workers; of a mixed batch in "
            "turn, as in the authors' code",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    Problem(
        name="rollpacker_7b",
        constants=inference("launch_s", "mfu"),
        facts=("rollpacker.7b.rollout_s", "rollpacker.7b.step_s", "rollpacker.7b_long_round_step"),
        predict=_model_7b,
        predict_checks=_long_round_7b,
        fixed=_workers(16),
        given={**_FROM_14B, **_LENGTHS},
        assumptions=(_SAME,),
    ),
    Problem(
        name=OWN_TRAINER,
        constants=inference("mfu", "train_fixed_s"),
        facts=("rollpacker.7b_own_trainer_step",),
        predict=_own_trainer,
        fixed=_workers(16) | {"reward.math.workers": 64.0},
        given={
            "efficiency.launch_s": "rollpacker_7b",
            **{name: problem for name, problem in _FROM_14B.items() if name != "efficiency.train_fixed_s"},
            **_LENGTHS,
        },
        assumptions=(
            "rollout and lengths as of the 7B baseline; of training the share of the peak and the fixed cost are "
            "RollPacker's own, and one step without its stream trainer says what both come to",
            "rounds of fresh prompts without speculation, no old log-probabilities, 32 workers for math on a node, "
            "scored beside the rollout, as the authors' configuration for the table has it "
            "(examples/stream_trainer_table3)",
        ),
    ),
    Problem(
        name="rollpacker_32b",
        constants=(
            *inference("launch_s", "mfu"),
            Constant("tail_factor", "of the tail's index", 1.0, 0.15, 0.4, 2.0),
        ),
        facts=("rollpacker.32b.rollout_s", "rollpacker.32b.step_s", "rollpacker.32b.capped_steps"),
        predict=_model_32b,
        fixed=_workers(64),
        given={**_FROM_14B, **_LENGTHS},
        assumptions=(_SAME, "beyond the body, all tasks' tails are heavier or lighter by one factor of their index"),
    ),
)
