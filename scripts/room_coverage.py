"""Lines and branches that the suite runs, for each room; and what another run of it had.

    python scripts/room_coverage.py --out out/coverage.json                        # the default suite: an hour
    python scripts/room_coverage.py --out out/new.json --against out/coverage.json tests/train
    python scripts/room_coverage.py --read out/new.json --against out/coverage.json

Processes that tests start are counted, but not those that a signal ends before they write down what they ran. A room is
a folder of `jaxrl/`, a mechanism in `jaxrl/mechanisms/`, or a file at the top. The exit status is 1 if a room has less
than before, by more than `--slack` lines and branches: what ran depends on the clock in a few places.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def room_of(file: str) -> str:
    parts = Path(file).parts
    parts = parts[1:] if parts[0] == "jaxrl" else parts  # sharding/ and kernels/ are met by either path
    deep = 2 if parts[0] == "mechanisms" else 1
    return "/".join(parts[:deep])


def by_room(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(lines and branches that ran, all of them) of each room, from coverage's JSON."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, data in report["files"].items():
        one, counts = found[room_of(file)], data["summary"]
        one[0] += counts["covered_lines"] + counts["covered_branches"]
        one[1] += counts["num_statements"] + counts["num_branches"]
    return {room: (ran, known) for room, (ran, known) in sorted(found.items())}


def measure(out: Path, tests: list[str], processes: int) -> None:
    """Runs the suite, and writes coverage's JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    coverage = [sys.executable, "-m", "coverage"]
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        environment = os.environ | {"COVERAGE_FILE": str(Path(folder, "data")), "OMP_NUM_THREADS": "1"}
        pytest = ["-m", "pytest", "-q", "-p", "no:randomly", "--numprocesses", str(processes), "--dist", "worksteal"]
        ran = subprocess.run([*coverage, "run", *pytest, *tests], cwd=ROOT, env=environment, check=False)
        if ran.returncode:
            print(f"the suite ended with status {ran.returncode}", file=sys.stderr)
        for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(out.resolve())]):
            subprocess.run([*coverage, *command], cwd=ROOT, env=environment, check=True)


def table(now: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]], slack: int) -> tuple[str, bool]:
    """A line for each room; and whether one has less than before: a smaller share, and more than `slack` missed."""
    lines, worse = [f"{'room':<36}{'before':>20}{'now':>20}"], False
    for room, (ran, known) in now.items():
        old = before.get(room)
        was = "" if old is None else f"{old[0]:6} / {old[1]:5} {old[0] / max(old[1], 1):6.1%}"
        less = old is not None and ran * old[1] < old[0] * known and (known - ran) - (old[1] - old[0]) > slack
        worse |= less
        lines.append(f"{room:<36}{was:>20}{ran:6} / {known:5} {ran / max(known, 1):6.1%}{'  LESS' * less}")
    return "\n".join(lines), worse


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="of pytest; default: the default suite")
    parser.add_argument("--out", type=Path, help="runs the suite, and writes coverage's JSON here")
    parser.add_argument("--read", type=Path, help="the JSON of an earlier run, in place of a new one")
    parser.add_argument("--against", type=Path, help="the JSON of the run to compare with")
    parser.add_argument("--slack", type=int, default=5, help="lines and branches that a room may have less")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4), help="that share the tests")
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.read is None):
        parser.error("give either --out or --read")
    if arguments.out is not None:
        measure(arguments.out, arguments.tests, arguments.processes)
    now, before = (
        by_room(json.loads(path.read_text())) if path else {}
        for path in (arguments.out or arguments.read, arguments.against)
    )
    text, worse = table(now, before, arguments.slack)
    print(text)
    sys.exit(int(worse))
