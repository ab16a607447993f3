"""Everything that composes, at random: rules, dynamic sampling, pipelines, workers, limits, workloads, and ends of
processes.

What must hold for a run is in tests/support/simulated_runs.py (`check`): each (epoch, prompt) leaves once, counts and
tokens add up, and the bounds on age, staleness and restarts hold. Besides, a run that was killed and stopped anywhere
is the run that was not, and how long scoring takes decides nothing.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_runs import House, check, make_config, make_workload, whole

from jaxrl.config import ConfigError
from jaxrl.mechanisms import batch_rule, is_timeless
from jaxrl.types import RunFailed

RULES = ("", "over_provisioning", "tail_batching", "partial_rollout")
NEVER_S = 1e6  # a limit that no scoring reaches


@dataclass(frozen=True)
class Composition:
    """A configuration, the workload, and how processes end, one after another, before one that goes on to the end."""

    values: dict[str, Any]
    seed: int
    hang_share: float
    pass_rate: float
    scoring_s: float
    lengths: tuple[float, float]
    ends: list[tuple[Literal["kill", "stop"], int]]

    @property
    def timeout_s(self) -> float:
        return self.values["reward.timeout_s"]


def least(factor: float, count: int) -> int:
    return math.ceil(Fraction(str(factor)) * count)


@st.composite
def section(draw: st.DrawFn, rule: str, batch: int, lag: int) -> dict[str, Any]:
    """Options of a rule that go together."""
    factor = draw(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.5]))
    steps = -(-(least(factor, batch) - batch) // batch)  # until all that one round launches has been in a batch
    both = {"enable": True, "at_end": draw(st.sampled_from(["flush", "leave"]))}
    if rule == "partial_rollout":
        return both | {
            "over_provision": factor,
            "max_staleness": draw(st.just(-1) | st.integers(steps + lag, steps + lag + 2)),
            "max_restarts": draw(st.integers(0, 2)),
        }
    factors = {"prompt_factor": factor, "response_factor": draw(st.sampled_from([1.0, 1.25, 2.0]))}
    if rule == "over_provisioning":
        return {"enable": True} | factors
    return (
        both
        | factors
        | {
            "relaunch": draw(st.sampled_from(["same", "new", "resume", "resume"])),
            "max_staleness": draw(st.just(-1) | st.integers(lag, lag + 3)),
        }
    )


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    rule, batch, lag = draw(st.sampled_from(RULES)), draw(st.sampled_from([1, 2, 3, 5])), draw(st.integers(0, 1))
    filtering = draw(st.booleans())
    size = draw(st.integers(2 if filtering else 1, 3))
    values: dict[str, Any] = {"data.train_batch_size": batch, "rollout.n": size, "trainer.one_step_off": bool(lag)}
    options = draw(section(rule, batch, lag)) if rule else {}
    if rule:
        values[f"rollout.{rule}"] = options
    if size == 1:
        values["algorithm.adv_estimator"] = "reinforce_plus_plus"
    keeps = rule == "partial_rollout" or options.get("relaunch") == "resume"
    afterwards = not keeps and not (filtering and rule)
    hang_share = draw(st.sampled_from([0.0, 0.4]))
    values |= {
        "algorithm.filter_groups": {
            "enable": filtering,
            "max_unscored_groups": draw(st.sampled_from([-1, 0, 1, 8])),
            "max_num_gen_batches": 1000,  # rewards are drawn: ten groups of equal ones in a row do happen
        },
        "reward.score_when": draw(
            st.sampled_from(["sample", "group", "rollout"] if afterwards else ["sample", "group"])
        ),
        "reward.timeout_s": 1.0 if hang_share else NEVER_S,
        "data.gen_batch_size": draw(st.sampled_from([0, 1, 4])) if filtering else 0,
        "rollout.num_blocks": draw(st.sampled_from([17, 40])),
        "rollout.num_workers": draw(st.sampled_from([1, 2])),
        "rollout.deal": draw(st.sampled_from(["tokens", "prompts"])),
        "rollout.stale_tokens": draw(st.sampled_from(["recorded"] if lag else ["recorded", "mask"])),
        "simulate.num_prompts": draw(st.sampled_from([2, 8, 50])),
        "trainer.save_freq": draw(st.sampled_from([1, 2, 3])),
        "trainer.test_freq": draw(st.sampled_from([0, 2])),
        "trainer.total_training_steps": draw(st.sampled_from([2, 5, 8])),
    }
    if lag and draw(st.booleans()):  # devices of the rollout's own, and what only they allow
        values |= {"trainer.num_devices": 4, "rollout.num_devices": 2}
        values["rollout.num_workers"] = 2
        if rule != "tail_batching" and draw(st.booleans()):
            groups, share = st.sampled_from([2, 3, 8]), st.sampled_from([0.1, 0.5])
            values["rollout.ranking_groups"] = {
                "enable": True,
                "num_groups": draw(groups),
                "outlier_share": draw(share),
                "move": draw(st.sampled_from(["auto", "kv"])),
                "two_tier": draw(st.booleans()),
            }
    ends = st.tuples(st.sampled_from(["kill", "stop"]), st.integers(1, 100))
    return Composition(
        values,
        draw(st.integers(0, 1 << 20)),
        hang_share,
        draw(st.sampled_from([0.3, 0.5])),
        draw(st.sampled_from([1e-6, 0.05, 0.4])),
        draw(st.sampled_from([(9.0, 1.0), (3.0, 2.0)])),  # the second has a tail that outlives many rounds
        draw(st.lists(ends, max_size=3)),
    )


def check_composition(drawn: Composition) -> None:
    config = make_config(drawn.values)
    parts = drawn.seed, drawn.hang_share, drawn.pass_rate
    rest = {"timeout_s": drawn.timeout_s, "lengths": drawn.lengths}
    workload = make_workload(*parts, drawn.scoring_s, **rest)
    straight = whole(config, workload)
    check(straight)
    house = House(config, workload)
    for ends in drawn.ends:
        with suppress(RunFailed):  # a stop beside an update
            if house.run(ends):
                break
    assert house.run()
    check(house)
    assert without_times(house) == without_times(straight)
    if not drawn.hang_share:
        slower = make_workload(*parts, 30 * drawn.scoring_s + 0.01, **rest)
        assert without_times(whole(config, slower), "reward/") == without_times(straight, "reward/")


def without_times(house: House, *more: str) -> Any:
    """All that is decided, without the metrics that begin with `more`. A clock says when the next round begins in the
    present one; where it may, it says when workers run what, and for how long they are idle."""
    metrics, trained = house.decided()
    config = house.config
    if config.rollout.ranking_groups.enable:
        more += ("rollout/ranking/idle_share", "rollout/ranking/head_start_s")
        if is_timeless(config):
            engines = ("preemptions", "bubble_ratio", "decode_steps", "prefill_tokens", "shared_tokens", "ranking/")
            more += tuple(f"rollout/{name}" for name in engines)
    return {s: {k: v for k, v in line.items() if not k.startswith(more)} for s, line in metrics.items()}, trained


@settings(deadline=None)
@given(drawn=compositions())
def test_what_composes_keeps_the_book(drawn: Composition):
    check_composition(drawn)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=compositions())
def test_what_composes_keeps_the_book_many_times(drawn: Composition):
    check_composition(drawn)


# ---------------------------------------------------------------- what is refused


def problem(on: tuple[bool, ...], **of: Any) -> bool:
    """Whether a composition is refused, by the table of docs/rollout-rules.md: `on` says which rules are."""
    over_provisioning, tail_batching, partial_rollout = on
    early = over_provisioning or tail_batching
    resumes = tail_batching and of["relaunch"] == "resume"
    return (
        sum(on) > 1
        or (of["score_when"] == "rollout" and (partial_rollout or resumes or (of["filtering"] and early)))
        or (of["mask"] and of["off"])
        or (partial_rollout and 0 <= of["max_staleness"] < 1 + of["off"])
        or (resumes and 0 <= of["max_staleness"] < of["off"])
    )


def test_exactly_these_compositions_are_refused():
    """Two prompts of two samples, six and three with a rule; four under way with partial rollout."""
    dimensions = {
        "filtering": (False, True),
        "off": (False, True),
        "score_when": ("sample", "group", "rollout"),
        "mask": (False, True),
        "max_staleness": (-1, 0, 1, 2),
        "relaunch": ("same", "resume"),
    }
    factors = {"prompt_factor": 3.0, "response_factor": 1.5}
    for on in product((False, True), repeat=3):
        # a sample of all, and less where two rules never go together, whatever else there is
        for chosen in list(product(*dimensions.values()))[:: 7 if sum(on) < 2 else 37]:
            of = dict(zip(dimensions, chosen, strict=True))
            config = make_config(
                {
                    "data.train_batch_size": 2,
                    "rollout.over_provisioning": {"enable": on[0]} | factors,
                    "rollout.tail_batching": {
                        "enable": on[1],
                        "max_staleness": of["max_staleness"],
                        "relaunch": of["relaunch"],
                        **factors,
                    },
                    "rollout.partial_rollout": {"enable": on[2], "max_staleness": of["max_staleness"]},
                    "rollout.stale_tokens": "mask" if of["mask"] else "recorded",
                    "algorithm.filter_groups": {"enable": of["filtering"]},
                    "reward.score_when": of["score_when"],
                    "trainer.one_step_off": of["off"],
                }
            )
            try:
                batch_rule(config)
                refused = False
            except ConfigError:
                refused = True
            assert refused == problem(on, **of), (on, of)
