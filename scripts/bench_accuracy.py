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
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from accuracy import figures, runs, task, warm_start
from bench import records

from jaxrl.config.files import load


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where runs and the page go")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each rule (5)")
    for name, value in asdict(runs.Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"({value})")
    records.record_options(parser)
    options = parser.parse_args(arguments)
    for name in ("seeds", *asdict(runs.Sizes())):
        value = getattr(options, name)
        if (value < 1 and isinstance(value, int)) or value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} ({value}) must be at least 1, or above 0 for a loss")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parsed(arguments)
        results, start = _run(options)
    except ValueError as error:
        print(f"bench_accuracy: {error}", file=sys.stderr)
        return 2
    rows = figures.table(results, start)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    (options.out / "accuracy.html").write_text(figures.page(results, start), encoding="utf-8")
    harmed = figures.harmed(results)
    say(f"{', '.join(harmed)}: more than two standard errors below plain" if harmed else "no rule is harmed")
    if options.json is not None:
        import jax

        used = {name: version(name) for name in ("jax", "jaxlib", "optax")}
        head = records.header("accuracy", records.describe_devices(jax.devices()), used, records.command(arguments))
        record = head | {"start": start, "results": [asdict(one) for one in results], "harmed": harmed}
        say(f"appended to {records.append_record(options.json, record).name}")
    return 1 if harmed else 0


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


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
