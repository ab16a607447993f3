#!/usr/bin/env python3
"""Runs the tests marked `gpu` and writes how many passed.

    python -m gpu.tests [--json FOLDER]

Several processes share them, because compiling is what takes the time. The exit status is pytest's: 1 where one failed.
On a CPU all of them are skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench import records
from bench.measure import num_cores

ROOT = Path(__file__).resolve().parents[2]
MOST_PROCESSES = 12


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="append a dated record to a file in FOLDER")
    options = parser.parse_args(arguments)
    files = sorted(str(file) for file in (ROOT / "tests").glob("*/test_gpu*.py"))
    outcomes = Outcomes()
    # other plugins that the environment has may warn, and a warning is an error here
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    shared = [
        "-p",
        "xdist.plugin",
        "--numprocesses",
        str(max(1, min(MOST_PROCESSES, num_cores() * 3 // 4))),
        "--dist",
        "worksteal",
    ]
    status = pytest.main(
        ["-m", "gpu", "-q", "-rP", "--durations=10", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *shared, *files],
        plugins=[outcomes],
    )
    if options.json is not None:
        import jax

        head = records.header(
            "tests", records.describe_devices(jax.devices()[:1]), records.versions(), records.command(arguments)
        )
        case = {"case": "tests", **{name: outcomes.counts[name] for name in ("passed", "failed", "skipped")}}
        records.append_record(options.json, head | {"results": {"cases": [case], "failed": outcomes.failed}})
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
