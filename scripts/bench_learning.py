#!/usr/bin/env python3
"""How fast settings learn: training runs over several seeds, a line per setting.

    python scripts/bench_learning.py --config configs/quickstart.yaml --out runs/ranks [--seeds 3] [--with OVERRIDE ...]
        --case full --case "rank 8" model.lora_rank=8 actor.optim.lr=2.0e-4 [--json]

Each case is a name and the overrides of it; `--with` are those of all. A run is `jaxrl train` in a process of its own,
the cases in turns, and seed k gives `trainer.seed` and `data.seed`. A run that is there is not run again, and one that
was cut off goes on: call it again.

- step N: mean reward of the held-out prompts (`val/reward`) at each evaluation, mean ± standard deviation over seeds.
- s a step, s of update: medians over all steps of all seeds, without evaluations; the first step compiles and is left
  out.
- peak memory: of the process, from start to end, the largest of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say
from bench.worker import RSS_BYTES

from jaxrl.config import files as config_files
from jaxrl.record.metrics import read_metrics


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--config", required=True)
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the runs go")
    made.add_argument("--seeds", type=int, default=3, help="runs of each case (3)")
    made.add_argument("--with", dest="more", nargs="*", default=[], metavar="OVERRIDE", help="for all cases")
    made.add_argument(
        "--case", dest="cases", action="append", nargs="+", required=True, metavar="WORD", help="a name and overrides"
    )


def _check(options: argparse.Namespace) -> None:
    names = [name for name, *_ in options.cases]
    if double := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--case {min(double)}: two cases have that name")
    for _, *overrides in options.cases:  # an impossible setting is refused before anything runs
        config_files.load(options.config, (*options.more, *overrides))


def train(folder: Path, config: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """A run's figures, of `folder`: evaluations by step, seconds of steps and of updates, bytes at the peak.

    Raises ValueError where the run does not end well.
    """
    file = folder.with_name(f"{folder.name}.json")
    if not file.exists():
        seeds = (f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.run_dir={folder}")
        words = [sys.executable, "-m", "jaxrl", "train", "--config", config, *overrides, *seeds]
        process = subprocess.Popen(words, stdout=2)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise ValueError(f"jaxrl train ended with exit status {process.returncode}; the run is {folder}")
        file.write_text(json.dumps({"peak_bytes": used.ru_maxrss * RSS_BYTES}), encoding="utf-8")
    lines = read_metrics(folder)
    steps = [line for line in lines if "timing_s/step" in line][1:]
    return json.loads(file.read_text(encoding="utf-8")) | {
        "seed": seed,
        "held_out": {str(int(line["step"])): line["val/reward"] for line in lines if "val/reward" in line},
        "step_s": [line["timing_s/step"] - line.get("timing_s/testing", 0.0) for line in steps],
        "update_s": [line["timing_s/update_actor"] for line in steps],
    }


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Its lines: a case each, from the runs of its seeds."""
    steps = sorted({int(step) for runs in found.values() for run in runs for step in run["held_out"]})
    columns = ["", *(f"step {step}" for step in steps), "s a step", "s of update", "peak memory"]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, runs in found.items():
        rewards = [[run["held_out"][str(step)] for run in runs if str(step) in run["held_out"]] for step in steps]
        seconds = [statistics.median(s for run in runs for s in run[part]) for part in ("step_s", "update_s")]
        peak = max(run["peak_bytes"] for run in runs)
        cells = [*map(_mean, rewards), *(f"{s:.1f}" for s in seconds), f"{peak / 1e9:.2f} GB"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _measure(options: argparse.Namespace, session: Session) -> Record:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in options.cases}
    options.out.mkdir(parents=True, exist_ok=True)
    with session.on(records.describe_host(), is_timed=False):
        for seed in range(options.seeds):
            for name, *overrides in options.cases:
                folder = options.out.resolve() / f"{name.replace(' ', '_')}-{seed}"
                found[name].append(train(folder, options.config, seed, (*options.more, *overrides)))
                last = list(found[name][-1]["held_out"].values())[-1:]
                say(f"{name}, seed {seed}: held-out reward {' '.join(map('{:.3f}'.format, last))}")
        for line in table(found):
            say(line)
    return session.record(found)


BENCHMARK = Benchmark("learning", __doc__, _measure, _options, None, ("seeds",), _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
