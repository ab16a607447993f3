#!/usr/bin/env python3
"""Whether tail batching and partial rollout cost accuracy: a small task, trained with each rule and several seeds.

    python scripts/bench_accuracy.py --out runs/accuracy [--seeds 5] [--json]

The task, running sums (`scripts/accuracy/task.py`), has responses with a long tail, and the long ones are the hard
ones. A small decoder gets a short supervised start, which leaves it right about half the time. From there every rule
trains it for the same number of steps with the same batch size, each seed with another order of the data and other
samples, by `jaxrl train`; `jaxrl eval` then draws several responses to every held-out problem.

- accuracy: mean reward over held-out problems and samples; beside it that of the longest quarter of the problems,
  which a rule that neglects long responses would lose first. ±: standard error over seeds.
- below plain: by how many standard errors of the difference a rule lies below plain batches; negative: above.

Status 1 if a rule lies more than two below. Two minutes a run on two cores once its programs are cached. A run
that is there is not run again: call it again to go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from accuracy import figures, runs, task, warm_start
from bench import jax_cases
from bench.frame import Benchmark, Record, Session
from bench.measure import say

from jaxrl.config.files import load


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where runs and the page go")
    made.add_argument("--seeds", type=int, default=5, help="runs of each rule (5)")
    for name, value in asdict(runs.Sizes()).items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"({value})")


def _check(options: argparse.Namespace) -> None:
    if options.start_loss <= 0:
        raise ValueError(f"--start-loss ({options.start_loss}) must be above 0")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    with session.on(jax_cases.described(), packages=("optax",), is_timed=False):
        results, start = _run(options)
    rows = figures.table(results, start)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    (options.out / "accuracy.html").write_text(figures.page(results, start), encoding="utf-8")
    harmed = figures.harmed(results)
    say("no rule is harmed" if not harmed else f"harmed: {', '.join(harmed)}")
    return session.record([asdict(one) for one in results], start=start, harmed=harmed)


def _harmed(record: Record) -> Iterable[str]:
    return [f"{rule}: more than two standard errors below plain" for rule in record["harmed"]]


def _run(options: argparse.Namespace) -> tuple[list[runs.Result], tuple[float, float]]:
    """Every run, the rules in turns, and the accuracy before."""
    sizes = runs.Sizes(**{name: getattr(options, name) for name in asdict(runs.Sizes())})
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "sizes.json"
    if made.exists() and json.loads(made.read_text()) != asdict(sizes):
        raise ValueError(f"--out ({options.out}) holds runs of other sizes: {made.read_text()}")
    config = runs.write_config(folder, sizes)
    before = folder / "start.json"
    if not before.exists():
        task.write_files(folder, sizes.num_train, sizes.num_held_out, seed=0)
        warm_start.write_model(folder / "model", sizes.start_loss, 0, say)
        made.write_text(json.dumps(asdict(sizes)))
        for overrides in runs.RULES.values():
            load(str(config), overrides)  # an impossible setting is refused before anything runs
        before.write_text(json.dumps(runs.evaluate(folder, config, None, "start")))
    start = tuple(json.loads(before.read_text()))
    say(f"before: accuracy {start[0]:.3f}, longest quarter {start[1]:.3f}")
    results = []
    for seed in range(options.seeds):
        for rule in runs.RULES:
            results.append(runs.train(folder, config, rule, seed))
            one = results[-1]
            say(f"{rule}, seed {seed}: accuracy {one.accuracy:.3f}, longest quarter {one.long_accuracy:.3f}")
    return results, start


COUNTS = ("seeds", *(name for name in asdict(runs.Sizes()) if name != "start_loss"))
BENCHMARK = Benchmark("accuracy", __doc__, _measure, _options, None, COUNTS, _check, _harmed, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
