#!/usr/bin/env python3
"""The papers' experiments on modelled devices: ours beside theirs.

    python scripts/reproduce_papers.py                      # all, to docs/reproductions/<paper>-<date>.{json,md}
    python scripts/reproduce_papers.py rollpacker --processes 4
    python scripts/reproduce_papers.py --calibrate          # the calibration file anew, from published facts alone
    python scripts/reproduce_papers.py --page docs/reproductions/april-2026-11-22.json    # its page anew

jaxrl must be importable (`pip install -e .`, or `PYTHONPATH=.` in front). Lengths and costs come from the calibration
file, which was fitted to facts about the papers' baselines and never to a speed-up (`papers/calibrate.py`); rounds,
engine, batcher and block accounting are those that a real run uses. What each number means, and what it rests on:
docs/reproductions/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from papers import calibrate, pat_closed, rhymerl_closed, what_if
from papers.cases import EXPERIMENTS, cases_of, headline, jobs_of
from papers.pages import page
from papers.records import header, read
from papers.runs import Steps, run_together
from papers.setups import Case

MOST_STEPS = 20  # of a run in closed form
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reproductions"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The papers' experiments on modelled devices: ours beside theirs.")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"{', '.join(EXPERIMENTS)} (all)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the main runs, in whole periods (40)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case: means and deviations are theirs (5)")
    parser.add_argument("--decode-steps", type=int, default=64, help="most decode steps of a plan (64)")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--calibration", type=Path, default=FOLDER / "calibration.json", help="the constants")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where results go")
    parser.add_argument("--tiny", action="store_true", help="tries the script out: every size divided, no result")
    parser.add_argument("--calibrate", action="store_true", help="write the calibration file and end (a minute)")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="compute the other readings of a result anew, write its page, and end"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.papers if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"PAPER ({unknown[0]!r}) must be one of {', '.join(EXPERIMENTS)}")
    for name in ("steps", "seeds", "decode_steps", "processes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} ({getattr(options, name)}) must be >= 1")
    return options


def _run(cases: Sequence[Case], calibration_file: Path) -> list[Steps]:
    return run_together(cases, calibrate.read(calibration_file))


def _in_order(stack: ExitStack, processes: int) -> Callable[..., Iterable[Any]]:
    """`map`, over several processes if there are to be more than one."""
    if processes == 1:
        return map
    # not by fork: the calling process may have threads
    return stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn"))).map


def simulate(
    cases: Sequence[Case], calibration_file: Path, processes: int, on_run: Callable[[Sequence[Steps]], object]
) -> list[Steps]:
    """Runs the cases, in order or several at a time; says of each how long it took, and hands out what is done."""
    done: list[Steps] = []
    began, jobs = time.perf_counter(), jobs_of(cases)
    with ExitStack() as stack:
        for found in _in_order(stack, processes)(_run, jobs, [calibration_file] * len(jobs)):
            for steps in found:
                done.append(steps)
                took = f"{steps.wall_s:.1f} s, {time.perf_counter() - began:.0f} s so far"
                print(f"{len(done)}/{len(cases)} {steps.case.title}: {took}", flush=True)
            on_run(done)
    return done


def other_readings(paper: str, cases: Sequence[Case], calibration_file: Path, processes: int) -> what_if.Readings:
    """Speed-ups of the paper's main table in closed form, over fewer steps, with one assumption changed at a time."""
    if paper == "rollpacker-whole":
        return {}  # its main table is that of `rollpacker`
    if cases[0].paper == "pat":
        return pat_closed.readings(calibrate.read(calibration_file), cases[0].scale)
    if cases[0].paper == "rhymerl":
        return rhymerl_closed.readings(cases, calibrate.read(calibration_file))
    chosen = [replace(case, steps=min(case.steps, MOST_STEPS)) for case in headline(cases)]
    columns = what_if.columns_of(chosen)
    asked = [(name, case) for name in what_if.names_of(chosen) for column in columns for case in column]
    with ExitStack() as stack:
        calibration = calibrate.read(calibration_file)
        found = iter(
            list(_in_order(stack, processes)(what_if.reading, *zip(*asked, strict=True), [calibration] * len(asked)))
            if asked
            else []
        )
        return {name: [[next(found) for _ in column] for column in columns] for name in what_if.names_of(chosen)}


def keep(file: Path, record: Mapping[str, Any], done: Sequence[Steps], readings: what_if.Readings) -> dict[str, Any]:
    """Writes a result; its header."""
    whole = {**record, "what_if": readings}
    file.write_text(json.dumps({**whole, "runs": [asdict(steps) for steps in done]}) + "\n", encoding="utf-8")
    return whole


def write(file: Path, record: Mapping[str, Any], done: Sequence[Steps], readings: what_if.Readings) -> str:
    """Writes a result and its page, which is returned."""
    text = page(keep(file, record, done, readings), done)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        if options.calibrate:
            calibrate.write(calibrate.calibrate(), options.calibration)
            print(f"wrote {options.calibration}: commit it before anything is run with it")
            return 0
        if options.page:
            record, done = read(options.page)
            cases = [steps.case for steps in done]
            write(
                options.page,
                record,
                done,
                other_readings(record["paper"], cases, options.calibration, options.processes),
            )
            return 0
        calibrate.read(options.calibration)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for paper in options.papers or EXPERIMENTS:
        began = datetime.now(UTC)
        record = header(began, paper, arguments, options.calibration, options.tiny)
        scale = 32 if options.tiny else 1
        cases = cases_of(paper, options.steps, range(options.seeds), options.decode_steps, scale)
        file = options.out / f"{paper}-{began.date().isoformat()}.json"
        # kept after each run; `--page` makes the rest, should this be ended
        done = simulate(cases, options.calibration, options.processes, partial(keep, file, record, readings={}))
        text = write(file, record, done, other_readings(paper, cases, options.calibration, options.processes))
        print(f"\n{text}\nwrote {file} and {file.with_suffix('.md').name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
