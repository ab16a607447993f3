"""What each value of an option costs: simulated runs over several seeds, one line per value.

    python scripts/bench.py option --config configs/partial_rollout.yaml rollout.partial_rollout.max_staleness 1 2 -1

Runs what `jaxrl simulate` runs, in memory, once per value and seed (`trainer.seed`, `data.seed`): means over seeds of
each run's mean over steps, with standard deviations. Seconds are simulated, but for `cpu_s`, what a step takes this
process. Shares are of tokens: `thrown_share` of all that were drawn, `stale_share` of those trained on; `lag` is the
mean number of versions of a trained token, `prompts` are those launched a step. The first --skip steps are left out, as
rules begin with nothing carried. `tokens`, of the whole run, is the mean length of a trained response; `over_policy` is
that over the lengths which plain batches of the same prompts have. A first line `(baseline)` comes from --baseline.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.harness import Bench, Case, Values, say
from jaxrl.config import Config, ConfigError
from jaxrl.config import files as config_files
from jaxrl.run.simulation import build, rare_collections
from jaxrl.sim.configured import cost_model, layout_sizes, model_sizes, workload_of
from jaxrl.types import SampleKey


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.skip < options.steps:
        raise ValueError(f"--skip ({options.skip}) must be at least 0 and below --steps ({options.steps})")
    if len(options.words) < 2 or not options.config:
        raise ValueError("--config FILE, an option and its values are needed")
    options.repetitions = options.seeds


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    option, *values = options.words
    named = {"(baseline)": options.baseline} if options.baseline else {}
    named |= {value: f"{option}={value}" for value in values}
    group = []
    for name, override in named.items():
        try:
            _config(options, override, 0)
            how = {"case": name}
            group.append(Case(how, lambda seed, one=override: run(_config(options, one, seed), options.skip)))
        except ConfigError as error:
            say(f"{name}: refused: {error}")
    yield group


def _config(options: argparse.Namespace, override: str, seed: int) -> Config:
    steps = f"trainer.total_training_steps={options.steps}"
    seeds = f"trainer.seed={seed}", f"data.seed={seed}"
    return config_files.load(options.config, (steps, *seeds, *getattr(options, "with"), override))


def run(config: Config, skip: int) -> Values:
    """One run's means; those of shares are over tokens."""
    steps: list[dict[str, float]] = []
    trained: list[int] = []
    lengths: list[tuple[int, int]] = []
    cpu_s = [time.process_time()]

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        cpu_s.append(time.process_time())
        for group in groups:
            keys = [SampleKey(*group.prompt.key, sample_index=i) for i in range(len(group.samples))]
            first = [workload.length(key, step) for key in keys]
            lengths.extend(zip(map(len, group.samples), first, strict=True))
        if step > skip:
            steps.append(measured)
            trained.append(sum(len(sample) for group in groups for sample in group.samples))

    cost, _ = cost_model(config)
    workload, _ = workload_of(config)
    layouts = layout_sizes(config, cost, model_sizes(config))
    with rare_collections():
        build(config, cost, workload, on_step=on_step, layouts=layouts).loop.run()

    def of(name: str) -> list[float]:
        return [measured.get(name, 0.0) for measured in steps]

    def weighted(name: str) -> float:
        return sum(value * count for value, count in zip(of(name), trained, strict=True)) / sum(trained)

    tokens, drawn = map(statistics.fmean, zip(*lengths, strict=True))
    thrown = sum(of("rollout/thrown_tokens"))
    return {
        "step_s": statistics.fmean(of("timing_s/step")),
        "rollout_s": statistics.fmean(of("timing_s/gen")) + statistics.fmean(of("timing_s/reward")),
        "thrown_share": thrown / (sum(trained) + thrown + sum(of("rollout/filtered_tokens"))),
        "stale_share": weighted("training/off_policy/share"),
        "lag": weighted("training/off_policy/mean_staleness"),
        "restarted": statistics.fmean(of("rollout/restarted_samples")),
        "tokens": tokens,
        "over_policy": tokens / drawn,
        "prompts": statistics.fmean(of("rollout/launched_prompts")),
        "cpu_s": (cpu_s[-1] - cpu_s[skip]) / len(steps),
    }


OPTIONS = {
    "config": ("", "of the run"),
    "steps": (40, "per run"),
    "skip": (5, "first steps that do not count"),
    "seeds": (5, "runs per value"),
    "baseline": ("", "an override of its own line (section.enable=false)"),
    "with": (str, "overrides for all lines"),
    "*words": (str, "OPTION VALUE ..."),
}
BENCH = Bench(__doc__, cases, OPTIONS, None, place="host", warm_up=0, average="mean", has_model=False, check=_check)
