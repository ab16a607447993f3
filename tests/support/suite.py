"""What a run of the suite costs, and in which order one of limited time runs its tests. A plugin of pytest.

- `--budget`: prints the ten longest tests, CPU seconds by folder, and lines of tests over lines of product; a test not
  marked slow fails if its body takes more than `MAX_CPU_S`, unless `tests/long_tests.yaml` lists it with the reason.
- `--costs FILE`: appends a line of JSON for each test. `seconds` of the clock, `cpu_s` of this process and of those
  that it started and waited for, `programs` that jax compiled or took from its cache, `programs_s` in which it did.
- `--within S`: starts no test later than S seconds after the start. Files whose tests have the oldest results come
  first (`RESULTS`, in the folder of the compile cache), so that all come round.

A shared fixture counts for the first test that uses it. Processes that share the tests report to the first process.
"""

import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

MAX_CPU_S = 5.0
"""CPU seconds of a test's body, more on a slower core (`slowness`). What jax compiles, on all cores, is not counted: a
second run finds it in the cache."""
ROOT = Path(__file__).resolve().parents[2]
LISTED = ROOT / "tests" / "long_tests.yaml"
COMPILED = "/jax/core/compile/backend_compile_duration"
RESULTS = "slow-results.json"
"""When each slow test last ended: seconds since 1970 by node id."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="say what the tests cost; fail those that cost too much")
    parser.addoption("--costs", type=Path, metavar="FILE", help="append a line of JSON for each test: what it cost")
    parser.addoption(
        "--within", type=float, metavar="S", help="start no test later than S seconds after the start, the oldest first"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Suite(config), "suite-costs")


class Suite:
    """The state of one process: the clock, the costs of tests that ended, the earlier results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        shared: dict[str, Any] = getattr(config, "workerinput", {})
        self.is_first = not shared
        folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", "."))
        self.file = folder / RESULTS
        # a process that replaces one that died has the time that was left, and the same order
        self.began: float = shared.get("began", time.monotonic())
        self.results: dict[str, float] = shared["results"] if shared else read_results(self.file)
        self.programs, self.programs_s = 0, 0.0
        self.ended: dict[str, dict[str, float]] = {}
        self.listed: dict[str, str] = yaml.safe_load(LISTED.read_text()) or {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """What xdist passes to a process that it starts."""
        node.workerinput |= {"began": self.began, "results": self.results}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.getoption("--within") is not None:
            items[:] = oldest_first(items, self.results, random.Random(self.began))

    def pytest_collection_finish(self) -> None:
        if "jax" in sys.modules:  # else no test compiles anything, and importing jax takes a second
            from jax import monitoring

            monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_s: float, **_: object) -> None:
        if event == COMPILED:
            self.programs += 1
            self.programs_s += duration_s

    def so_far(self) -> dict[str, float]:
        spent = {"seconds": time.perf_counter(), "cpu_s": sum(os.times()[:4])}
        return spent | {"programs": self.programs, "programs_s": self.programs_s}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.before = self.so_far()
        limit_s: float | None = self.config.getoption("--within")
        if limit_s is not None and time.monotonic() - self.began > limit_s:
            pytest.skip(f"not started within {limit_s:g} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = self.so_far()
        result = yield
        spent = difference(before, self.so_far())
        cpu_s = spent["cpu_s"] - spent["programs_s"] * (os.cpu_count() or 1)
        if self.config.getoption("--budget") and cpu_s > MAX_CPU_S and not item.get_closest_marker("slow"):
            name, most_s = item.nodeid.partition("[")[0], MAX_CPU_S * slowness()
            if name not in self.listed and cpu_s > most_s:
                pytest.fail(
                    f"took {cpu_s:.1f} CPU seconds, and at most {most_s:.1f} are allowed: make it cheaper, mark it "
                    "slow, or list it in tests/long_tests.yaml with the reason",
                    pytrace=False,
                )
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        is_slow = item.get_closest_marker("slow") is not None
        item.user_properties.append(("cost", difference(self.before, self.so_far()) | {"is_slow": is_slow}))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.is_first:
            return
        if report.when == "call":
            self.results[report.nodeid] = time.time()
        if report.when == "teardown" and (spent := dict(report.user_properties).get("cost")):
            assert isinstance(spent, dict)
            is_slow = spent.pop("is_slow")
            self.ended[report.nodeid] = spent
            if (path := self.config.getoption("--costs")) is not None:
                with path.open("a") as file:
                    file.write(json.dumps({"test": report.nodeid} | spent) + "\n")
            if is_slow and report.nodeid in self.results:
                write_results(self.file, self.results)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not (self.is_first and self.config.getoption("--budget")):
            return
        terminalreporter.section("costs")
        for name, spent in sorted(self.ended.items(), key=lambda each: -each[1]["seconds"])[:10]:
            terminalreporter.write_line(f"{spent['seconds']:7.1f} s {spent['cpu_s']:7.1f} CPU s  {name}")
        folders = defaultdict(float)
        for name, spent in self.ended.items():
            folders["/".join(name.partition("::")[0].split("/")[:2])] += spent["cpu_s"]
        largest = sorted(folders.items(), key=lambda each: -each[1])
        line = ", ".join(f"{name.removeprefix('tests/')} {cpu_s:.0f}" for name, cpu_s in largest)
        programs = sum(spent["programs"] for spent in self.ended.values())
        terminalreporter.write_line(f"CPU s by folder: {sum(folders.values()):.0f} = {line}; {programs:.0f} programs")
        tests, product = lines("tests"), lines("jaxrl") + lines("sharding") + lines("kernels")
        terminalreporter.write_line(f"lines: {tests} of tests / {product} of product = {tests / product:.2f}")


def read_results(file: Path) -> dict[str, float]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):  # none yet, or cut off by the end of a machine
        return {}


def write_results(file: Path, results: dict[str, float]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(results))
    new.replace(file)


def oldest_first(items: list[pytest.Item], results: dict[str, float], chance: random.Random) -> list[pytest.Item]:
    """`items`, file after file: the one with the oldest result first, those without one in random order before them."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    order = {id(tests): (min(results.get(test.nodeid, 0.0) for test in tests), chance.random()) for tests in files}
    return [test for tests in sorted(files, key=lambda tests: order[id(tests)]) for test in tests]


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 3) for name in before}


def slowness() -> float:
    """How many times as long a loop takes as where `MAX_CPU_S` was set (a core of an EPYC); at least 1."""

    def loop_s() -> float:
        began_s, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        return time.process_time() - began_s

    return max(min(loop_s() for _ in range(3)) / 0.02, 1.0)


def lines(folder: str) -> int:
    return sum(file.read_bytes().count(b"\n") for file in (ROOT / folder).rglob("*.py") if not file.is_symlink())
