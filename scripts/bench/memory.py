"""What a training run holds while it runs: memory, threads and open files, looked at from outside.

    python scripts/bench.py memory --run-dir out/run [--every 50] [--json] -- --config configs/quickstart.yaml OVERRIDES

What stands behind `--` goes to `jaxrl train`. The run's own process is read several times a second, and of each figure
the lowest of every so many steps counts: a step's arrays and a save's threads come and go, and what leaks stays.

- looks: resident memory, the part of it that no file backs (`anonymous_bytes`), threads and files.
- quarter_N_bytes: the median of `anonymous_bytes` in each quarter of the looks. Programs are compiled in the first, and
  the allocator keeps what the largest batches and saves needed, which come ever more seldom: what is added from one
  quarter to the next must fall, where a leak adds the same each time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Bench, Case, Values, say
from bench.worker import process_figures


def look(pid: int) -> dict[str, int]:
    """Of a process that runs; empty once it has ended."""
    try:
        found = process_figures(pid)
        found |= {"files": len(os.listdir(f"/proc/{pid}/fd"))}
    except OSError:
        return {}
    return found if "anonymous_bytes" in found else {}


def num_steps(run_dir: Path) -> int:
    """That have ended."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(run_dir: Path, every: int, train: Sequence[str]) -> Iterator[dict[str, int]]:
    """Runs `jaxrl train`; the lowest figures of each `every` steps. Raises ValueError where it does not end well."""
    words = [sys.executable, "-m", "jaxrl", "train", *train, f"trainer.run_dir={run_dir}"]
    with subprocess.Popen(words, stdout=2) as process:
        lowest: dict[str, int] = {}
        done = 0
        while process.poll() is None:
            time.sleep(0.1)
            if now := look(process.pid):
                lowest = {name: min(value, lowest.get(name, value)) for name, value in now.items()}
            if (steps := num_steps(run_dir)) >= done + every and lowest:
                done = steps - steps % every
                yield {"step": done, **lowest}
                lowest = {}
    if process.returncode != 0:
        raise ValueError(f"jaxrl train ended with exit status {process.returncode}")


def quarters(looks: Sequence[dict[str, int]]) -> Values:
    """Raises ValueError for too few looks."""
    size = len(looks) // 4
    if size < 1:
        raise ValueError(f"{len(looks)} looks are too few: at least 4 are needed, so more steps or a smaller --every")
    found = [each["anonymous_bytes"] for each in looks]
    parts = [found[i * size : (i + 1) * size] for i in range(3)] + [found[3 * size :]]
    return {f"quarter_{i}_bytes": float(statistics.median(part)) for i, part in enumerate(parts, start=1)}


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    looks: list[dict[str, int]] = []

    def run(turn: int) -> Values:
        for each in watch(Path(options.run_dir), options.every, options.train):
            say("  ".join(f"{name} {value}" for name, value in each.items()))
            looks.append(each)
        return quarters(looks)

    extra: dict[str, Any] = {"looks": looks}
    yield [Case({"case": "run"}, run, extra=extra)]


def _check(options: argparse.Namespace) -> None:
    options.repetitions = 1
    if not options.run_dir or num_steps(Path(options.run_dir)):
        raise ValueError(f"--run-dir ({options.run_dir}) must be an empty folder, and no run")


OPTIONS = {
    "run_dir": ("", "trainer.run_dir"),
    "every": (50, "steps from one line to the next"),
    "*train": (str, "arguments of jaxrl train, behind --"),
}
BENCH = Bench(__doc__, cases, OPTIONS, None, place="host", warm_up=0, has_model=False, check=_check)
