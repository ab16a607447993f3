#!/usr/bin/env python3
"""Rollouts on many simulated hosts: what the order of results costs, and what the controller does.

    python scripts/bench_host_scale.py [--hosts 8 32 128] [--rows 64] [--spreads 0 0.1] [--seeds 0 1 2]
        [--orders logical arrival] [--plan-rows 64 256 1024] [--calls 300] [--json]

Tail batching on hosts of eight H100s each, with a batch of --rows responses for each host, 16 a prompt. Calls to hosts
have the latencies of section `simulate` (`scripts/bench/host_scale.py`). Short rounds and long ones are told apart.

- rollout: simulated seconds, in logical order and in order of arrival, and by how much the first is longer.
- controller: CPU seconds of everything but modelled devices, as a share of the simulated step, and ms for each plan.
- plan: CPU ms of the engine with the batcher of real runs, for plans of --plan-rows rows of one worker.
- call: ms until a Ray actor on this machine has such a plan and its result is back, and CPU ms of the controller
  (with --calls; needs ray).

Medians over the seeds, which draw the lengths and which host is how slow; the least and the most beside them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench import records
from bench.frame import Benchmark, Record, Session
from bench.host_scale import ScaleStep, call_seconds, configured, plan_seconds, play
from bench.measure import say

QUICK = {
    "hosts": [3], "rows": 16, "spreads": [0.1], "seeds": [0], "steps": 3, "longest": 200, "median": 40.0,
    "plan_rows": [8], "calls": 0,
}  # fmt: skip


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--hosts", type=int, nargs="+", default=[8, 32, 128], help="of eight devices (8 32 128)")
    made.add_argument("--rows", type=int, default=64, help="responses of a batch for each host (64)")
    made.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.1], help="shares (0 0.1)")
    made.add_argument("--orders", nargs="+", choices=("logical", "arrival"), default=["logical", "arrival"])
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of lengths and speeds (0 1 2)")
    made.add_argument("--steps", type=int, default=1, help="of each run (1)")
    made.add_argument("--median", type=float, default=2000.0, help="of the lognormal lengths, tokens (2000)")
    made.add_argument("--sigma", type=float, default=0.9, help="of the logarithm of a length (0.9)")
    made.add_argument("--longest", type=int, default=16384, help="cap on a length, tokens (16384)")
    made.add_argument("--plan-rows", type=int, nargs="+", default=[64, 256, 1024], help="(64 256 1024)")
    made.add_argument("--calls", type=int, default=300, help="of a Ray actor for each of --plan-rows; 0: none (300)")


def _check(options: argparse.Namespace) -> None:
    for hosts in options.hosts:
        if hosts * options.rows % 16:
            raise ValueError(f"--hosts ({hosts}) × --rows ({options.rows}) must be a multiple of 16 responses")
    if min(options.spreads) < 0:
        raise ValueError(f"--spreads ({min(options.spreads)}) must be at least 0")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    with session.on(records.describe_host(), is_timed=False):
        plans = {rows: statistics.median(plan_seconds(rows) for _ in range(3)) for rows in options.plan_rows}
        for rows, seconds in plans.items():
            of_row = f"{1e6 * seconds / rows:.1f} us a row"
            say(f"a plan of {rows} rows: {1e3 * seconds:.2f} ms of the controller's CPU, {of_row}")
        calls = {rows: call_seconds(rows, options.calls) for rows in options.plan_rows if options.calls}
        for rows, (wall, cpu) in calls.items():
            say(f"a call with a plan of {rows} rows: {1e3 * wall:.2f} ms, {1e3 * cpu:.2f} ms of the controller's CPU")
        cases = [
            case for hosts in options.hosts for spread in options.spreads for case in _cases(options, hosts, spread)
        ]
    return session.record(
        cases,
        plan_ms={rows: 1e3 * seconds for rows, seconds in plans.items()},
        call_ms={rows: [1e3 * each for each in found] for rows, found in calls.items()},
    )


def _cases(options: argparse.Namespace, hosts: int, spread: float) -> list[dict[str, Any]]:
    """A case for each kind of round and order."""
    found: dict[tuple[bool, str], list[list[ScaleStep]]] = {}
    for order in options.orders:
        for seed in options.seeds:
            lengths = options.median, options.sigma, options.longest
            config = configured(hosts, options.rows, seed, options.steps, order, lengths, host_spread=spread)
            gc.collect()  # what is left of the run before
            steps = play(config)
            for is_long in {step.is_long for step in steps}:
                found.setdefault((is_long, order), []).append([step for step in steps if step.is_long == is_long])
    return [
        _case(hosts, spread, is_long, order, runs, found.get((is_long, "arrival")) if order == "logical" else None)
        for (is_long, order), runs in sorted(found.items())
    ]


def _case(
    hosts: int,
    spread: float,
    is_long: bool,
    order: str,
    runs: list[list[ScaleStep]],
    arrived: list[list[ScaleStep]] | None,
) -> dict[str, Any]:
    def of_runs(value: Any) -> list[float]:
        """Least, median and most over the seeds, of each one's mean."""
        return _spread([statistics.mean(map(value, steps)) for steps in runs])

    case: dict[str, Any] = {
        **{"hosts": hosts, "spread": spread, "round": "long" if is_long else "short", "order": order},
        "rollout_s": of_runs(lambda step: step.rollout_s),
        "share": of_runs(lambda step: step.cpu_s / step.step_s),
        "ms_per_plan": of_runs(lambda step: 1e3 * step.cpu_s / step.plans),
    }
    if arrived is not None:
        seconds = [[statistics.mean(step.rollout_s for step in steps) for steps in each] for each in (runs, arrived)]
        case["longer"] = _spread([one / other - 1 for one, other in zip(*seconds, strict=True)])
    longer = "" if arrived is None else f", {_percent(case['longer'])} longer than by arrival"
    least, median, most = case["rollout_s"]
    say(
        f"{hosts:3} hosts, spread {spread:4.2f}, {case['round']:<5} {order:<7}: rollout {median:.2f} s ({least:.2f} to "
        f"{most:.2f}){longer}; controller {_percent(case['share'])} of the step, {case['ms_per_plan'][1]:.2f} ms a plan"
    )
    return case


def _spread(found: Sequence[float]) -> list[float]:
    return [min(found), statistics.median(found), max(found)]


def _percent(found: Sequence[float]) -> str:
    return f"{100 * found[1]:.1f} % ({100 * found[0]:.1f} to {100 * found[2]:.1f})"


COUNTS = ("rows", "steps", "longest")
BENCHMARK = Benchmark("host-scale", __doc__, _measure, _options, QUICK, COUNTS, _check, has_model=False)
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
