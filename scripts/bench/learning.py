"""How fast settings learn: training runs over several seeds, a line per setting.

    python scripts/bench.py learning --config configs/quickstart.yaml --out runs/ranks [--seeds 3] [--with OVERRIDE ...]
        --case full --case "rank 8" model.lora_rank=8 actor.optim.lr=2.0e-4 [--json]

Each case is a name and the overrides of it; `--with` are those of all. A run is `jaxrl train` in a process of its own,
the cases in turns, and seed k gives `trainer.seed` and `data.seed`. A run that is there is not run again, and one that
was cut off goes on: call it again.

- step N: mean reward of the held-out prompts (`val/reward`) at each evaluation; means and standard deviations over
  seeds.
- step_s, update_s: medians of a run's steps, without evaluations; the first step compiles and is left out.
- peak_bytes: of the process, from start to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import Bench, Case, Values
from jaxrl.config import files as config_files
from jaxrl.record.metrics import read_metrics


def _check(options: argparse.Namespace) -> None:
    names = [name for name, *_ in options.case or []]
    if not names or not options.config or not options.out or len({*names}) < len(names):
        raise ValueError("--config, --out and one --case or more are needed, each with a name of its own")
    for _, *overrides in options.case:  # an impossible setting is refused before anything runs
        config_files.load(options.config, (*getattr(options, "with"), *overrides))
    options.repetitions = options.seeds


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    yield [
        Case({"case": name}, lambda seed, name=name, own=own: train(out, name, options, seed, own))
        for name, *own in options.case
    ]


def train(out: Path, name: str, options: argparse.Namespace, seed: int, overrides: Sequence[str]) -> Values:
    """A run's figures. Raises ValueError where it does not end well."""
    folder = out / f"{name.replace(' ', '_')}-{seed}"
    peak = folder.with_name(f"{folder.name}.peak_bytes")
    if not peak.exists():
        seeds = (f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.run_dir={folder}")
        words = [sys.executable, "-m", "jaxrl", "train", "--config", options.config, *getattr(options, "with")]
        process = subprocess.Popen([*words, *overrides, *seeds], stdout=2)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise ValueError(f"jaxrl train ended with exit status {process.returncode}; the run is {folder}")
        peak.write_text(str(used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)), encoding="utf-8")
    lines = read_metrics(folder)
    steps = [line for line in lines if "timing_s/step" in line][1:]
    found = {f"step {int(line['step'])}": line["val/reward"] for line in lines if "val/reward" in line}
    found["step_s"] = statistics.median(line["timing_s/step"] - line.get("timing_s/testing", 0.0) for line in steps)
    found["update_s"] = statistics.median(line["timing_s/update_actor"] for line in steps)
    return found | {"peak_bytes": float(peak.read_text())}


OPTIONS = {
    "config": ("", "of the runs"),
    "out": ("", "the folder where the runs go"),
    "seeds": (3, "runs of each case"),
    "with": (str, "overrides for all cases"),
    "case": ([[]], "a name and overrides; again for each case"),
}
BENCH = Bench(__doc__, cases, OPTIONS, None, place="host", warm_up=0, average="mean", has_model=False, check=_check)
