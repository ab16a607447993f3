#!/usr/bin/env python3
"""What a run costs in several processes: `jaxrl train` of a small model in 1, 2 and 4 on this machine, taking turns.

    python scripts/bench_hosts_overhead.py [--processes 1 2 4] [--devices 4] [--repetitions 3] [--json]
    python scripts/bench_hosts_overhead.py --against FOLDER

All runs have the same devices (virtual ones of the CPU), workers and batches, so they draw the same responses; one
process has no launcher. Programs are float32, and the model's weights are random.

- seconds per phase: medians over a run's steps but the first --skip, then over repetitions; behind them the least and
  the largest of the repetitions.
- stream: milliseconds that writing and reading cost a process in a step, and the bytes of a step; a put, a read of a
  value that another process has just written, a barrier and a gate are those of `jaxrl hosts` (p50 and p95).
- exchange: bytes of tokens that came from others in a step, over its seconds.
- sync: bytes of the weights that each device ends with, over `timing_s/sync`.

--against: one process, without a launcher and without several workers, here and in another checkout of the project, in
turns; the ratio of each repetition's two medians, here over there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from bench import records
from bench.host_cases import PHASES, Runs, Sizes
from bench.measure import say

QUICK = {"processes": [1, 2], "devices": 2, "steps": 3, "skip": 1, "repetitions": 1}
QUICK |= {"prompts": 2, "samples": 2, "longest": 16, "hidden": 32}
COUNTS = ("processes", "devices", "steps", "repetitions", "prompts", "samples", "longest", "hidden")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (1 2 4)")
    made.add_argument("--devices", type=int, default=4, help="of all processes together; as many workers (4)")
    made.add_argument("--steps", type=int, default=12, help="of a run (12)")
    made.add_argument("--skip", type=int, default=3, help="steps that do not count, at its beginning (3)")
    made.add_argument("--prompts", type=int, default=16, help="of a batch (16)")
    made.add_argument("--samples", type=int, default=4, help="responses to a prompt (4)")
    made.add_argument("--longest", type=int, default=128, help="most tokens of a response (128)")
    made.add_argument("--hidden", type=int, default=128, help="the model's hidden size (128)")
    made.add_argument("--repetitions", type=int, default=3, help="runs of each case, in turns (3)")
    made.add_argument("--folder", type=Path, help="keeps programs and runs: those of earlier times count as well")
    made.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout of this project")
    records.record_options(made, "few steps of a tiny model")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2: was asked for nonsense."""
    try:
        options = records.parse_counts(parser(), arguments, QUICK, COUNTS)
        if not 0 <= options.skip < options.steps:
            raise ValueError(f"--skip ({options.skip}) must be at least 0 and below --steps ({options.steps})")
        for count in options.processes:
            if options.devices % count:
                raise ValueError(f"--devices ({options.devices}) must be a multiple of --processes ({count})")
        if options.against is not None and not (options.against / "jaxrl").is_dir():
            raise ValueError(f"--against ({options.against}) must be a checkout of this project: it has no jaxrl")
    except ValueError as error:
        print(f"bench_hosts_overhead: {error}", file=sys.stderr)
        return 2
    head = records.header("hosts-overhead", records.describe_host(), records.versions(), records.command(arguments))
    records.print_header(head, say)
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        sizes = ("devices", "devices", "steps", "skip", "prompts", "samples", "longest", "hidden")
        runs = Runs(Path(folder).resolve(), Sizes(*(getattr(options, name) for name in sizes)))
        if options.against is not None:
            results = _against(runs, options.against.resolve(), options.repetitions)
        else:
            results = _cases(runs, options.processes, options.repetitions)
    if options.json is not None:
        print(f"appended to {records.append_record(options.json, head | {'results': results}).name}")
    return 0


KEPT = "measured.jsonl"
Measured = dict[str, list[dict[str, float]]]


def _in_turns(cases: Mapping[str, Callable[[], dict[str, float]]], repetitions: int, kept: Path) -> Measured:
    """What each case has measured, here and at earlier times in the same folder. The first run of each fills the
    compilation cache and does not count.

    Args:
      kept: a file with a line for each run.
    """
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    runs: Measured = {name: [] for name in cases}
    for name, measured in map(json.loads, lines):
        if name in cases:
            runs[name].append(measured)
    filling = [name for name in cases if not runs[name]]
    for name in filling + [*cases] * repetitions:
        runs[name].append(cases[name]())
        last = runs[name][-1]
        with open(kept, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, last]) + "\n")
        counts = "" if len(runs[name]) > 1 else ", not counted"
        say(f"  {name}: {last['seconds']:.1f} s in all, {last['timing_s/step']:.3f} s a step{counts}")
    return {name: own[1:] for name, own in runs.items()}


def _spread(values: Sequence[float]) -> list[float]:
    """Median, least, largest."""
    return [statistics.median(values), min(values), max(values)]


def _cases(runs: Runs, processes: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    cases = {f"{count} processes": partial(runs.train, count) for count in processes}
    measured = _in_turns(cases, repetitions, runs.folder / KEPT)
    assert len({each["tokens"] for own in measured.values() for each in own}) == 1, "all draw the same"
    weights, results = runs.weight_bytes, []
    for count, own in zip(processes, measured.values(), strict=True):
        phases = {name: _spread([each[f"timing_s/{name}"] for each in own]) for name in PHASES}
        result: dict[str, Any] = {"processes": count, "runs": len(own), "seconds": phases, "weight_bytes": weights}
        result["sync_bytes_per_s"] = _spread([weights / each["timing_s/sync"] for each in own])
        if count > 1:
            names = sorted(name for name in own[0] if name.startswith("hosts/"))
            result["hosts"] = {name: _spread([each[name] for each in own]) for name in names}
            exchanged = [each["hosts/exchange_bytes"] / each["hosts/exchange_s"] for each in own]
            result["exchange_bytes_per_s"] = _spread(exchanged)
            found = runs.hosts(count)
            result["board"], result["collectives"] = found["board"], found["collectives"]
        results.append(result)
        _say_case(result)
    return results


def _say_case(result: dict[str, Any]) -> None:
    count = result["processes"]
    say(f"{count} {'process' if count == 1 else 'processes'}")
    for name, (median, least, most) in result["seconds"].items():
        say(f"  {name:<14}{median:8.4f} s  ({least:.4f} to {most:.4f})")
    rate = _rate(result["sync_bytes_per_s"])
    say(f"  sync of {result['weight_bytes'] / 1e6:.2f} MB: {rate}")
    if count == 1:
        return
    own = {name.removeprefix("hosts/"): values[0] for name, values in result["hosts"].items()}
    say(f"  exchange of {own['exchange_bytes'] / 1e3:.1f} kB: {_rate(result['exchange_bytes_per_s'])}")
    say(
        f"  stream, of process 0 in a step: {1e3 * own['stream_s']:.1f} ms for {own['stream_batches']:.0f} batches of "
        f"{own['stream_bytes'] / 1e3:.1f} kB together; {own['waited_s']:.3f} s waiting, {own['gate_s']:.3f} s at gates"
    )
    for name, each in result["board"].items():
        say(f"  {name:<14}p50 {each['p50_ms']:.2f} ms  p95 {each['p95_ms']:.2f} ms")
    for name, each in result["collectives"].items():
        say(f"  {name:<14}{each['bytes_per_s'] / 1e6:.1f} MB/s")


def _rate(values: Sequence[float]) -> str:
    median, least, most = (value / 1e6 for value in values)
    return f"{median:.2f} MB/s ({least:.2f} to {most:.2f})"


def _against(runs: Runs, other: Path, repetitions: int) -> list[dict[str, Any]]:
    cases = {"here": partial(runs.train, 1, ordered=False), "there": partial(runs.train, 1, other, ordered=False)}
    measured = _in_turns(cases, repetitions, runs.folder / KEPT)
    git = ["git", "-C", str(other), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    result: dict[str, Any] = {"there": commit or "unknown", "runs": 0, "here": {}, "before": {}, "ratio": {}}
    result["runs"] = min(map(len, measured.values()))
    say(f"one process, here over {result['there']}")
    for name in PHASES:
        here, there = ([each[f"timing_s/{name}"] for each in own] for own in measured.values())
        ratios = [a / b if b else 1.0 for a, b in zip(here, there, strict=False)]  # one may be ahead
        result["here"][name], result["before"][name], result["ratio"][name] = map(_spread, (here, there, ratios))
        median, least, most = result["ratio"][name]
        say(
            f"  {name:<14}{statistics.median(here):8.4f} s  {statistics.median(there):8.4f} s  ratio {median:.3f} "
            f"({least:.3f} to {most:.3f})"
        )
    return [result]


if __name__ == "__main__":
    sys.exit(main())
