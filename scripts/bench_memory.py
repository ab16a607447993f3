#!/usr/bin/env python3
"""What a training run holds while it runs: memory, threads and open files, looked at from outside.

    python scripts/bench_memory.py --run-dir out/run [--every 50] [--json] -- --config configs/quickstart.yaml OVERRIDES

What stands behind `--` goes to `jaxrl train`. The run's own process is read several times a second, and of each figure
the lowest of every so many steps counts: a step's arrays and a save's threads come and go, and what leaks stays.

- rss, anonymous: resident memory of the process, and the part of it that no file backs.
- quarters: the median of `anonymous` in each quarter of the looks. Programs are compiled in the first, and the
  allocator keeps what the largest batches and saves needed, which come ever more seldom: what is added from one quarter
  to the next must fall, where a leak adds the same each time.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.measure import say

LOOK_S = 0.1
_KEYS = {"VmRSS": "rss_bytes", "RssAnon": "anonymous_bytes", "Threads": "threads"}


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--run-dir", type=Path, required=True, metavar="FOLDER", help="trainer.run_dir")
    made.add_argument("--every", type=int, default=50, help="steps from one line to the next (50)")
    made.add_argument("train", nargs="+", metavar="ARGUMENT", help="of jaxrl train, behind --")


def look(pid: int) -> dict[str, int]:
    """Of a process that runs; empty once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
    if "RssAnon" not in found:
        return {}
    return {ours: found[name] * (1024 if name != "Threads" else 1) for name, ours in _KEYS.items()} | {"files": files}


def num_steps(run_dir: Path) -> int:
    """That have ended."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(run_dir: Path, every: int, train: Sequence[str]) -> list[dict[str, int]]:
    """Runs `jaxrl train`; the lowest figures of each `every` steps. Raises ValueError where it does not end well."""
    words = [sys.executable, "-m", "jaxrl", "train", *train, f"trainer.run_dir={run_dir}"]
    found: list[dict[str, int]] = []
    with subprocess.Popen(words, stdout=2) as process:
        lowest: Mapping[str, int] = {}
        done = 0
        while process.poll() is None:
            time.sleep(LOOK_S)
            if now := look(process.pid):
                lowest = {name: min(value, lowest.get(name, value)) for name, value in now.items()}
            if (steps := num_steps(run_dir)) >= done + every and lowest:
                done = steps - steps % every
                found.append({"step": done, **lowest})
                say(_line(found[-1]))
                lowest = {}
    if process.returncode != 0:
        raise ValueError(f"jaxrl train ended with exit status {process.returncode}")
    return found


def quarters(looks: Sequence[Mapping[str, int]]) -> list[int]:
    """Bytes of anonymous memory: the medians of the four quarters of the looks. Raises ValueError for too few."""
    size = len(looks) // 4
    if size < 1:
        raise ValueError(f"{len(looks)} looks are too few: at least 4 are needed, so more steps or a smaller --every")
    found = [each["anonymous_bytes"] for each in looks]
    parts = [found[i * size : (i + 1) * size] for i in range(3)] + [found[3 * size :]]
    return [round(statistics.median(part)) for part in parts]


def _line(found: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{name} {found[f'{name}_bytes'] / 2**20:.1f} MiB" for name in ("rss", "anonymous"))
    return f"step {found['step']}: {sizes}, {found['threads']} threads, {found['files']} files"


def _check(options: argparse.Namespace) -> None:
    if num_steps(options.run_dir):
        raise ValueError(f"--run-dir ({options.run_dir}) holds a run already: give it an empty folder")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    with session.on(records.describe_host(), is_timed=False):
        looks = watch(options.run_dir, options.every, options.train)
    found = quarters(looks)
    say("anonymous, by quarters: " + ", ".join(f"{each / 2**20:.1f}" for each in found) + " MiB")
    return session.record({"quarters_bytes": found, "looks": looks})


BENCHMARK = Benchmark("memory", __doc__, _measure, _options, None, ("every",), _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
