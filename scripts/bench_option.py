#!/usr/bin/env python3
"""What each value of an option costs: simulated runs over several seeds, one line per value.

    python scripts/bench_option.py --config configs/partial_rollout.yaml rollout.partial_rollout.max_staleness 1 2 -1

Runs what `jaxrl simulate` runs, in memory, once per value and seed (`trainer.seed`, `data.seed`), and prints a table:
means over seeds of each run's mean over steps, with the standard deviation over seeds behind ±. Seconds are simulated,
but for *CPU s*, what a step takes this process. Shares are of tokens: *thrown* of all that were drawn, *stale* of those
trained on; *lag* is the mean number of versions of a trained token, *prompts* are those launched a step. The first
--skip steps are left out, as rules begin with nothing carried. A first line `(baseline)` comes from --baseline. Values
may be anything YAML reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say
from bench.simulated import simulate

from jaxrl.config import Config, ConfigError
from jaxrl.config import files as config_files

COLUMNS = ("s per step", "s of rollout", "thrown", "stale", "lag", "restarted", "prompts", "CPU s")


def run(config: Config, skip: int) -> dict[str, float]:
    """One run's means; those of shares are over tokens."""
    steps: list[dict[str, float]] = []
    trained: list[int] = []
    cpu_s: list[float] = [time.process_time()]

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        cpu_s.append(time.process_time())
        if step > skip:
            steps.append(measured)
            trained.append(sum(len(sample) for group in groups for sample in group.samples))

    simulate(config, on_step)

    def of(name: str) -> list[float]:
        return [measured.get(name, 0.0) for measured in steps]

    def weighted(name: str) -> float:
        return sum(value * count for value, count in zip(of(name), trained, strict=True)) / sum(trained)

    thrown = sum(of("rollout/thrown_tokens"))
    drawn = sum(trained) + thrown + sum(of("rollout/filtered_tokens"))
    rollout_s = [gen + reward for gen, reward in zip(of("timing_s/gen"), of("timing_s/reward"), strict=True)]
    return {
        "s per step": statistics.fmean(of("timing_s/step")),
        "s of rollout": statistics.fmean(rollout_s),
        "thrown": thrown / drawn,
        "stale": weighted("training/off_policy/share"),
        "lag": weighted("training/off_policy/mean_staleness"),
        "restarted": statistics.fmean(of("rollout/restarted_samples")),
        "prompts": statistics.fmean(of("rollout/launched_prompts")),
        "CPU s": (cpu_s[-1] - cpu_s[skip]) / len(steps),
    }


def line(name: str, runs: Sequence[dict[str, float]]) -> str:
    """A row of the table: mean ± standard deviation over seeds."""
    cells = []
    for column in COLUMNS:
        values = [each[column] for each in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        share = column in ("thrown", "stale")
        cells.append(
            f"{statistics.fmean(values):.1%} ± {spread:.1%}"
            if share
            else f"{statistics.fmean(values):.2f} ± {spread:.2f}"
        )
    return f"| {name} | {' | '.join(cells)} |"


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--config", required=True)
    made.add_argument("--steps", type=int, default=40, help="per run (40)")
    made.add_argument("--skip", type=int, default=5, help="first steps that do not count (5)")
    made.add_argument("--seeds", type=int, default=5, help="runs per value (5)")
    made.add_argument("--baseline", default="", help="an override of its own line (section.enable=false)")
    made.add_argument("--with", dest="more", nargs="*", default=[], help="overrides for all lines")
    made.add_argument("option")
    made.add_argument("values", nargs="+")


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.skip < options.steps:
        raise ValueError(f"--skip ({options.skip}) must be at least 0 and below --steps ({options.steps})")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    cases = {options.baseline: "(baseline)"} if options.baseline else {}
    cases |= {f"{options.option}={value}": value for value in options.values}
    found: dict[str, Any] = {}
    with session.on(records.describe_host(), is_timed=False):
        say(f"| {options.option} | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}")
        for override, name in cases.items():
            try:
                found[name] = [run(config, options.skip) for config in _configs(options, override)]
                say(line(name, found[name]))
            except ConfigError as error:
                say(f"| {name} | refused: {error} |{' |' * (len(COLUMNS) - 1)}")
    return session.record(found)


def _configs(options: argparse.Namespace, override: str) -> list[Config]:
    """One for each seed."""
    steps = f"trainer.total_training_steps={options.steps}"
    return [
        config_files.load(options.config, (steps, f"trainer.seed={seed}", f"data.seed={seed}", *options.more, override))
        for seed in range(options.seeds)
    ]


BENCHMARK = Benchmark("option", __doc__, _measure, _options, None, ("steps", "seeds"), _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
