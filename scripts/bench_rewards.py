#!/usr/bin/env python3
"""What a step waits for rewards: beside the rollout and after it, with fixed and with adaptive time limits.

    python scripts/bench_rewards.py [--repetitions 5] [--scale 0.1] [--json]

The reward workers are real processes; the devices are the simulator's on the machine's clock (Qwen2.5-7B on an H100 by
its roofline), which leave the processors free as an accelerator does. `--scale` shortens all seconds alike, those of
the devices, of rewards and of limits: at 0.1 rewards of 0.2 to 30 s take 0.02 to 3 s, beside a rollout that is ten
times as fast. Cases run in turns; figures are medians over the repetitions, in unscaled seconds.

overlap: every reward takes seconds of its own, from 0.2 to 30, log-uniform, and sleeps them.
- beside: scored as responses end (reward.score_when=sample). after: once all have (rollout).
- bound: when the last verdict would have come if each had been begun when its response ended: the rollout, and then
  what the last one still needs. What a step takes more is `late`.

timeouts: programs, scored by the code scorer; a share (--endless 0.05) never ends, the others are right.
- fixed: every test case has 30 s. adaptive: 1.5 times the longest time of a correct response, from 2 to 30 s.
- first epoch: nothing is known of any prompt when the round begins. later: each has been answered once before.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from bench import records
from bench.measure import say
from bench.reward_rounds import Devices, RewardRounds, Timed

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask, from_mapping
from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.rewards.domains import build_scorer
from jaxrl.rewards.pool import build_pool
from jaxrl.sim.workload import ModelledWorkload, uniform
from jaxrl.types import Prompt, Sample, SampleKey

SLEEPER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(solution_str))
    return 1.0
"""
LEAST_S, MOST_S = 0.2, 30.0  # of a reward
MODEL, DEVICE = "Qwen2.5-7B", "H100"
MIN_LIMIT_S, MAX_LIMIT_S = 2.0, 30.0  # of a test case
PROGRAM_S, PROGRAM_SIGMA = 0.5, 0.7  # median and spread of the seconds of a program that is right
_SECONDS = 17  # what a random number is for
QUICK = {"prompts": 2, "samples": 2, "workers": 2, "scale": 0.01, "max_length": 512, "repetitions": 2}
COUNTS = ("prompts", "samples", "workers", "max_length", "repetitions")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cases", nargs="+", choices=("overlap", "timeouts"), default=["overlap", "timeouts"])
    made.add_argument("--prompts", type=int, default=16, help="prompts of a batch (16)")
    made.add_argument("--samples", type=int, default=8, help="responses to each (8)")
    made.add_argument("--workers", type=int, default=32, help="processes that score (32)")
    made.add_argument("--scale", type=float, default=0.1, help="what all seconds are multiplied by (0.1)")
    made.add_argument("--endless", type=float, default=0.05, help="share of programs that never end (0.05)")
    made.add_argument("--median-length", type=int, default=600, help="of the lognormal lengths, tokens (600)")
    made.add_argument("--max-length", type=int, default=4096, help="cap on a length, tokens (4096)")
    made.add_argument("--repetitions", type=int, default=5, help="rounds of each case, in turns (5)")
    made.add_argument("--seed", type=int, default=0, help="of lengths and seconds (0)")
    records.record_options(made, "few and fast")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2: was asked for nonsense."""
    try:
        options = records.parse_counts(parser(), arguments, QUICK, COUNTS)
        if not 0 < options.scale <= 1 or not 0 <= options.endless < 1:
            raise ValueError(
                f"--scale ({options.scale:g}) must be in (0, 1], --endless ({options.endless:g}) in [0, 1)"
            )
    except ValueError as error:
        print(f"bench_rewards: {error}", file=sys.stderr)
        return 2
    head = records.header("rewards", records.describe_host(), records.versions(), records.command(arguments))
    records.print_header(head, say)
    cases = {"overlap": overlap, "timeouts": timeouts}
    found = [cases[name](options) for name in options.cases]
    for case in found:
        show(case)
    if options.json is not None:
        record = head | {"scale": options.scale, "results": {"cases": found}}
        print(f"appended to {records.append_record(options.json, record).name}")
    return 0


# ---------------------------------------------------------------- rewards beside the rollout and after it


def overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Rewards of 0.2 to 30 s, beside the rollout and after it."""

    def seconds_of(key: SampleKey) -> float:
        drawn = uniform(_SECONDS, options.seed, key.epoch, key.prompt_index, key.sample_index)
        return options.scale * LEAST_S * (MOST_S / LEAST_S) ** drawn

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sleeper.py"
        file.write_text(SLEEPER)
        reward = {"kind": "custom", "path": str(file), "timeout_s": 0.0, "num_workers": options.workers}
        config = from_mapping({"model": {"path": "none"}, "reward": reward})
        with closing(build_pool(config, build_scorer(config))) as pool:
            pool.warm()
            rounds = _rounds(options, pool, lambda sample: str(seconds_of(sample.key)), _problem)
            runs = in_turns(
                options.repetitions,
                {
                    "beside": lambda epoch: rounds.run("sample", epoch),
                    "after": lambda epoch: rounds.run("rollout", epoch),
                },
            )
    found = {name: medians(timed) for name, timed in runs.items()}
    ratios = [after.step_s / beside.step_s for beside, after in zip(runs["beside"], runs["after"], strict=True)]
    return {"case": "overlap", "rounds": options.repetitions, **found, "after_over_beside": spread(ratios)}


# ---------------------------------------------------------------- time limits of test cases


def timeouts(options: argparse.Namespace) -> dict[str, Any]:
    """Programs of which a share never ends, with fixed and with adaptive limits."""
    scoring = SimulatedScoring(PROGRAM_S, PROGRAM_SIGMA, correlation=0.8, hang_share=options.endless)
    programs = _workload(options, scoring, timeout_s=math.inf)

    def program_of(sample: Sample) -> str:
        seconds = programs.reward_s(sample.key)
        waits = "while True: time.sleep(1)" if seconds == math.inf else f"time.sleep({seconds * options.scale!r})"
        return f"```python\nimport time\n{waits}\nprint(42)\n```"

    config = code_config(options)
    with closing(build_pool(config, build_scorer(config))) as pool:
        pool.warm()
        rounds = _rounds(options, pool, program_of, _code_problem)
        taught = AdaptiveTimeouts.configured(config)
        assert taught is not None
        rounds.run("sample", 1000, taught)  # an epoch before all others
        known = taught.state_dict()

        def adaptive(epoch: int, state: Mapping[str, Any]) -> Timed:
            own = AdaptiveTimeouts.configured(config)
            assert own is not None
            own.load_state_dict(state)
            return rounds.run("sample", epoch, own)

        runs = in_turns(
            options.repetitions,
            {
                "fixed": lambda epoch: rounds.run("sample", epoch),
                "first_epoch": lambda epoch: adaptive(epoch, {}),
                "later": lambda epoch: adaptive(epoch, known),
            },
        )
    found: dict[str, Any] = {name: medians(timed) for name, timed in runs.items()}
    for name in ("first_epoch", "later"):
        pairs = zip(runs["fixed"], runs[name], strict=True)
        found[f"fixed_over_{name}"] = spread([fixed.step_s / own.step_s for fixed, own in pairs])
    return {"case": "timeouts", "rounds": options.repetitions, "endless": options.endless, **found}


def code_config(options: argparse.Namespace) -> Config:
    """Rewards by running code, with scaled limits."""
    limits = {"min_timeout_s": MIN_LIMIT_S * options.scale, "max_timeout_s": MAX_LIMIT_S * options.scale}
    reward = {"kind": "code", "code": limits, "num_workers": options.workers}
    return from_mapping({"model": {"path": "none"}, "reward": reward})


# ---------------------------------------------------------------- shared


def _workload(options: argparse.Namespace, scoring: SimulatedScoring, timeout_s: float) -> ModelledWorkload:
    lengths = SimulatedLengths(options.median_length, 0.8)
    task = SimulatedTask("bench", response=lengths, prompt_median=256, prompt_sigma=0.0, scoring=scoring)
    return ModelledWorkload(options.seed, (task,), options.max_length, 256, timeout_s)


def _rounds(
    options: argparse.Namespace, pool: Any, text_of: Callable[[Sample], str], problem: Callable[[int], Prompt]
) -> RewardRounds:
    devices = Devices(MODEL, DEVICE, options.prompts * options.samples, 1 / options.scale)
    workload = _workload(options, SimulatedScoring(), math.inf)
    return RewardRounds(devices, workload, options.max_length, pool, text_of, problem, options.prompts, options.samples)


def _problem(index: int) -> Prompt:
    return Prompt(0, index, (0,) * 256, f"problem {index}", "bench")


def _code_problem(index: int) -> Prompt:
    tests = {"inputs": [""], "outputs": ["42\n"]}
    return Prompt(0, index, (0,) * 256, f"problem {index}", "bench", None, tests)


def in_turns(repetitions: int, cases: Mapping[str, Callable[[int], Timed]]) -> dict[str, list[Timed]]:
    """Each case once with the samples of an epoch, then all of them again with those of the next."""
    found: dict[str, list[Timed]] = {name: [] for name in cases}
    for epoch in range(repetitions):
        for name, run in cases.items():
            found[name].append(run(epoch))
            say(f"{name} {epoch}: {found[name][-1].step_s:.1f} s")
    return found


def medians(timed: Sequence[Timed]) -> dict[str, float]:
    """Of rounds; `late_s`: at most, over the bound of each."""

    def median(value: Callable[[Timed], float]) -> float:
        return statistics.median(map(value, timed))

    found = {
        "step_s": median(lambda one: one.step_s),
        "rollout_s": median(lambda one: one.rollout_s),
        "bound_s": median(lambda one: one.bound_s),
        "late_s": max(one.step_s - one.bound_s for one in timed),
        "scoring_s": median(lambda one: one.scoring_s),
        "mean_reward": statistics.mean(verdict.reward for one in timed for verdict in one.verdicts.values()),
    }
    cut = [one.metrics["reward/code/cut_off"] for one in timed if "reward/code/cut_off" in one.metrics]
    saved = [one.metrics["reward/code/saved_s"] * one.speed for one in timed if "reward/code/saved_s" in one.metrics]
    return found | ({"cut_off": statistics.mean(cut), "saved_s": statistics.mean(saved)} if cut else {})


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def show(case: Mapping[str, Any]) -> None:
    """Prints a case's figures."""
    print(f"{case['case']}, {case['rounds']} rounds each, unscaled seconds:")
    for name, values in case.items():
        if isinstance(values, dict) and "step_s" in values:
            print(f"  {name:<12} " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
        elif isinstance(values, dict):
            print(f"  {name}: {values['median']:.2f} ({values['least']:.2f} to {values['most']:.2f})")


if __name__ == "__main__":
    sys.exit(main())
