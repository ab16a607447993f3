#!/usr/bin/env python3
"""What each value of an option costs: simulated runs over several seeds, one line per value.

    python scripts/bench_option.py --config configs/partial_rollout.yaml rollout.partial_rollout.max_staleness 1 2 -1

Runs what `jaxrl simulate` runs, in memory, once per value and seed (`trainer.seed`, `data.seed`), and prints a table:
means over seeds of each run's mean over steps, with the standard deviation over seeds behind ±. Seconds are simulated.
Shares are of tokens: *thrown* of all that were drawn, *stale* of those trained on; *lag* is the mean number of versions
of a trained token. The first --skip steps are left out, as rules begin with nothing carried. A first line `(baseline)`
comes from --baseline. Values may be anything YAML reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import records
from bench.measure import say

from jaxrl.config import Config, ConfigError
from jaxrl.config import files as config_files
from jaxrl.loop import Hooks
from jaxrl.runtime.simulation import build, rare_collections
from jaxrl.sim.configured import cost_model, machine_sizes, model_sizes, workload_of

COLUMNS = ("s per step", "s of rollout", "thrown", "stale", "lag", "restarted")


def run(config: Config, skip: int) -> dict[str, float]:
    """One run's means; those of shares are over tokens."""
    steps: list[dict[str, float]] = []
    trained: list[int] = []

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        if step > skip:
            steps.append(measured)
            trained.append(sum(len(sample) for group in groups for sample in group.samples))

    hooks = Hooks(lambda *_: None, on_step, lambda *_: None, lambda *_: None, lambda: False)
    cost, _ = cost_model(config)
    workload, _ = workload_of(config)
    with rare_collections():
        build(config, cost, workload, hooks, sizes=machine_sizes(config, cost, model_sizes(config))).loop.run()

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=40, help="per run (40)")
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count (5)")
    parser.add_argument("--seeds", type=int, default=5, help="runs per value (5)")
    parser.add_argument("--baseline", default="", help="an override of its own line (section.enable=false)")
    parser.add_argument("--with", dest="more", nargs="*", default=[], help="overrides for all lines")
    parser.add_argument("option")
    parser.add_argument("values", nargs="+")
    options = parser.parse_args([*(sys.argv[1:] if arguments is None else arguments)])
    say(f"command: {records.command()}\n")
    cases = {options.baseline: "(baseline)"} if options.baseline else {}
    cases |= {f"{options.option}={value}": value for value in options.values}
    say(f"| {options.option} | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}")
    for override, name in cases.items():
        try:
            configs = [
                config_files.load(
                    options.config,
                    (
                        f"trainer.total_training_steps={options.steps}",
                        f"trainer.seed={seed}",
                        f"data.seed={seed}",
                        *options.more,
                        override,
                    ),
                )
                for seed in range(options.seeds)
            ]
            say(line(name, [run(config, options.skip) for config in configs]))
        except ConfigError as error:
            say(f"| {name} | refused: {error} |{' |' * (len(COLUMNS) - 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
