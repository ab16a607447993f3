#!/usr/bin/env python3
"""The papers' experiments on modelled devices: ours beside theirs.

    python scripts/reproduce_papers.py                      # all, to docs/reproductions/<paper>-<date>.{json,md}
    python scripts/reproduce_papers.py rollpacker --processes 4
    python scripts/reproduce_papers.py --calibrate          # the calibration file anew, from published facts alone
    python scripts/reproduce_papers.py --page docs/reproductions/april-2026-11-22.json    # its page anew

jaxrl must be importable (`pip install -e .`, or `PYTHONPATH=.` in front). Lengths and costs come from the calibration
file, which was fitted to facts about the papers' baselines and never to a speed-up (`papers/calibration.py`); rounds,
engine, batcher and block accounting are those that a real run uses. `papers/cases.yaml` lists the runs,
`papers/pages` has the pages. What each number means, and what it rests on: docs/reproductions/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from papers import calibration, headline, pat_closed, rhymerl_closed, what_if
from papers.calibration import Calibration
from papers.cases import EXPERIMENTS, Case, case_of, cases_of, jobs_of
from papers.pages import page
from papers.problems import PROBLEMS
from papers.runs import Steps, header, read, run_together, write

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
    parser.add_argument("--headline", action="store_true", help="write the table of all newest results, and end")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="compute the other readings of a result anew, write its page, and end"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.papers if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"PAPER ({unknown[0]!r}) must be one of {', '.join(EXPERIMENTS)}")
    return options


def readings(paper: str, cases: Sequence[Case], known: Calibration, in_order: Callable[..., Iterable[Any]]) -> Any:
    """Speed-ups of the paper's main table in closed form, with one assumption changed at a time."""
    rows = EXPERIMENTS[paper]
    if paper == "pat":  # each series of bars at its largest length
        longest = {column.split(", ")[0]: entry for column, entry in rows["static 2"].items()}
        return pat_closed.readings([case_of(entry, scale=cases[0].scale) for entry in longest.values()], known)
    if paper == "rhymerl":
        return rhymerl_closed.readings(cases, known)
    if paper != "april":
        return {}
    wanted = [case_of(entry).alike for entry in rows["APRIL"].values()]
    return what_if.readings([case for alike in wanted for case in cases if case.alike == alike], known, in_order)


def finish(file: Path, record: dict[str, Any], runs: Sequence[Steps], known: Calibration, in_order: Any) -> str:
    """Writes a result with its readings in closed form, and its page, which is returned."""
    whole = {**record, "what_if": readings(record["paper"], [each.case for each in runs], known, in_order)}
    write(file, whole, runs)
    text = page(whole, runs)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def reproduce(paper: str, record: dict[str, Any], file: Path, options: argparse.Namespace, in_order: Any) -> str:
    """Runs an experiment, but for the runs that its file of the day has already. The result is kept after each run;
    `--page` makes the rest, should this be ended."""
    known, began = calibration.read(options.calibration), time.perf_counter()
    runs: list[Steps] = read(file)[1] if file.exists() else []
    done = {each.case for each in runs}
    scale = 32 if options.tiny else 1
    cases = cases_of(paper, options.steps, range(options.seeds), options.decode_steps, scale)
    jobs = [job for job in jobs_of(cases) if not done.issuperset(job)]
    for found in in_order(run_together, jobs, [known] * len(jobs)):
        for steps in found:
            if steps.case in done:
                continue
            runs.append(steps)
            took = f"{steps.wall_s:.1f} s, {time.perf_counter() - began:.0f} s so far"
            print(f"{len(runs)}/{len(cases)} {steps.case.title}: {took}", flush=True)
        write(file, {**record, "what_if": {}}, runs)
    return finish(file, record, runs, known, in_order)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.calibrate:
        calibration.write(calibration.calibrate(list(PROBLEMS.values())), options.calibration)
        print(f"wrote {options.calibration}: commit it before anything is run with it")
        return 0
    if options.headline:
        text = headline.page(options.out, calibration.read(options.calibration))
        (options.out / "headline.md").write_text(text, encoding="utf-8")
        return 0
    with ExitStack() as stack:
        in_order: Any = map
        if options.processes > 1:  # not by fork: the calling process may have threads
            in_order = stack.enter_context(ProcessPoolExecutor(options.processes, get_context("spawn"))).map
        if options.page:
            finish(options.page, *read(options.page), calibration.read(options.calibration), in_order)
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        for paper in options.papers or EXPERIMENTS:
            began = datetime.now(UTC)
            record = header(began, paper, arguments, options.calibration, options.tiny)
            file = options.out / f"{paper}-{began.date().isoformat()}.json"
            text = reproduce(paper, record, file, options, in_order)
            print(f"\n{text}\nwrote {file} and {file.with_suffix('.md').name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
