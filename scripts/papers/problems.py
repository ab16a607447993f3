"""The calibration's problems: what each paper's baseline says about the simulator's constants.

Purpose: each `Problem` names the free constants, the published facts that they must explain, and the assumptions where
a paper is silent. It computes the facts from the constants; `papers.solver` finds the constants from the facts.

Source: the set-ups of `papers.facts.SETUPS`, in closed form (`papers.closed_form`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

from jaxrl.sim.workload import uniform
from papers import slime
from papers.closed_form import PROMPT_TOKENS
from papers.facts import SETUPS
from papers.lengths import SEED, batches_of, lengths_of, responses_of, spreads
from papers.machines import cost_of, inference
from papers.pat import PAT
from papers.rhymerl import RHYMERL
from papers.rollpacker import ROLLPACKER
from papers.solver import Constant, Problem, Values

_NORMAL = NormalDist()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- APRIL


def _april(values: Values) -> dict[str, float]:
    setup = SETUPS["april.4b"]
    batches = batches_of(setup, lengths_of(values), values["correlation"], 6)
    batch_std, instance_std = spreads(batches)
    facts = {"april.batch_std": batch_std, "april.instance_std": instance_std}
    for size in ("4b", "8b"):
        facts[f"april.{size}.throughput"] = april_throughput(size, values, 0.0)
        facts[f"april.{size}.dapo_throughput"] = april_throughput(size, values, values["filtered_share"])
    return facts


def april_throughput(size: str, values: Values, filtered_share: float, num_rollouts: int = 8) -> float:
    """Tokens per second of baseline rollouts in which that share of the groups is dropped (0: GRPO)."""
    setup, lengths = SETUPS[f"april.{size}"], lengths_of(values)
    plan = slime.Plan(
        cost_of(setup, values), setup.tp, setup.num_devices // setup.tp, setup.num_prompts, setup.num_prompts
    )
    prompts = itertools.count()

    def fresh() -> slime.Group:
        prompt = next(prompts)
        group = slime.Group(prompt, uniform(SEED, 1, prompt) < filtered_share)
        group.rows = [slime.Row(group, n) for n in responses_of(setup, lengths, values["correlation"], prompt)]
        return group

    found = list(slime.rollouts(plan, fresh, num_rollouts))
    return sum(each.tokens for each in found) / math.fsum(each.seconds for each in found)


# ---------------------------------------------------------------- all of them


PROBLEMS: tuple[Problem, ...] = (
    *PAT,
    Problem(
        name="april",
        constants=(
            Constant("lengths.median", "tokens", 4000.0, 0.7, 300.0, 16000.0),
            Constant("lengths.sigma", "log", 0.8, 0.4, 0.1, 2.5),
            Constant("correlation", "share", 0.8, 0.3, 0.02, 0.995),
            *inference("memory", "kv", "launch_s"),
        ),
        facts=(
            *(f"april.{size}.{kind}" for size in ("4b", "8b") for kind in ("throughput", "dapo_throughput")),
            "april.batch_std",
            "april.instance_std",
        ),
        predict=_april,
        fixed={"filtered_share": 0.35},
        assumptions=(
            "servers of two devices, each response to the least loaded, tokens of aborted requests counted, as in the "
            "authors' code (papers.slime)",
            "the share of the groups that DAPO drops is not said: 0.35, whatever their lengths; docs/reproductions "
            "sweeps it",
            "both models' responses equally long on all three data sets; lognormal without a tail of its own",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    *RHYMERL,
    *ROLLPACKER,
)
