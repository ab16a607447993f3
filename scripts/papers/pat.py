"""PAT's baseline: the calibration's problems of both machines, and batches with one outlier.

Purpose: as `papers.problems`, which lists them; and `OneOutlier`, by which simulated batches have the lengths that the
problems assume.

Source: PAT §2.3 (Fig. 3a), §3.1 (Fig. 4), §5.1-5.3 (Fig. 11c, VeRL's bars). In every step that PAT reports a response
reaches the limit (§5.1), and for most of the generation it is the only one left (Fig. 3a).

Reading of Fig. 3a: the text gives ranges "across the maximum response lengths evaluated". They are taken as the values
at 6K and 16K, the ends of Fig. 10a's axis (same model and machine), since the share of generation grows with the length
(§2.3). Then the two ends agree with each other and with Fig. 4: the period before the last row is alone takes about a
minute at either length, and so does what is not generation. Fig. 3b's shares (2.8 of 128 responses over 16K) cannot
hold in the same runs: those would end together at the limit.

Departures: dp groups run at a pace of their own (VeRL's engines), where jaxrl's groups go in lockstep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import SampleKey
from papers.closed_form import PROMPT_TOKENS, rollout_ends, train_s
from papers.facts import SETUPS, Setup
from papers.lengths import batches_of, lengths_of, survival
from papers.machines import cost_of, inference
from papers.solver import Constant, Problem, Values

SHORT, LONG = 6144, 16384  # limits that Fig. 3a's ranges are taken to be of
GROUP = 8  # responses to a prompt where PAT does not say (verl's example); lengths are independent either way
_OUTLIER = 20_000_926  # first word of its identity, beside those of `jaxrl.sim.workload`
_NUM_BATCHES = 8


@dataclass(frozen=True)
class OneOutlier(ModelledWorkload):
    """Batches of consecutive prompts, in each of which one response reaches the limit.

    Attributes:
      num_prompts, group_size: of a batch.
    """

    num_prompts: int = 1
    group_size: int = 1

    def length(self, key: SampleKey, step: int = 0) -> int:
        batch, place = divmod(key.prompt_index, self.num_prompts)
        size = self.num_prompts * self.group_size
        if place * self.group_size + key.sample_index == int(uniform(_OUTLIER, self.seed, batch) * size):
            return self.max_response_length
        return super().length(key, step)


def batches(setup: Setup, values: Values) -> list[list[list[int]]]:
    """The same of a set-up's prompts, in closed form: [batches][prompts][group]."""
    drawn = batches_of(setup, lengths_of(values), 0.0, _NUM_BATCHES)
    return [[[setup.max_tokens], *batch[1:]] for batch in drawn]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shares(setup: Setup, values: Values) -> tuple[float, float]:
    """(of a generation's time, with a single row left; of an iteration's time, generation)."""
    cost = cost_of(setup, values)
    generation, single, rest = [], [], []
    for batch in batches(setup, values):
        ends = rollout_ends(cost, setup, batch, PROMPT_TOKENS)
        generation.append(ends[-1])
        single.append((ends[-1] - ends[-2]) / ends[-1])
        rest.append(train_s(cost, setup, batch, PROMPT_TOKENS, forwards=1))
    return _mean(single), _mean(generation) / (_mean(generation) + _mean(rest))


def _a40(values: Values) -> dict[str, float]:
    setup = SETUPS["pat.a40.8b"]
    cost = cost_of(setup, values)
    facts = {}
    for tp in (2, 8):
        for batch in (1, 128):
            rows = max(batch * tp // setup.num_devices, 1)
            facts[f"pat.a40.tp{tp}_batch{batch}"] = cost.decode_step_s(tp, rows, rows * values["context"])
    for name, tokens in (("6k", SHORT), ("16k", LONG)):
        single, generation = _shares(replace(setup, max_tokens=tokens), values)
        facts |= {f"pat.a40.single_row_share_{name}": single, f"pat.a40.generation_share_{name}": generation}
    return facts


def _a40_checks(values: Values) -> dict[str, float]:
    lengths, outlier = lengths_of(values), 1 / SETUPS["pat.a40.8b"].num_prompts
    return {
        f"pat.share_over_{name}": (1 - outlier) * survival(lengths, tokens) + outlier
        for name, tokens in (("8k", 8192), ("16k", LONG))
    }


def _h100(values: Values) -> dict[str, float]:
    facts = {}
    for size in ("8b", "14b"):
        setup = SETUPS[f"pat.h100.{size}"]
        cost = cost_of(setup, values)
        drawn = batches(setup, values)
        generation = _mean([rollout_ends(cost, setup, batch, PROMPT_TOKENS)[-1] for batch in drawn])
        facts[f"pat.h100.{size}_generation"] = generation
        if size == "8b":
            rest = _mean([train_s(cost, setup, batch, PROMPT_TOKENS, forwards=1) for batch in drawn])
            facts["pat.h100.8b_step"] = generation + rest
    return facts


def _h100_checks(values: Values) -> dict[str, float]:
    return {"pat.h100.8b_mean_length": float(np.mean(batches(SETUPS["pat.h100.8b"], values)))}


PAT: tuple[Problem, ...] = (
    Problem(
        name="pat_a40",
        constants=(
            *inference("memory", "launch_s", "collective_s", "link", "mfu", "train_fixed_s"),
            Constant("lengths.median", "tokens", 1000.0, 1.0, 50.0, 20000.0),
            Constant("lengths.sigma", "log", 0.8, 0.5, 0.1, 2.5),
        ),
        facts=(
            *(f"pat.a40.tp{tp}_batch{batch}" for tp in (2, 8) for batch in (1, 128)),
            *(f"pat.a40.{share}_share_{name}" for share in ("single_row", "generation") for name in ("6k", "16k")),
            "pat.share_over_8k",
            "pat.share_over_16k",
        ),
        predict=_a40,
        predict_checks=_a40_checks,
        fixed={"context": 1024.0},
        assumptions=(
            "static TP 2 in Fig. 3a, as in Fig. 4; its ranges are the values at limits of 6K and 16K",
            "one response of each batch reaches the limit; the others are lognormal, whatever the limit",
            "Fig. 4's contexts are not said: 1,024 tokens a row",
            "preparation is one forward pass, one update per step",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
    Problem(
        name="pat_h100",
        constants=inference("memory", "launch_s", "mfu", "train_fixed_s"),
        facts=("pat.h100.8b_generation", "pat.h100.14b_generation", "pat.h100.8b_step", "pat.h100.8b_mean_length"),
        predict=_h100,
        predict_checks=_h100_checks,
        given={"lengths.median": "pat_a40", "lengths.sigma": "pat_a40"},
        assumptions=(
            "static TP 2 (tuned, not said)",
            "lengths as on the A40, and Qwen3-14B's as LLaMA3.1-8B's",
            "preparation is one forward pass, one update per step",
            f"prompts of {PROMPT_TOKENS} tokens",
        ),
    ),
)
