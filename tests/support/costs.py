"""What each test of a run costs: `--costs FILE` writes a line of JSON for each, as it ends.

`seconds` of the clock, `cpu_s` of this process and `children_cpu_s` of processes that it started and waited for,
`programs` that jax asked its compiler or its cache for, `programs_s` to trace, lower and compile or load them. All with
set-up and tear-down: what a shared fixture costs stands with the first test that uses it. Programs of other processes
are not counted. Processes that share the tests append to one file.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jax import monitoring

COMPILE = "/jax/core/compile/backend_compile_duration"
PARTS = (COMPILE, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")


class Costs:
    """A plugin of pytest that appends to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.programs = 0
        self.programs_s = 0.0
        monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, duration_s: float, **_: object) -> None:
        self.programs += event == COMPILE
        self.programs_s += duration_s if event in PARTS else 0.0

    def so_far(self) -> dict[str, float]:
        cpu = os.times()
        return {
            "seconds": time.perf_counter(),
            "cpu_s": cpu.user + cpu.system,
            "children_cpu_s": cpu.children_user + cpu.children_system,
            "programs": self.programs,
            "programs_s": self.programs_s,
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self.so_far()
        result = yield
        after = self.so_far()
        spent = {name: round(after[name] - before[name], 3) for name in before}
        with self.path.open("a") as file:
            file.write(json.dumps({"test": item.nodeid} | spent) + "\n")
        return result
