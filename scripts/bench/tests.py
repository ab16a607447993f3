"""The tests marked `gpu`: how many passed.

    python scripts/bench.py tests [--json FOLDER]

Several processes share them, because compiling is what takes the time. The exit status is 1 where one failed. On a CPU
all of them are skipped.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Bench, Case, Record, Values, num_cores

ROOT = Path(__file__).resolve().parents[2]


class Outcomes:
    """A plugin of pytest: counts how tests ended, and keeps the names of those that did not pass."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Once for each phase of a test; a set-up that fails or skips is the last of them."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    options.repetitions = 1
    outcomes = Outcomes()

    def run(turn: int) -> Values:
        import pytest

        # other plugins that the environment has may warn, and a warning is an error here
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        processes = str(max(1, min(12, num_cores() * 3 // 4)))
        words = ["-p", "xdist.plugin", "--numprocesses", processes, "--dist", "worksteal", "-p", "no:cacheprovider"]
        words += ["-m", "gpu", "-q", "-rP", "--durations=10", f"--rootdir={ROOT}"]
        files = sorted(str(file) for file in (ROOT / "tests").glob("*/test_gpu*.py"))
        status = int(pytest.main([*words, *files], plugins=[outcomes]))
        counts = {name: float(outcomes.counts[name]) for name in ("passed", "failed", "skipped")}
        return counts | {"exit_status": float(status)}

    yield [Case({"case": "tests"}, run, extra={"names_of_failed": outcomes.failed})]


def _failed(record: Record) -> Iterator[str]:
    for case in record["results"]["cases"]:
        if case["exit_status"]:
            yield f"pytest ended with status {case['exit_status']:.0f}: {', '.join(case['names_of_failed'])}"


BENCH = Bench(__doc__, cases, place="apart", warm_up=0, average="mean", has_model=False, promises=_failed)
